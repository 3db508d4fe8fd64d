#!/bin/bash
# kmod-build.sh 6.1|6.12|debug [--delay]: builds the module for a test kernel with W=1 in its own
# folder and prints the path of vmem.ko. peek/peek.ko beside it is for some tests. --delay: a build
# for the race tests, which can sleep where calls race (delay_us). A warning is a failure. Exit 77
# with a reason if there is no such kernel.
set -euo pipefail
cd "$(dirname "$0")/.."
name=${1:?usage: kmod-build.sh 6.1|6.12|debug [--delay]} delay=${2:+y}
headers=$(scripts/vm/kernel.sh "$name" --headers) || { rc=$?; echo "$headers"; exit "$rc"; }
work=$(realpath -m "${BUILD:-build}/kmod-$name${delay:+-delay}"); mkdir -p "$work/include/vmem"
exec 9>"$work/lock"; flock 9  # several tests need it at once
cp -ru kmod tests/kmod/peek "$work/"; cp -u include/vmem/vmem_uapi.h "$work/include/vmem/"
make -C "$work/kmod" KDIR="$headers" W=1 ${delay:+VMEM_DELAY=y} >"$work/log" 2>&1 &&
  make -C "$headers" M="$work/peek" W=1 modules >>"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
if grep -E 'warning:|error:' "$work/log" >&2; then exit 1; fi
echo "$work/kmod/vmem.ko"
