#!/bin/sh
# Runs the GPU tests that `make gpu-tests` built; builds nothing. Each program runs in one process, except tests of suites
# named *Loss*, which end with a dead CUDA context: one process each. Ends with a table.
#
#   scripts/gpu-tests.sh [-f FILTER] [-b] [FOLDER]
#     -f FILTER  a gtest filter for every program       -b  also run the programs named *_bench
#     FOLDER     where the programs are (build/gpu)
# Environment: GPU_TEST_TIMEOUT seconds for a whole program (240), GPU_LOSS_TIMEOUT for one Loss test (60).
# Exit code: 0 all passed, 1 something failed, 77 there is no GPU.
set -u
filter='*'
bench=
while getopts f:b option; do
	case $option in
	f) filter=$OPTARG ;;
	b) bench=1 ;;
	*) exit 2 ;;
	esac
done
shift $((OPTIND - 1))
folder=${1:-build/gpu}
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
table=$logs/table
: >"$table"
failed=0
ran=0
skipped_all=0

# row NAME RESULT PASSED FAILED SKIPPED SECONDS
row() {
	printf '%-66s %-8s %6s %6s %6s %7s\n' "$@" >>"$table"
}

# one NAME TIMEOUT PROGRAM ARGS..
one() {
	name=$1
	limit=$2
	shift 2
	log=$logs/log
	start=$(date +%s)
	{
		timeout -k 3 "$limit" stdbuf -oL -eL "$@" 2>&1
		echo "exit code $?" >"$logs/code"
	} | tee "$log"
	read -r _ _ code <"$logs/code"
	seconds=$(($(date +%s) - start))
	passed=$(grep -c '^\[       OK \]' "$log")
	bad=$(grep -c '^\[  FAILED  \].*ms)$' "$log")
	skipped=$(grep -c '^\[  SKIPPED \].*ms)$' "$log")
	ran=$((ran + 1))
	case $code in
	0) result=ok ;;
	77) result=no-gpu && skipped_all=$((skipped_all + 1)) ;;
	124 | 137) result=TIMEOUT && failed=1 ;;
	*) result="FAIL($code)" && failed=1 ;;
	esac
	row "$name" "$result" "$passed" "$bad" "$skipped" "$seconds"
}

for program in "$folder"/*_test; do
	[ -x "$program" ] || continue
	name=${program##*/}
	one "$name" "${GPU_TEST_TIMEOUT:-240}" "$program" --gtest_filter="$filter-*Loss*"
	"$program" --gtest_list_tests --gtest_filter="$filter" 2>/dev/null |
		awk '/^[^ ]/ { suite = $1 } /^  / && suite ~ /Loss/ { print suite $1 }' >"$logs/loss"
	while read -r test; do
		one "$test" "${GPU_LOSS_TIMEOUT:-60}" "$program" --gtest_filter="$test"
	done <"$logs/loss"
done
if [ -n "$bench" ]; then
	for program in "$folder"/*_bench; do
		[ -x "$program" ] && one "${program##*/}" "${GPU_TEST_TIMEOUT:-240}" "$program"
	done
fi

echo
printf '%-66s %-8s %6s %6s %6s %7s\n' program result passed failed skip seconds
cat "$table"
[ "$ran" -eq 0 ] && echo "no programs in $folder: make gpu-tests" && exit 1
[ "$skipped_all" -eq "$ran" ] && exit 77
exit $failed
