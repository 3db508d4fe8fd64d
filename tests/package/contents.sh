#!/bin/bash
# The contents of the packages: nothing of PMDK's libvmem, nothing of the build machine, the same
# bytes each time.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
. tests/package/common.sh
make_packages
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
version=$(awk '/define VMEM_VERSION_MAJOR/{a=$3} /define VMEM_VERSION_MINOR/{b=$3} END{print a "." b}' include/vmem/vmem.h)
names="libvmem-tier1 libvmem-tier-dev python3-vmem vmem-tier-dkms vmem-tier-tools"
for deb in "$debs"/*.deb; do
  mkdir "$work/$(dpkg-deb -f "$deb" Package)" && dpkg-deb -R "$deb" "$work/$(dpkg-deb -f "$deb" Package)" || exit 1
done
paths() { (cd "$work" && find $names -path '*/DEBIAN' -prune -o ! -type d -print | sed 's|^[^/]*||' | sort); }

all_there() {
  local name
  for name in $names; do
    [ "$(sed -n 's/^Version: //p' "$work/$name/DEBIAN/control")" = "$version-1" ] || { echo "$name: not there, or not version $version-1"; return 1; }
  done
  [ "$(ls "$debs"/*.deb | wc -l)" = 5 ] || { echo "other packages than $names:"; ls "$debs"; return 1; }
}
# The list has comments. A path of the list that one of our packages installs is a collision.
collisions() { comm -12 <(grep -v '^#' tests/package/pmdk-vmem-1.8.paths | sort) -; }
no_collision() {
  local found
  found=$(paths | collisions)
  [ -z "$found" ] || { echo "also in PMDK's packages:"; echo "$found"; return 1; }
  # Check the comparison itself: the development link that `make install` makes would collide, and
  # is found.
  [ "$(printf '%s\n' /usr/lib/x86_64-linux-gnu/libvmem.so /usr/bin/vmemctl | sort | collisions)" = /usr/lib/x86_64-linux-gnu/libvmem.so ] || { echo "a collision is not seen"; return 1; }
  [ "$(paths | wc -l)" -gt 60 ] || { echo "only $(paths | wc -l) paths were looked at"; return 1; }
  ! grep -rE '^(Package|Provides|Conflicts|Replaces|Breaks): .*\blibvmem(1|-dev)\b' "$work"/*/DEBIAN/control
}
in_their_places() {
  local path missing=0
  while read -r path; do
    # shellcheck disable=SC2086  # a pattern
    compgen -G "$work/"$path >/dev/null || { echo "not there: $path"; missing=1; }
  done <<'PATHS'
libvmem-tier1/usr/lib/x86_64-linux-gnu/libvmem-tier.so.1
libvmem-tier1/usr/lib/x86_64-linux-gnu/vmem/libvmem-cuda-calls.so
libvmem-tier-dev/usr/include/vmem/vmem.h
libvmem-tier-dev/usr/include/vmem/vmem.hpp
libvmem-tier-dev/usr/include/vmem/device.cuh
libvmem-tier-dev/usr/include/vmem/detail/paging_protocol.h
libvmem-tier-dev/usr/lib/x86_64-linux-gnu/libvmem-tier.so
libvmem-tier-dev/usr/lib/x86_64-linux-gnu/libvmem-tier.a
libvmem-tier-dev/usr/lib/x86_64-linux-gnu/pkgconfig/vmem.pc
libvmem-tier-dev/usr/lib/x86_64-linux-gnu/cmake/vmem/vmem-config.cmake
libvmem-tier-dev/usr/lib/x86_64-linux-gnu/cmake/vmem/vmem-config-version.cmake
libvmem-tier-dev/usr/share/man/man3/libvmem-tier.3.gz
libvmem-tier-dev/usr/share/man/man3/vmem_create.3vmem.gz
libvmem-tier-dev/usr/share/man/man3/vmem_get.3vmem.gz
vmem-tier-tools/usr/bin/vmemctl
vmem-tier-tools/usr/share/man/man1/vmemctl.1.gz
vmem-tier-tools/usr/share/man/man7/vmem-settings.7.gz
vmem-tier-dkms/usr/src/vmem-*/dkms.conf
vmem-tier-dkms/usr/lib/udev/rules.d/60-vmem.rules
vmem-tier-dkms/etc/modprobe.d/vmem.conf
python3-vmem/usr/lib/python3/dist-packages/vmem/__init__.py
python3-vmem/usr/lib/python3/dist-packages/vmem-*.dist-info/METADATA
PATHS
  # The package has every file that Kbuild can use and no build product. delay/ is for tests, and
  # only their builds include it.
  diff <(cd kmod && find . -type f \( -name '*.[ch]' -o -path './probes/*.sh' -o -name Kbuild -o -name Makefile \) ! -path './delay/*' ! -name '*.mod.c' -printf '%P\n' | sort) <(cd "$work"/vmem-tier-dkms/usr/src/vmem-*/kmod && find . -type f ! -name COPYING -printf '%P\n' | sort) || missing=1
  [ "$(readlink "$work"/libvmem-tier-dev/usr/lib/*/libvmem-tier.so)" = libvmem-tier.so.1 ] || { echo "libvmem-tier.so is no link to libvmem-tier.so.1"; missing=1; }
  return $missing
}
begins() { printf '(^|[^[:alnum:]_./-])%s([^[:alnum:]_.-]|$)' "$(sed 's/[].[*^$+?(){}|\\]/\\&/g' <<<"$1")"; }
# A package is for other machines: it names no folder of this one. Stripped programs name none
# either.
knows_no_machine() {
  local top found
  top=$(pwd)
  # Match only the beginning of a path: a tree in /src must not match /usr/src.
  found=$(grep -rlE -e "$(begins "$top")" -e "$(begins "$(realpath "$build")")" "$work"/*/usr "$work"/*/DEBIAN; grep -rlE -- '-L/|/usr/local/cuda-|targets/x86_64-linux/lib/' "$work"/*/usr/lib/*/pkgconfig)
  [ -z "$found" ] || { echo "these name a folder of this machine:"; echo "$found"; return 1; }
}
same_again() {
  ( umask 077; TZ=Pacific/Auckland LC_ALL=C make BUILD="$build" DEB="$work/again" NO_SETUP=1 deb ) || return 1
  (cd "$debs" && sha256sum -- *.deb) >"$work/sums" && (cd "$work/again" && sha256sum -c --quiet "$work/sums")
}
step "five packages of version $version" all_there
step "no path and no name of PMDK's libvmem" no_collision
step "each file in its package" in_their_places
step "no folder of this machine in them" knows_no_machine
step "made again with another umask, time zone and locale: the same bytes" same_again
finish
