#!/bin/bash
# The library's own tests inside stock kernels, as root and as an ordinary user: 6.1 has no UFFDIO_MOVE, 6.12 has it.
#   library.sh [KERNEL..]
# Prints a line per program and its own totals.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
. scripts/lib/results.sh
build=${BUILD:-build} passed=0 failed=0 skipped=0 work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
[ $# -gt 0 ] || set -- 6.1 6.12
seconds=${VMEM_STRESS_SECONDS:-5}

# add LABEL ARGS..: one boot, its counts added.
add() {
  local label=$1 p f s; shift
  scripts/vm/run-guest.sh --label "$label" --log "$build/vm/$label.log" "$@" >"$work/out" 2>&1
  read -r p f s < <(tail -1 "$work/out" | tr -dc '0-9 \n')
  grep -vE '^[0-9]+ passed' "$work/out"
  passed=$((passed + ${p:-0})) failed=$((failed + ${f:-1})) skipped=$((skipped + ${s:-0}))
}
for kernel in "$@"; do
  programs=(-- "$build/tests/unit_tests" -- "$build/tests/system_tests")
  [ -x "$build/tests/stress/stress" ] && programs+=(-- "$build/tests/stress/stress" --seconds "$seconds" --bytes 24MiB --budget 8MiB --threads 4)
  add "$kernel" --kernel "$kernel" --user root --user nobody --timeout 560 --command-timeout 150 "${programs[@]}"

  # A container under Docker's default profile: neither system call is allowed. With the device passed in, and the
  # library's thread engine in place of io_uring, everything works.
  add "$kernel-container" --kernel "$kernel" --user root --user nobody --only-container --timeout 400 --command-timeout 150 \
    --before 'chmod 666 /dev/userfaultfd' -- "$build/tests/system_tests"
done
totals_line $passed $failed $skipped
[ $failed = 0 ] || exit 1
[ $passed != 0 ] || exit 77
