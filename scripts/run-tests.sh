#!/bin/bash
# run-tests.sh SUITE..: runs suites that are built and prints their totals; the last line is "N passed, N failed, N skipped".
#
#   unit    $BUILD/tests/unit_tests           system  $BUILD/tests/system_tests, tests/system/*.sh
#   abi     $BUILD/tests/abi/*, tests/abi/*.sh   stress  $BUILD/tests/stress/*, each for VMEM_STRESS_SECONDS (5)
#   ctl     $BUILD/tests/ctl_tests, tests/ctl/*.sh
#   vm      tests/vm/*.sh                     kmod    tests/kmod/*.sh         python  tests/python/*.sh
#   examples  tests/examples/*.sh, which run $BUILD/examples/*
#   deb     tests/package/*.sh           negative tests/negative/*.sh
#
# A program is a GoogleTest binary, or anything that ends with 0 (passed), 77 (skipped; its last line, or one that begins
# with "skipped: ", is the reason) or another status (failed). One that prints "N passed, N failed, N skipped" as its last
# such line counts as that many. Every program has a deadline: TEST_TIMEOUT (300 s), four times that for vm, kmod and deb.
# A folder's file NAME.variants runs NAME once more per line, with the line as arguments.
# Exit: 0 when nothing failed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
. scripts/lib/results.sh
# A make that this starts is its own: the job server of the one above is not passed on, and says so in a warning.
unset MAKEFLAGS MFLAGS MAKELEVEL
export BUILD=${BUILD:-build}
timeout=${TEST_TIMEOUT:-300} seconds=${VMEM_STRESS_SECONDS:-5}
logs=$BUILD/test-logs; mkdir -p "$logs"
all_passed=0 all_failed=0 all_skipped=0 rows=()
exec </dev/null
ulimit -c 0
running=
trap '[ -z "$running" ] || kill "$running"; kill $(jobs -p) 2>/dev/null; echo "run-tests: stopped"; exit 1' TERM INT

# run_one NAME DEADLINE PROGRAM ARGS..
run_one() {
  local name=$1 deadline=$2 log status p f s began=$SECONDS; shift 2
  log=$logs/${name//[^A-Za-z0-9._-]/_}
  rm -f "$log".{log,json}
  local words=("$@")
  if [ -x "$1" ] && grep -q gtest_output "$1"; then words+=("--gtest_output=json:$log.json" --gtest_color=no); fi
  # In the background, so that a signal to this script reaches the program; the braces keep the shell's own line about a
  # crash out of the summary.
  { timeout -k 3 "$deadline" ${WRAP:-} "${words[@]}" >"$log.log" 2>&1 & running=$!; wait $running; status=$?; running=; } 2>/dev/null
  read -r p f s < <(count_result $status "$log.log" "$log.json")
  suite_passed=$((suite_passed + p)) suite_failed=$((suite_failed + f)) suite_skipped=$((suite_skipped + s))
  printf '%-4s %-44s %s  (%d s)\n' "$([ "$f" = 0 ] && echo ok || echo FAIL)" "$name" "$(totals_line "$p" "$f" "$s")" $((SECONDS - began))
  [ "$s" = 0 ] || skip_reasons $status "$log.log" | sort -u | sed 's/^/       skipped: /'
  # A script that ran several programs has said in its own lines how each went.
  case $1 in *.sh) grep -aE '^(ok  |FAIL|     +(skipped|failed): )' "$log.log" | sed 's/^/     /' ;; esac
  if [ "$f" != 0 ]; then
    case $status in 124 | 137) echo "       not done after $deadline s" ;; esac
    failed_tests "$log.log" | sed 's/^/       failed: /'
    echo "       status $status; from $log.log:"; failed_output "$log.log" | sed 's/^/       | /'
  fi
}
programs() { find "$1" -maxdepth 1 -type f -perm -u+x ! -name '*.o' ! -name '*.d' 2>/dev/null | sort; }
scripts_of() { find "tests/$1" -maxdepth 1 -name '*.sh' -perm -u+x 2>/dev/null | sort; }

# side_by_side DEADLINE SCRIPT..: as many at once as there are cores (a stock guest has one); said in their order.
side_by_side() {
  local deadline=$1 program counts; shift
  # shellcheck disable=SC2030,SC2031  # each has counts of its own, which come back in a file
  for program in "$@"; do
    while [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do wait -n; done
    ( trap '[ -z "$running" ] || kill "$running"; exit 1' TERM
      suite_passed=0 suite_failed=0 suite_skipped=0
      run_one "${program#tests/}" "$deadline" "$program" >"$logs/${program##*/}.out"
      echo $suite_passed $suite_failed $suite_skipped >"$logs/${program##*/}.counts" ) &
  done
  wait
  for program in "$@"; do
    cat "$logs/${program##*/}.out"
    counts=$(cat "$logs/${program##*/}.counts" 2>/dev/null || echo 0 1 0)
    read -r p f s <<<"$counts"
    suite_passed=$((suite_passed + p)) suite_failed=$((suite_failed + f)) suite_skipped=$((suite_skipped + s))
    rm -f "$logs/${program##*/}".{out,counts}
  done
}

# in_parts NAME DEADLINE PROGRAM: a GoogleTest binary in as many parts as there are cores, side by side.
in_parts() {
  local parts i p f s; parts=$(nproc)
  # shellcheck disable=SC2030,SC2031  # as above
  for ((i = 0; i < parts; i++)); do
    ( trap '[ -z "$running" ] || kill "$running"; exit 1' TERM
      export GTEST_TOTAL_SHARDS=$parts GTEST_SHARD_INDEX=$i
      suite_passed=0 suite_failed=0 suite_skipped=0
      run_one "$1, part $((i + 1)) of $parts" "$2" "$3" >"$logs/$1.$i.out"
      echo $suite_passed $suite_failed $suite_skipped >"$logs/$1.$i.counts" ) &
  done
  wait
  for ((i = 0; i < parts; i++)); do
    cat "$logs/$1.$i.out"
    read -r p f s <<<"$(cat "$logs/$1.$i.counts" 2>/dev/null || echo 0 1 0)"
    suite_passed=$((suite_passed + p)) suite_failed=$((suite_failed + f)) suite_skipped=$((suite_skipped + s))
    rm -f "$logs/$1.$i".{out,counts}
  done
}

run_suite() {
  local suite=$1 suite_passed=0 suite_failed=0 suite_skipped=0 began=$SECONDS program line n scripts=()
  echo "== $suite"
  case $suite in
    unit | system | ctl)
      if [ "$suite" != ctl ] && [ -x "$BUILD/tests/${suite}_tests" ]; then in_parts "$suite" "$timeout" "$BUILD/tests/${suite}_tests"
      elif [ -x "$BUILD/tests/${suite}_tests" ]; then run_one "$suite" "$timeout" "$BUILD/tests/${suite}_tests"
      elif compgen -G "tests/$suite/*.cpp" >/dev/null; then echo "FAIL $suite: $BUILD/tests/${suite}_tests is not built"; suite_failed=1; fi ;;
    abi) for program in $(programs "$BUILD/tests/abi"); do run_one "abi/${program##*/}" "$timeout" "$program"; done ;;
    stress)
      for program in $(programs "$BUILD/tests/stress"); do
        run_one "stress/${program##*/}" $((seconds * 4 + 120)) "$program" --seconds "$seconds"
        n=0
        while read -r line; do
          case $line in '' | '#'*) continue ;; esac
          n=$((n + 1))
          # shellcheck disable=SC2086  # a line holds several arguments
          run_one "stress/${program##*/} $line" $((seconds * 4 + 120)) "$program" --seconds "$seconds" $line
        done < <(cat "tests/stress/${program##*/}.variants" 2>/dev/null)
      done ;;
    vm | kmod | python | examples | deb | negative) ;;
    *) echo "run-tests: no suite '$suite'" >&2; suite_failed=1 ;;
  esac
  case $suite in
    system | abi | unit | ctl | python | examples) for program in $(scripts_of "$suite"); do run_one "${program#tests/}" "$timeout" "$program"; done ;;
    stress) for program in $(scripts_of "$suite"); do run_one "${program#tests/}" $((timeout + seconds * 8)) "$program"; done ;;
    negative) for program in $(scripts_of "$suite"); do run_one "${program#tests/}" $((timeout * 4)) "$program"; done ;;
    vm | kmod | deb) mapfile -t scripts < <(scripts_of "${suite/deb/package}"); side_by_side $((timeout * 4)) ${scripts[@]+"${scripts[@]}"} ;;
  esac
  rows+=("$(printf '%-8s %7d passed %7d failed %7d skipped %6d s' "$suite" $suite_passed $suite_failed $suite_skipped $((SECONDS - began)))")
  all_passed=$((all_passed + suite_passed)) all_failed=$((all_failed + suite_failed)) all_skipped=$((all_skipped + suite_skipped))
}
for suite in "$@"; do run_suite "$suite"; done
echo "=="
printf '%s\n' "${rows[@]}"
[ $((all_passed + all_failed)) != 0 ] || { echo "run-tests: nothing ran"; all_failed=1; }
totals_line $all_passed $all_failed $all_skipped
[ $all_failed = 0 ]
