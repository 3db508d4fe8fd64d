#!/bin/bash
# Loads and unloads the module while contexts open, close and are killed: the kernel never crashes,
# and the module never stays.
#   unload.sh [6.12|6.1|debug]
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
kernel=${1:-6.12} build=${BUILD:-build}
module=$(scripts/kmod-build.sh "$kernel"); rc=$?
[ $rc = 0 ] || { echo "$module"; exit $rc; }
script='
  (for i in $(seq 12); do trap_test --gtest_filter="*Killed*:*EndOfTheRuntime*" >/dev/null 2>&1; done; touch /tmp/done) &
  n=0; busy=0
  while [ ! -e /tmp/done ]; do
    if rmmod vmem 2>/dev/null; then n=$((n + 1)); insmod /vmem.ko || exit 1; else busy=$((busy + 1)); fi
  done
  wait; echo "$n times unloaded, $busy times refused because it was in use"
  # A module in use must refuse, whatever the loop above happened to meet.
  exec 3<>/dev/vmem || exit 1; if rmmod vmem 2>/dev/null; then echo "unloaded while a context was open"; exit 1; fi; exec 3<&-
  [ $n -gt 0 ] && rmmod vmem && insmod /vmem.ko fault_timeout_ms=500 frame_limit_mib=64 &&
  [ $(cat /sys/class/misc/vmem/fault_timeout_ms) = 500 ] && [ $(cat /sys/class/misc/vmem/frame_limit_bytes) = 67108864 ]'
exec scripts/vm/run-guest.sh --kernel "$kernel" --label "$kernel" --module "$module" --file "$module:/vmem.ko" \
  --file "$build/tests/kmod/trap_test:/bin/trap_test" -- sh -c "$script" -- "$build/tests/kmod/uapi_test"
