#!/bin/bash
# compilers.sh [--quick] [--flags FLAGS] [RELEASE/COMPILER..]: builds the library, the tools, the examples and every test with other
# compilers, each in a clean system of a Debian release that packages it; nothing is run there.
#
# Without names: the oldest and the newest that are supported (CI). "all": every one of the list below. --quick leaves the tests
# out. --flags: "-O0" unless given; some warnings need "-O2". The last line is "N passed, N failed, N skipped".
#
# A clean system (350 MB) is made by mmdebstrap from the archive that apt of this machine uses, and kept in
# ${VMEM_CACHE:-~/.cache/vmem}/compilers for 30 days. It needs root, mounts, and the network the first time.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
declare -A compilers=(
  [bookworm]="g++-11 g++-12 clang++-14 clang++-16"
  [trixie]="g++-12 g++-13 g++-14 clang++-17 clang++-19"
  [sid]="g++-15 clang++-21"
)
libraries=make,pkg-config,libc6-dev,liburing-dev,libnuma-dev,liblz4-dev,libzstd-dev,libxxhash-dev,libcli11-dev,libmicrohttpd-dev,libgtest-dev,libbenchmark-dev,nlohmann-json3-dev
passed=0 failed=0 skipped=0
finish() { echo "$passed passed, $failed failed, $skipped skipped"; [ $failed = 0 ]; exit; }
skip_all() { echo "skipped: $1"; skipped=1; finish; }

targets="lib tools examples build-tests" flags=-O0 wanted=()
while [ $# -gt 0 ]; do
  case $1 in
    --quick) targets="lib tools examples" ;;
    --flags) flags=$2; shift ;;
    all) for release in bookworm trixie sid; do for compiler in ${compilers[$release]}; do wanted+=("$release/$compiler"); done; done ;;
    ?*/?*) wanted+=("$1") ;;
    *) sed -n '2,9s/^# \?//p' "$0"; exit 2 ;;
  esac
  shift
done
[ ${#wanted[@]} -gt 0 ] || wanted=(bookworm/g++-11 trixie/g++-14)

[ "$(id -u)" = 0 ] || skip_all "only root may make and enter a clean system"
for tool in mmdebstrap zstd; do command -v $tool >/dev/null || skip_all "$tool is not installed (scripts/setup.sh package)"; done
unshare --mount --pid --fork true 2>/dev/null || skip_all "mounts in a namespace of one's own are not permitted here (unshare: CAP_SYS_ADMIN)"
work=$(realpath "${BUILD:-build}")/compilers
cache=${VMEM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/vmem}/compilers
mkdir -p "$work" "$cache"
exec 9>"$work/lock"; flock -n 9 || skip_all "another compilers.sh is at work in $work"
find "$cache" -name '*.tar.zst' -mtime +30 -delete
find "$cache" -name '.fresh-*' -mmin +120 -delete

# clean_system RELEASE PACKAGES: prints the archive that holds it, made if need be; or why it could not be.
clean_system() {
  local release=$1 include=$2 tarball fresh archive
  tarball=$cache/$release-$(sha256sum <<<"$include" | cut -c1-12).tar.zst
  if [ ! -s "$tarball" ]; then
    archive=$(apt-get indextargets --format '$(ORIGIN) $(REPO_URI) $(COMPONENT) $(RELEASE)' 'Created-By: Packages' 2>/dev/null | awk '$1 == "Debian" && $3 == "main" && $4 !~ /security/ {print $2; exit}')
    # How apt reaches the archive from here: proxies and the like.
    apt-config dump Acquire | grep -E '^Acquire::(http|https|Retries|ForceIPv4|Check-Valid-Until)\b.* "..*";$' >"$work/apt.conf"
    fresh=$(mktemp "$cache/.fresh-XXXXXX.tar") || return 1
    # shellcheck disable=SC2086  # no archive: mmdebstrap knows one
    mmdebstrap --mode=root --variant=apt --include="$include" --aptopt='Acquire::Languages "none"' --aptopt="$work/apt.conf" --aptopt='APT::Install-Recommends "false"' \
      --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' --format=tar "$release" "$fresh" $archive >"$work/$release.log" 2>&1 </dev/null ||
      { rm -f "$fresh"; tail -3 "$work/$release.log"; return 1; }
    zstd -q -3 -T0 --rm -f "$fresh" -o "$fresh.zst" && mv "$fresh.zst" "$tarball" || return 1
  fi
  echo "$tarball"
}

# inside ROOT COMMAND..: mounts and processes are in namespaces of their own and end with the command; the sources are read-only.
inside() {
  unshare --mount --pid --fork --kill-child bash -c 'set -e; root=$1; shift; mount --make-rprivate /
    mount --rbind /dev "$root/dev"; mount -t proc proc "$root/proc"; mount --bind . "$root/src"; mount -o remount,bind,ro "$root/src"
    exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 TMPDIR=/tmp chroot "$root" "$@"' inside "$@"
}

# The programs and libraries of the packages of a compiler: g++-14 is both, clang++-19 lies in clang-19.
package_of() { echo "${1/clang++/clang}"; }

for each in "${wanted[@]}"; do
  release=${each%%/*} compiler=${each#*/} began=$SECONDS
  # All compilers of the default, or of "all", share one system a release.
  include=$libraries
  for other in $(printf '%s\n' "${wanted[@]}" | sed -n "s|^$release/||p"); do include+=,$(package_of "$other"); done
  root=$work/$release
  if [ ! -e "$root/.made" ] || [ "$(cat "$root/.made")" != "$include" ]; then
    rm -rf --one-file-system "$root" && mkdir -p "$root"
    if ! tarball=$(clean_system "$release" "$include"); then
      skipped=$((skipped + 1)); printf 'skip %s\nskipped: no clean system could be made: %s\n' "$each" "$(tr '\n' ' ' <<<"$tarball")"; continue
    fi
    tar -I zstd -xf "$tarball" -C "$root" --exclude=./dev/* || { echo "FAIL $each: $tarball cannot be unpacked"; failed=$((failed + 1)); continue; }
    mkdir -p "$root"/{src,dev,proc}
    echo "$include" >"$root/.made"
    echo "     a clean $release is there ($((SECONDS - began)) s)"; began=$SECONDS
  fi
  cc=${compiler/clang++/clang}; cc=${cc/g++/gcc}
  rm -rf "$root/made"; log=$work/$release-$compiler.log
  # shellcheck disable=SC2086  # targets are words
  if inside "$root" make -C /src -k -j"$(nproc)" NO_SETUP=1 CUDA=no BUILD=/made CXX="$compiler" CC="$cc" CXXFLAGS="$flags" CFLAGS="$flags" $targets >"$log" 2>&1; then
    passed=$((passed + 1)); printf 'ok   %s, %s: %s (%d s)\n' "$each" "$flags" "$targets" $((SECONDS - began))
  else
    failed=$((failed + 1)); printf 'FAIL %s, %s (%s)\n' "$each" "$flags" "$log"; grep -E 'error|undefined' "$log" | head -20 | sed 's/^/       /'; grep -qE 'error|undefined' "$log" || tail -5 "$log"
  fi
  rm -rf "$root/made"
done
for each in "${wanted[@]}"; do rm -rf --one-file-system "${work:?}/${each%%/*}"; done
finish
