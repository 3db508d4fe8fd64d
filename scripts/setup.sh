#!/bin/bash
# setup.sh [--quiet] [--check] [GROUP..]: installs the packages for building and testing, on Debian
# and Ubuntu.
#
# Groups:
#   build       the default
#   test, check, vm, kernel
#   wheel       make wheel, and an environment to install it into
#   package     Debian packages: debhelper, lintian, a clean system to try them in; 120 MB
#   torch       500 MB; without it the tests of vmem.torch skip
#   monitoring  a Prometheus server, for the tests of the dashboard
#   tools       tools that watch programs, 100 MB; without them tests/abi/tools.sh skips
#   model       model checkers for the paging protocol, 2 MB; without them their test skips
#   compilers   the oldest supported compiler, for scripts/compilers.sh here/..
# CUDA is never installed: the library builds without it and uses an existing toolkit. As root it
# installs without asking. Otherwise it prints the exact command, and goes on if the essentials are
# present. If nothing is missing it returns at once; --quiet then prints nothing. --check installs
# nothing and prints what is missing. Exit: 0; 1: an essential is missing; 3, with --check: another
# package is missing.
set -euo pipefail

declare -A packages=(
  [build]="g++ make pkg-config liburing-dev libnuma-dev liblz4-dev libzstd-dev libxxhash-dev libcli11-dev libmicrohttpd-dev"
  [test]="openssl libgtest-dev libbenchmark-dev python3-pytest python3-numpy python3-scipy python3-venv nlohmann-json3-dev cmake"
  [wheel]="python3-venv"
  [monitoring]="prometheus"
  [tools]="valgrind strace gdb"
  [model]="spin relacy-dev"
  [torch]="python3-torch"
  [check]="clang clang-format clang-tidy shellcheck groff-base"
  [vm]="qemu-system-x86 busybox-static cpio kmod xz-utils zstd e2fsprogs binutils libc6-dev dwarves sparse"
  [package]="dpkg-dev debhelper dh-dkms dh-python lintian mmdebstrap distro-info-data zstd"
  [compilers]="g++-11"
  [bench]="python3-minimal"
  [kernel]="gcc bc flex bison libelf-dev libssl-dev dwarves rsync cpio kmod xz-utils"
)
# A package that provides the name also counts (pkgconf for pkg-config).
declare -A commands=([pkg-config]=pkg-config [g++]=g++ [make]=make [clang-format]=clang-format [clang-tidy]=clang-tidy
  [shellcheck]=shellcheck [groff-base]=groff [qemu-system-x86]=qemu-system-x86_64 [cpio]=cpio [zstd]=zstd [cmake]=cmake [busybox-static]=busybox [spin]=spin)

quiet='' check='' groups=()
for word in "$@"; do
  case $word in
    --quiet) quiet=1 ;;
    --check) check=1 ;;
    *) [ -n "${packages[$word]:-}" ] || { echo "setup: no group '$word'; there are: ${!packages[*]}" >&2; exit 2; }; groups+=("$word") ;;
  esac
done
[ ${#groups[@]} -gt 0 ] || groups=(build)
# Tests that compile programs need a compiler, and so does the check below.
case " ${groups[*]} " in *" build "*) ;; *" test "*) groups=(build "${groups[@]}") ;; esac

wanted=()
for group in "${groups[@]}"; do for package in ${packages[$group]}; do wanted+=("$package"); done; done
missing=()
if command -v dpkg-query >/dev/null; then
  # A nonzero status only means that a name is unknown, which is normal on a fresh machine.
  installed=" $({ dpkg-query -W -f '${db:Status-Abbrev}${Package}\n' "${wanted[@]}" 2>/dev/null || true; } | sed -n 's/^ii *//p' | tr '\n' ' ') "
  for package in "${wanted[@]}"; do
    [[ $installed == *" $package "* ]] && continue
    [ -n "${commands[$package]:-}" ] && command -v "${commands[$package]}" >/dev/null && continue
    missing+=("$package")
  done
else
  echo "setup: this is no Debian or Ubuntu; their names for what is needed: ${wanted[*]}" >&2
fi

if [ ${#missing[@]} -eq 0 ]; then
  [ -n "$quiet" ] || echo "setup: ${groups[*]}: everything is there"
elif [ -n "$check" ]; then
  echo "setup: ${groups[*]}: missing: ${missing[*]}" >&2
  echo "setup: install with:  scripts/setup.sh ${groups[*]}    (all groups that tests need: make setup)" >&2
elif [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "setup: ${groups[*]}: installing ${missing[*]}" >&2
  export DEBIAN_FRONTEND=noninteractive
  exec 9<"$0" && flock 9  # make asks for several groups at once, and apt-get update does not wait for another
  install() { apt-get install -y -qq --no-install-recommends -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=120 "$@" </dev/null >&2; }
  # On a fresh machine the package lists are missing or old; fetch them only if the install fails
  # without.
  compgen -G '/var/lib/apt/lists/*_Packages*' >/dev/null || apt-get update -qq >&2 || true
  install "${missing[@]}" || { apt-get update -qq >&2 && install "${missing[@]}"; } ||
    # A package that this release lacks must not prevent the installation of others.
    for package in "${missing[@]}"; do install "$package" || echo "setup: apt-get could not install $package" >&2; done
else
  echo "setup: missing: ${missing[*]}" >&2
  echo "setup: install with:  sudo apt-get install -y --no-install-recommends ${missing[*]}" >&2
fi

# Test the essentials by compiling rather than by package: they may be installed by other means.
compiles() { echo "$1" | ${CXX:-g++} -std=c++20 -x c++ -fsyntax-only - 2>/dev/null; }
for group in "${groups[@]}"; do
  case $group in
    build)
      read -r compiler _ <<<"${CXX:-g++}"; command -v "$compiler" >/dev/null || { echo "setup: no C++ compiler (${CXX:-g++})" >&2; exit 1; }
      [ ${#missing[@]} -eq 0 ] || compiles '#include <liburing.h>
        #include <numa.h>
        #include <lz4.h>
        #include <zstd.h>
        #include <xxhash.h>' || { echo "setup: the libraries' headers are not there; the command above installs them" >&2; exit 1; } ;;
    test)
      [ ${#missing[@]} -eq 0 ] || compiles '#include <gtest/gtest.h>' || { echo "setup: no GoogleTest; the command above installs it" >&2; exit 1; } ;;
    *) ;;   # tests that need these skip visibly without them
  esac
done
[ -z "$check" ] || [ ${#missing[@]} -eq 0 ] || exit 3
