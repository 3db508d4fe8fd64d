#!/bin/bash
# nightly.sh: what is too long for .ci/run: every compiler of scripts/compilers.sh, the README's commands on bare systems
# (scripts/bare.sh), and the long forms of the tests. Hours. The last line is "N passed, N failed, N skipped".
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
exec </dev/null
export LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive BUILD=${BUILD:-build}
passed=0 failed=0 skipped=0
logs=$BUILD/nightly; mkdir -p "$logs"
# part NAME COMMAND..: its totals are its last line of that form.
part() {
  local name=$1 status line p f s; shift
  echo "##### $name"
  "$@" 2>&1 | tee "$logs/$name.log"
  status=${PIPESTATUS[0]}
  line=$(grep -aE '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' "$logs/$name.log" | tail -1)
  read -r p f s < <(tr -dc '0-9 \n' <<<"${line:-0 0 0}")
  [ $((p + f + s)) != 0 ] && { [ "$status" = 0 ] || [ "$f" != 0 ]; } || { f=$((f + 1)); echo "nightly: $name ended with status $status and counted ${line:-nothing}"; }
  passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
}
part compilers scripts/compilers.sh --unit all
part bare scripts/bare.sh demo test
part tests env VMEM_LONG=1 VMEM_STRESS_SECONDS=120 make test
echo "#####"
grep -haE '^again: ' "$logs"/*.log
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ]
