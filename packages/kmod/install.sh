#!/bin/bash
# install.sh [--dkms]: installs the module for the running kernel (or KDIR=), its udev rule and an example for modprobe.d.
# --dkms registers the source instead, so that every later kernel gets its own build. Needs root; DESTDIR is respected
# for the files, not for the module.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd); repo=$(cd "$here/../.." && pwd)
version=$(sed -n 's/^PACKAGE_VERSION="\(.*\)"/\1/p' "$repo/kmod/dkms.conf")
if [ "${1:-}" = --dkms ]; then
  src=${DESTDIR:-}/usr/src/vmem-$version
  rm -rf "$src"; mkdir -p "$src/include/vmem" "$src/kmod"
  cp "$repo"/kmod/{Kbuild,Makefile,COPYING} "$repo"/kmod/*.[ch] "$src/kmod/"; cp -r "$repo/kmod/probes" "$src/kmod/"
  cp "$repo/include/vmem/vmem_uapi.h" "$src/include/vmem/"; cp "$repo/kmod/dkms.conf" "$src/dkms.conf"
  [ -n "${DESTDIR:-}" ] || { dkms add -m vmem -v "$version"; dkms install -m vmem -v "$version"; }
else
  make -C "$repo/kmod" ${KDIR:+KDIR="$KDIR"} install
fi
install -D -m 644 "$here/60-vmem.rules" "${DESTDIR:-}/usr/lib/udev/rules.d/60-vmem.rules"
install -D -m 644 "$here/vmem.conf" "${DESTDIR:-}/etc/modprobe.d/vmem.conf"
[ -n "${DESTDIR:-}" ] || { getent group vmem >/dev/null || groupadd --system vmem; udevadm control --reload || true; }
echo "now: modprobe vmem; members of the group vmem may use it"
