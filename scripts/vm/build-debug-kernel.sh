#!/bin/bash
# build-debug-kernel.sh [FOLDER]: builds the debug kernel from Debian's linux-source-6.12 with debug.config.
#
# FOLDER (default: $VMEM_DEBUG_KERNEL, else the cache) gets vmlinux-dbg, kdbg-build/ (to build modules against) and
# test_hmm.ko. 12 CPU-minutes, 6 GB of disk under TMPDIR while it runs. Packages: scripts/setup.sh kernel.
set -euo pipefail
. "$(dirname "$0")/common.sh"
target=$(realpath -m "${1:-${VMEM_DEBUG_KERNEL:-$cache/debug-6.12}}")
[ ! -f "$target/vmlinux-dbg" ] || { note "$target/vmlinux-dbg is there already; remove it to build again"; exit 0; }
work=$(mktemp -d "${TMPDIR:-/var/tmp}/vmem-kernel-XXXXXX"); trap 'rm -rf "$work"' EXIT
cd "$work"
apt-get -o APT::Sandbox::User=root download -qq linux-source-6.12 || die "the package linux-source-6.12 cannot be downloaded"
dpkg -x linux-source-6.12_*.deb . && rm ./*.deb
tar xf usr/src/linux-source-6.12.tar.*
cd linux-source-6.12
KCONFIG_ALLCONFIG=$here/debug.config make -s allnoconfig
# An option whose dependencies changed is dropped silently: check the ones that the tests need.
for option in KASAN PROVE_LOCKING DEBUG_KMEMLEAK DEBUG_ATOMIC_SLEEP FAILSLAB FAIL_PAGE_ALLOC DEVICE_PRIVATE USERFAULTFD IO_URING EXT4_FS VIRTIO_PCI VIRTIO_BLK ACPI_HMAT; do
  grep -q "^CONFIG_$option=y" .config || die "the configuration lost CONFIG_$option"
done
grep -q '^CONFIG_TEST_HMM=m' .config || die "the configuration lost CONFIG_TEST_HMM"
[ -z "${CONFIG_ONLY:-}" ] || { note "the configuration is complete"; exit 0; }
make -s -j"$(nproc)" vmlinux modules
make -s run-command KBUILD_RUN_COMMAND='$(srctree)/scripts/package/install-extmod-build '"$work/kdbg-build"
mkdir -p "$target"
rm -rf "$target/kdbg-build"; mv "$work/kdbg-build" "$target/"
cp lib/test_hmm.ko lib/test_hmm_uapi.h "$target/"
objcopy -S vmlinux "$target/vmlinux-dbg.new" && mv "$target/vmlinux-dbg.new" "$target/vmlinux-dbg"   # last: its presence means complete
note "debug kernel in $target"
