#!/bin/sh
# Runs the GPU tests built by `make gpu-tests`; builds nothing. Every program runs under timeout(1),
# with unbuffered lines. Tests of suites named *Loss* leave a dead CUDA context, so each has its own
# process. A table comes last.
#
#   scripts/gpu-tests.sh [-d FOLDER] [-f FILTER] [-e] [-b] [-s SECONDS] [-o FILE]
#     -d FOLDER  the programs' folder (build/gpu)   -f FILTER  a gtest filter for every test program
#     -e         every test in its own process      -b         also run the programs named *_bench
#     -s SECONDS also run each stress program for this long, on managed memory and on handles
#     -o FILE    write all output there; show failures, the benchmarks' lines and the table
# Environment: GPU_TEST_TIMEOUT seconds for a whole program (200), GPU_ONE_TIMEOUT for one test
# (40). No test starts that could oversubscribe unified memory: each program asks for at most 8 GiB
# and an eighth of the free memory, and ends with code 2 if it would need more
# (tests/gpu/gpu_limits.h). Exit code: 0 all passed, 1 something failed, 2 too little memory is
# free, 77 there is no GPU.
set -u
folder=build/gpu
filter='*'
# Negative patterns of a filter come last.
without_loss() { case $filter in *-*) echo "$filter:*Loss*" ;; *) echo "$filter-*Loss*" ;; esac; }
each=
bench=
soak=0
output=
while getopts d:f:ebs:o: option; do
	case $option in
	d) folder=$OPTARG ;;
	f) filter=$OPTARG ;;
	e) each=1 ;;
	b) bench=1 ;;
	s) soak=$OPTARG ;;
	o) output=$OPTARG ;;
	*) exit 2 ;;
	esac
done
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
table=$logs/table
: >"$table"
failed=0
refused=0
ran=0
no_gpu=0
all_passed=0
all_bad=0
all_skipped=0
[ -n "$output" ] && : >"$output"

# one NAME TIMEOUT PROGRAM ARGS..: runs it and adds a row to the table.
one() {
	name=$1
	limit=$2
	shift 2
	log=$logs/log
	start=$(date +%s)
	{
		timeout -k 3 "$limit" stdbuf -oL -eL "$@" 2>&1
		echo $? >"$logs/code"
	} | if [ -n "$output" ]; then tee -a "$output" >"$log"; else tee "$log"; fi
	read -r code <"$logs/code"
	seconds=$(($(date +%s) - start))
	passed=$(grep -c '^\[       OK \]' "$log")
	bad=$(grep -c '^\[  FAILED  \].*ms)$' "$log")
	skipped=$(grep -c '^\[  SKIPPED \].*ms)$' "$log")
	all_passed=$((all_passed + passed))
	all_bad=$((all_bad + bad))
	all_skipped=$((all_skipped + skipped))
	ran=$((ran + 1))
	case $code in
	0) result=ok ;;
	2) result=REFUSED && refused=1 ;;
	77) result=no-gpu && no_gpu=$((no_gpu + 1)) ;;
	124 | 137) result=TIMEOUT && failed=1 ;;
	*) result="FAIL($code)" && failed=1 ;;
	esac
	if [ -n "$output" ] && [ "$result" != ok ]; then tail -n 40 "$log"; fi
	printf '%-72s %-8s %6s %6s %6s %7s\n' "$name" "$result" "$passed" "$bad" "$skipped" "$seconds" >>"$table"
}

# tests PROGRAM PATTERN: names of its tests that pass the filter and match the pattern (awk).
tests() {
	timeout -k 3 20 "$1" --gtest_list_tests --gtest_filter="$filter" 2>/dev/null |
		awk -v want="$2" '/^[^ ]+\.$/ { suite = $1 } /^  / && (suite $1) ~ want { print suite $1 }'
}

[ -x "$(command -v stdbuf)" ] || exit 2
for program in "$folder"/*_test; do
	[ -x "$program" ] || continue
	apart=Loss
	if [ -n "$each" ]; then
		apart=.
	else
		one "${program##*/}" "${GPU_TEST_TIMEOUT:-200}" "$program" --gtest_filter="$(without_loss)"
	fi
	tests "$program" "$apart" >"$logs/apart"
	while read -r test; do
		one "$test" "${GPU_ONE_TIMEOUT:-40}" "$program" --gtest_filter="$test" </dev/null
	done <"$logs/apart"
done
if [ -n "$bench" ]; then
	for program in "$folder"/*_bench; do
		[ -x "$program" ] || continue
		one "${program##*/}" "${GPU_TEST_TIMEOUT:-200}" "$program"
		[ -n "$output" ] && [ "$result" = ok ] && cat "$logs/log"
	done
fi
# soaked NAME: adds the row of a stress program that ran in parallel with others.
soaked() {
	# shellcheck disable=SC2016  # the inner shell expands them
	one "$1" 20 sh -c 'cat "$0"; exit "$(cat "$0.code")"' "$logs/$1"
	[ -n "$output" ] && [ "$result" = ok ] && cat "$logs/log"
	return 0
}
if [ "$soak" -gt 0 ]; then
	runs='history model history-handles model-handles' # NAME-BODY
	for name in $runs; do
		program=$folder/stress/${name%-handles}
		[ -x "$program" ] || continue
		device=managed
		[ "$name" = "${name%-handles}" ] || device=handles
		{
			timeout -k 3 $((soak + 100)) "$program" --device $device --seconds "$soak" >"$logs/$name" 2>&1 </dev/null
			echo $? >"$logs/$name.code"
		} &
	done
	wait
	for name in $runs; do
		[ ! -e "$logs/$name.code" ] || soaked "$name"
	done
fi

echo
printf '%-72s %-8s %6s %6s %6s %7s\n' program result passed failed skip seconds
if [ -n "$each" ] && [ -n "$output" ]; then
	grep -v ' ok  *1 ' "$table"  # passed tests are counted below
	cat "$table" >>"$output"
else
	cat "$table"
fi
echo "tests: $all_passed passed, $all_bad failed, $all_skipped skipped, in $ran runs"
[ "$ran" -eq 0 ] && echo "no programs in $folder: make gpu-tests" && exit 1
[ "$no_gpu" -eq "$ran" ] && exit 77
[ "$failed" -ne 0 ] && exit 1
[ "$refused" -ne 0 ] && exit 2
exit 0
