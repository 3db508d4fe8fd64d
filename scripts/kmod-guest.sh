#!/bin/bash
# The module in a virtual machine: every test program of tests/kmod, and the trap's contract suite over it.
#   kmod-guest.sh [6.12|6.1|debug|numa]      numa: 6.12 with a second memory node that has no CPU
# KMOD_FUZZ_CALLS and KMOD_STRESS_SECONDS make the long tests longer.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
kernel=${1:-6.12} build=${BUILD:-build} options=()
label=$kernel
[ "$kernel" = numa ] && { kernel=6.12; options+=(--node-without-cpus); }
module=$(scripts/kmod-build.sh "$kernel"); rc=$?
[ $rc = 0 ] || { echo "$module"; exit $rc; }
[ "$kernel" = debug ] && options+=(--helper "$(scripts/vm/kernel.sh debug)/test_hmm.ko")
programs=()
for program in "$build"/tests/kmod/*_test; do
  [ "$label" = numa ] && [[ $program != *knobs_test && $program != *trap_test ]] && continue
  programs+=(-- "$program")
done
[ "$label" != numa ] && [ -x "$build/tests/unit_tests" ] && programs+=(-- "$build/tests/unit_tests" '--gtest_filter=*Trap*/kmod')
exec scripts/vm/run-guest.sh --kernel "$kernel" --label "$label" --module "$module" --timeout 1100 \
  --env "KMOD_FUZZ_CALLS=${KMOD_FUZZ_CALLS:-10000}" --env "KMOD_STRESS_SECONDS=${KMOD_STRESS_SECONDS:-10}" \
  ${options[@]+"${options[@]}"} "${programs[@]}"
