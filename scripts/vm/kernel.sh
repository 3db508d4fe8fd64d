#!/bin/bash
# kernel.sh 6.1|6.12|debug [--image|--headers]: prints the folder, boot image or module build folder
# of a test kernel, and downloads a stock one first. Exit 77 with a reason if there is none.
#   make -C kmod KDIR="$(scripts/vm/kernel.sh 6.12 --headers)"
set -euo pipefail
. "$(dirname "$0")/common.sh"
name=${1:?usage: kernel.sh 6.1|6.12|debug [--image|--headers]}
case $name in
  debug) kernel_dir debug >/dev/null || unpack_debug_kernel || :
         dir=$(kernel_dir debug) || skip "debug kernel: no vmlinux-dbg in ${VMEM_DEBUG_KERNEL:-$cache/debug-6.12}; make debug-kernel builds it" ;;
  *)     dir=$("$here/prepare-stock.sh" "$name") || { rc=$?; echo "$dir"; exit "$rc"; } ;;
esac
case ${2:-} in
  --image)   kernel_image "$dir" ;;
  --headers) kernel_headers "$dir" ;;
  '')        echo "$dir" ;;
  *)         die "unknown option $2" ;;
esac
