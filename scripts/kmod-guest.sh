#!/bin/bash
# Tests the module in a virtual machine: every program of tests/kmod, the trap's contract suite on
# the module, and the library's system and stress tests on it. The library's tests do not run on
# 6.1; on the debug kernel only those of the module run; blocks are 64 KiB where the size does not
# matter. VMEM_VM_FULL=1 runs all.
#   kmod-guest.sh [6.12|6.1|debug|numa]      numa: 6.12 with a second memory node that has no CPU
# KMOD_FUZZ_CALLS (10,000), KMOD_FUZZ_SECONDS (0), KMOD_RACE_SWEEPS (1), KMOD_RACE_SECONDS (0, for
# pairs and for threes) and KMOD_STRESS_SECONDS (10) lengthen the long tests. With VMEM_LONG=1 they
# take half an hour, twice a quarter of an hour and ten minutes on the debug kernel.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
kernel=${1:-6.12} build=${BUILD:-build} options=()
label=$kernel fuzz=0 race=0 stress=10
[ "${VMEM_LONG:-0}" = 1 ] && [ "$kernel" = debug ] && fuzz=1800 race=900 stress=600
export KMOD_FUZZ_CALLS=${KMOD_FUZZ_CALLS:-10000} KMOD_FUZZ_SECONDS=${KMOD_FUZZ_SECONDS:-$fuzz} KMOD_RACE_SWEEPS=${KMOD_RACE_SWEEPS:-1} \
  KMOD_RACE_SECONDS=${KMOD_RACE_SECONDS:-$race} KMOD_STRESS_SECONDS=${KMOD_STRESS_SECONDS:-$stress}
[ -z "${VMEM_VM_FULL:-}" ] || export KMOD_FULL=1
limit=$((1400 + KMOD_FUZZ_SECONDS + 2 * KMOD_RACE_SECONDS + KMOD_STRESS_SECONDS))
for name in ${!KMOD_*}; do options+=(--env "$name=${!name}"); done
[ "$kernel" = numa ] && { kernel=6.12; options+=(--node-without-cpus); }
# On the debug kernel the module is the build that can sleep where calls race; only race_test
# enables that.
delay=(); [ "$kernel" = debug ] && delay=(--delay)
module=$(scripts/kmod-build.sh "$kernel" ${delay[@]+"${delay[@]}"}); rc=$?
[ $rc = 0 ] || { echo "$module"; exit $rc; }
options+=(--module "${module%/kmod/vmem.ko}/peek/peek.ko")
[ "$kernel" = debug ] && options+=(--helper "$(scripts/vm/kernel.sh debug)/test_hmm.ko")
programs=()
for program in "$build"/tests/kmod/*_test; do
  [ "$label" = numa ] && [[ $program != *knobs_test && $program != *trap_test && $program != *pressure_test ]] && continue
  programs+=(-- "$program")
done
# Not on the debug kernel: the test that creates the maximum number of mappings (three minutes
# there), and the test of our own locks.
units='*Trap*/kmod'
[ "$label" != debug ] || [ -n "${VMEM_VM_FULL:-}" ] || units+='-*ALargeRangeIsDetached*:*UnderThePagersLock*'
[ "$label" != numa ] && [ -x "$build/tests/unit_tests" ] && programs+=(-- "$build/tests/unit_tests" "--gtest_filter=$units")
if [ "$label" != numa ] && { [ "$label" != 6.1 ] || [ -n "${VMEM_VM_FULL:-}" ]; }; then
  filter=(--gtest_filter=Module*:Api.*:Leases.*:FilesMore.*:Paging.*copy_64k-*RandomWritesBySeveral*:*LeaseAtRandom*)
  [ "$label" != debug ] || filter=(--gtest_filter=Module*)  # and every byte by the stress test
  [ -z "${VMEM_VM_FULL:-}" ] || filter=()
  [ -x "$build/tests/system_tests" ] && programs+=(-- "$build/tests/system_tests" ${filter[@]+"${filter[@]}"})
  [ -x "$build/tests/stress/stress" ] && programs+=(-- "$build/tests/stress/stress" --seconds 5 --bytes 48MiB --budget 24MiB --threads 4)
fi
exec scripts/vm/run-guest.sh --kernel "$kernel" --label "$label" --module "$module" --timeout "$limit" \
  ${options[@]+"${options[@]}"} "${programs[@]}"
