#!/bin/bash
# The virtual machine harness itself: any fault in a guest must appear as a failure, never as a
# pass. One boot per kind of fault, on one kernel. Prints its own totals.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
[ -z "${CI:-}" ] || [ -n "${VMEM_LONG:-}" ] || { echo "skipped: seven boots to try the harness itself: scripts/nightly.sh runs it"; exit 77; }
guest=scripts/vm/run-guest.sh kernel=${1:-6.12} passed=0 failed=0
export BUILD=${BUILD:-build}/vm-harness  # keeps the logs of intended failures apart

# expect NAME EXIT TOTALS PATTERN ARGS..: the run must exit with EXIT, report TOTALS, and print
# PATTERN.
expect() {
  local name=$1 want=$2 totals=$3 pattern=$4 out rc=0; shift 4
  out=$($guest --kernel "$kernel" "$@" 2>&1) || rc=$?
  if [ $rc = 77 ] && [ "$want" != 77 ]; then echo "$out"; exit 77; fi
  if [ $rc = "$want" ] && [ "$(tail -1 <<<"$out")" = "$totals" ] && grep -q "$pattern" <<<"$out"; then
    echo "ok   $name"; passed=$((passed + 1))
  else
    echo "FAIL $name: exit $rc, wanted $want and '$totals' and '$pattern'"; sed 's/^/  | /' <<<"$out"; failed=$((failed + 1))
  fi
}
expect "a status is carried out, 77 is a skip" 1 "2 passed, 1 failed, 1 skipped" "skipped: for a reason" \
  -- true -- sh -c 'exit 3' -- sh -c 'echo "skipped: for a reason"; exit 77' -- sh -c '[ "$(id -u)" = 0 ] && [ -d "$TMPDIR" ]'
expect "only skips is a skip" 77 "0 passed, 0 failed, 1 skipped" "nothing here" -- sh -c 'echo "skipped: nothing here"; exit 77'
expect "a kernel report fails a run whose tests passed" 1 "1 passed, 1 failed, 0 skipped" "kernel: .*WARNING: seeded" \
  -- sh -c 'echo "WARNING: seeded" >/dev/kmsg'
expect "a panic is a failure" 1 "1 passed, 3 failed, 0 skipped" "guest: died" \
  -- true -- sh -c 'echo c >/proc/sysrq-trigger; sleep 60' -- true
expect "a program that hangs is stopped, the others run" 124 "1 passed, 1 failed, 0 skipped" "thread .* sleep state S" \
  --command-timeout 3 -- sleep 1000 -- true
expect "a guest that hangs is stopped" 124 "0 passed, 2 failed, 0 skipped" "not done after" --timeout 25 --command-timeout 900 -- sleep 800
expect "a module that cannot be loaded is a failure" 1 "0 passed, 2 failed, 0 skipped" "guest: insmod" --module scripts/vm/init.sh:x -- true
echo "$passed passed, $failed failed, 0 skipped"
[ $failed = 0 ]
