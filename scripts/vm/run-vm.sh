#!/bin/bash
# run-vm.sh KERNEL_IMAGE INITRD WORK [qemu arguments]: boots a test guest once and leaves WORK/console.log and WORK/results.log.
#
# Its two drives, WORK/data.img and WORK/raw.img, must exist. Environment: MEMORY (MiB), CPUS,
# THREAD (single or multi), TIMEOUT (s), APPEND (kernel command line). Exit: 0 to 100 the guest's
# verdict, 124 out of time, 125 died after it had started (panic), 126 died before userland (retry),
# 127 QEMU refused to start.
set -uo pipefail
image=$1 initrd=$2 work=$3; shift 3
: >"$work/console.log"; : >"$work/results.log"

# - Always software emulation: /dev/kvm may exist and still fail to boot a stock kernel, and results
#   must not depend on it.
# - no_timer_check: a starting kernel counts ticks, and panics ("IO-APIC + timer doesn't work") if
#   the host is too busy to deliver any.
# - -erms,-fsrm: without these flags kernel and C library do not copy by `rep movsb`, which is
#   emulated a byte at a time and made tests slower.
# - The drives are virtio: the NVMe drive of QEMU 7.2 was seen to stall for minutes and to end with
#   an I/O error unknown to the host. The console contains warnings, so that such a stall shows.
timeout --foreground -k 5 "${TIMEOUT:-300}" qemu-system-x86_64 \
  -accel "tcg,thread=${THREAD:-single}" -machine "${MACHINE:-q35}" -cpu max,-erms,-fsrm -smp "${CPUS:-1}" -m "${MEMORY:-2048}" \
  -nodefaults -no-user-config -display none -no-reboot \
  -serial "file:$work/console.log" -serial "file:$work/results.log" \
  -device isa-debug-exit,iobase=0xf4,iosize=0x04 \
  -drive "file=$work/data.img,if=none,id=data,format=raw,cache=unsafe,discard=unmap" -device virtio-blk-pci,serial=data,drive=data \
  -drive "file=$work/raw.img,if=none,id=raw,format=raw,cache=unsafe,discard=unmap" -device virtio-blk-pci,serial=raw,drive=raw \
  -kernel "$image" -initrd "$initrd" \
  -append "console=ttyS0 quiet loglevel=5 panic=-1 oops=panic log_buf_len=8M watchdog_thresh=60 rcupdate.rcu_cpu_stall_timeout=200 no_timer_check ${APPEND:-}" \
  "$@" </dev/null 2>"$work/qemu.log"
status=$?

# The verdict counts only if the exit port and the result line agree.
said=$(grep -ao '@@VERDICT [0-9]*' "$work/results.log" | tail -1 | cut -d' ' -f2)
if [ $status -ge 33 ] && [ $status -le 233 ] && [ $((status % 2)) = 1 ]; then
  verdict=$(((status - 1) / 2 - 16))
  [ "$verdict" = "${said:-none}" ] && exit $verdict
  exit 125
fi
[ $status = 124 ] || [ $status = 137 ] && exit 124
[ $status = 1 ] && [ -s "$work/qemu.log" ] && [ ! -s "$work/console.log" ] && { cat "$work/qemu.log" >&2; exit 127; }
grep -aq '@@USERLAND' "$work/console.log" || exit 126
exit 125
