#!/bin/bash
# deb.sh FOLDER VERSION [STAGE]: makes the Debian packages of this source in FOLDER. `make deb` is the usual way to it.
#
# STAGE: a folder filled by `make install`, which is packaged. Without it the library is compiled
# again in FOLDER with the distribution's flags (hardening), as for packages to distribute; that
# takes minutes.
#
# The Debian version is VERSION-DEB_REVISION (1). The same commit gives byte-identical packages:
# their time is SOURCE_DATE_EPOCH, else that of the commit, else that of CHANGELOG.md.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2p' "$0" | cut -c3- >&2; exit 2; }
mkdir -p "$1"; out=$(realpath "$1") version=$2 stage=${3:+$(realpath "$3")}
cd "$(dirname "$0")/.."
export LC_ALL=C.UTF-8 TZ=UTC
umask 022
unset MAKEFLAGS MFLAGS MAKELEVEL DESTDIR PREFIX LIBDIR BUILD
for tool in dpkg-buildpackage dh dh_dkms dh_python3; do
  command -v $tool >/dev/null || { echo "deb: $tool is not installed; scripts/setup.sh package installs it" >&2; exit 1; }
done
for other in "$(sed -n 's/^PACKAGE_VERSION="\(.*\)"/\1/p' kmod/dkms.conf) kmod/dkms.conf" \
  "$(sed -n 's/^__version__ = "\(.*\)"/\1/p' python/vmem/_version.py) python/vmem/_version.py"; do
  [ "${other%% *}" = "$version" ] || { echo "deb: ${other#* } says version ${other%% *}, include/vmem/vmem.h says $version; make them agree" >&2; exit 1; }
done
if [ -z "${SOURCE_DATE_EPOCH:-}" ]; then
  SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || stat -c %Y CHANGELOG.md)
fi
export SOURCE_DATE_EPOCH

tree=$out/vmem-tier-$version
rm -rf "$tree" "$out"/{libvmem-tier,python3-vmem,vmem-tier}*.{deb,changes,buildinfo}
mkdir -p "$tree"
if git rev-parse --git-dir >/dev/null 2>&1; then git ls-files -z --cached --others --exclude-standard
else find . -path './build*' -prune -o -type f ! -name '*.o' ! -name '*.ko' -print0; fi |
  while IFS= read -r -d '' file; do [ ! -e "$file" ] || printf '%s\0' "$file"; done |
  tar -c --null -T - | tar -x --no-same-owner --no-same-permissions -C "$tree"
cp -r packages/deb "$tree/debian"
# Short, because each package has CHANGELOG.md.
cat >"$tree/debian/changelog" <<TEXT
vmem-tier ($version-${DEB_REVISION:-1}) unstable; urgency=medium

  * libvmem $version: see changelog.gz.

 -- The libvmem authors <maintainers@libvmem.invalid>  $(date -R -u -d "@$SOURCE_DATE_EPOCH")
TEXT
cd "$tree"
# A fresh build puts debug symbols into separate packages; a packaged stage leaves them in the build
# folder.
if [ -n "$stage" ]; then
  export VMEM_STAGE=$stage DEB_BUILD_OPTIONS="noautodbgsym ${DEB_BUILD_OPTIONS:-}"
  unset CFLAGS CXXFLAGS CPPFLAGS LDFLAGS
fi
DEB_BUILD_OPTIONS="${DEB_BUILD_OPTIONS:-} parallel=$(nproc)" dpkg-buildpackage -b -us -uc ${stage:+-d} >"$out/log" 2>&1 ||
  { tail -40 "$out/log" >&2; echo "deb: dpkg-buildpackage failed; the whole of it: $out/log" >&2; exit 1; }
cd "$out"
[ -z "$stage" ] || rm -rf "$tree"
ls "$out"/*.deb
