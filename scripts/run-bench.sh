#!/bin/bash
# run-bench.sh [ARGS..]: runs every benchmark that is built with ARGS. Figures go to
# $BUILD/bench/NAME.json, with a plot beside each.
#
# Measures on the disk under TMPDIR. The machine should be quiet; tests/bench/README.md says what
# each program compares.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
build=${BUILD:-build} failed=0
mkdir -p "$build/bench"
for program in $(find "$build/tests/bench" -maxdepth 1 -type f -perm -u+x ! -name '*.o' 2>/dev/null | sort); do
  name=${program##*/}
  echo "== $name"
  timeout -k 3 "${BENCH_TIMEOUT:-3600}" "$program" --json "$build/bench/$name.json" "$@" || { echo "FAIL $name: status $?"; failed=1; continue; }
  [ "$name" != host_bench ] || scripts/plot-bench.sh "$build/bench/$name.json" || [ $? = 77 ] || failed=1
done
exit $failed
