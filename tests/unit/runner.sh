#!/bin/bash
# Tests the runner (scripts/run-tests.sh) on programs that crash, hang, are slow once, leave files
# or leave processes.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
[ -z "${VMEM_SANITIZER:-}" ] || { echo "skipped: nothing in it is built with a sanitizer"; exit 77; }
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
passed=0 failed=0
mkdir -p "$work"/build/tests/{abi,stress} "$work"/tests/{python,vm,negative}

# A program that acts like GoogleTest (gtest_output): its tests are the words of NAME.tests, each a
# function.
fake() { # PATH
  cat >"$1" <<'P'
#!/bin/bash
# --gtest_output --gtest_filter --gtest_list_tests
tests=(Good.One Good.Two Odd.One Odd.Two Rest.Three)
filter=
for word in "$@"; do case $word in --gtest_filter=*) filter=${word#*=} ;; --gtest_list_tests) list=1 ;; --gtest_output=json:*) json=${word#*=json:} ;; esac; done
[ "${filter:-*}" = '*' ] || IFS=: read -ra tests <<<"$filter"
if [ -n "${list:-}" ]; then last=; for t in "${tests[@]}"; do [ "$last" = "${t%.*}." ] || echo "${t%.*}."; last=${t%.*}.; echo "  ${t#*.}"; done; exit 0; fi
echo "[==========] Running ${#tests[@]} tests from 3 test suites."
for t in "${tests[@]}"; do
  echo "[ RUN      ] $t"
  [ "$t" != Odd.One ] || odd
  echo "[       OK ] $t (0 ms)"
done
{ echo '{'; for t in "${tests[@]}"; do printf '          "name": "%s",\n          "result": "COMPLETED",\n          "classname": "x",\n' "$t"; done; } >"$json"
P
  sed -i "2i odd() { $2; }" "$1"; chmod +x "$1"
}
script() { printf '#!/bin/bash\n%s\n' "$2" >"$1"; chmod +x "$1"; }

# run NAME SUITE WANTED-EXIT WANTED-TOTALS PATTERN..: runs the runner on the contents of $work. Its
# output must contain each PATTERN or, with a leading "!", must not.
run() {
  local name=$1 suite=$2 want=$3 totals=$4 out rc bad='' pattern; shift 4
  out=$(BUILD=$work/build TESTS=$work/tests TEST_TIMEOUT=${limit:-60} TEST_ONE_TIMEOUT=${one:-60} TEST_PATIENCE=1 TEST_HEARTBEAT=${beat:-20} WORK=$work TMPDIR=$work scripts/run-tests.sh $suite 2>&1); rc=$?
  [ $rc = "$want" ] || bad="exit $rc, wanted $want"
  [ "$(tail -1 <<<"$out")" = "$totals" ] || bad+="; totals"
  for pattern in "$@"; do
    case $pattern in '!'*) ! grep -qE -- "${pattern#!}" <<<"$out" || bad+="; says '${pattern#!}'" ;; *) grep -qE -- "$pattern" <<<"$out" || bad+="; no '$pattern'" ;; esac
  done
  if [ -z "$bad" ]; then echo "ok   $name"; passed=$((passed + 1))
  else echo "FAIL $name: ${bad#; } (wanted $totals)"; sed 's/^/       | /' <<<"$out"; failed=$((failed + 1)); fi
  rm -rf "$work"/build/tests/* "$work"/tests/*/* "$work"/once; mkdir -p "$work"/build/tests/{abi,stress}
}

fake "$work/build/tests/ctl_tests" 'kill -SEGV $$'
run "tests that never ran after a crash are counted and named" ctl 1 "2 passed, 3 failed, 0 skipped" \
  'failed: Odd.One \(did not finish\)' 'never ran, each counted as failed \(2\)' '^ +Odd.Two$' '^ +Rest.Three$' '!again:'

fake "$work/build/tests/ctl_tests" '[ -e $WORK/once ] || { touch $WORK/once; sleep 1000; }'
limit=3 run "a deadline that is met once is run again alone, and said" ctl 0 "5 passed, 0 failed, 0 skipped" \
  '^slow ctl +2 passed' 'at its deadline: Odd.One' '^ok   ctl, again +3 passed' '^again: ctl met its deadline and ran once more, alone: passed' 'thread [0-9]+ sleep'

fake "$work/build/tests/ctl_tests" 'sleep 1000'
one=2 beat=1 run "one test that hangs meets its program's deadline" ctl 1 "2 passed, 3 failed, 0 skipped" \
  '^slow ctl +2 passed' 'at its deadline: Odd.One' '^FAIL ctl, again' '^again: ctl .*: failed'

fake "$work/build/tests/ctl_tests" '[ -e $WORK/once ] || { touch $WORK/once; sleep 1000; }'
one=2 beat=1 run "one test that hangs once is run again alone, and said" ctl 0 "5 passed, 0 failed, 0 skipped" \
  'at its deadline: Odd.One' 'thread [0-9]+ sleep' '^ok   ctl, again +3 passed' '^again: ctl met its deadline and ran once more, alone: passed'

fake "$work/build/tests/ctl_tests" 'sleep 1000'
limit=3 run "a deadline that is met twice is a failure" ctl 1 "2 passed, 3 failed, 0 skipped" '^FAIL ctl, again' '^again: ctl .*: failed'

for bad in 'x.cpp:7: Failure' 'WARNING: ThreadSanitizer: data race' 'lib/x.cpp:3:4: runtime error: shift'; do
  fake "$work/build/tests/ctl_tests" "echo '$bad'; sleep 1000"
  limit=3 run "what said that something was wrong is not run again: $bad" ctl 1 "2 passed, 3 failed, 0 skipped" '^FAIL ctl' '!again:'
done

script "$work/tests/vm/guest.sh" 'echo "$(date +%s)" >>$WORK/once; [ $(wc -l <$WORK/once) = 2 ] || { echo "FAIL guest: not done"; exit 124; }; echo "4 passed, 0 failed, 0 skipped"'
script "$work/tests/vm/other.sh" 'echo "FAIL data"; exit 1'
run "a script that ends with 124 met a deadline of its own; another failure is one" vm 1 "4 passed, 1 failed, 0 skipped" \
  '^slow vm/guest.sh' '^ok   vm/guest.sh, again' '^FAIL vm/other.sh' '!vm/other.sh, again'

script "$work/tests/python/a.sh" 'kill -KILL $$'
run "a kill is no deadline" python 1 "0 passed, 1 failed, 0 skipped" '!again'

script "$work/tests/python/a.sh" 'sleep 3'
beat=1 run "a line shows what runs" python 0 "1 passed, 0 failed, 0 skipped" '\.\. 0:0[0-9], 0 of 1 programs done; running: python/a.sh \([0-9]+ s\)'

script "$work/tests/python/a.sh" 'exit 0'
VMEM_CACHE=$work/tests run "the end says how large the build and the cache are" python 0 "1 passed, 0 failed, 0 skipped" \
  "^== left: $work/build [1-9][0-9.]*[KM] \(make clean\), cache $work/tests [1-9][0-9.]*[KM], nothing else\$"

script "$work/tests/python/a.sh" 'touch $TMPDIR/forgotten.ABCDEF'
run "what tests forget is said and removed" python 0 "1 passed, 0 failed, 0 skipped" 'tests forgot .*: 1 x forgotten'
[ -z "$(find "$work" -maxdepth 1 -name 'vmem-tests.*')" ] || { echo "FAIL its own folder is left"; failed=$((failed + 1)); }

# The "$$" after the point makes it unique: another run of this script has its own.
script "$work/tests/python/a.sh" "sleep 1000.$$ & exit 0"
run "a process that is left running is a failure, and ended" python 1 "1 passed, 1 failed, 0 skipped" 'left running: sleep 1000'
script "$work/tests/python/a.sh" "setsid sleep 1001.$$ & sleep 0.5"
run "one that left its group, too" python 1 "1 passed, 1 failed, 0 skipped" 'left running: process [0-9]+ sleep 1001'
pgrep -f "sleep 100[01]\.$$\$" >/dev/null && { echo "FAIL a process is left"; failed=$((failed + 1)); }

# They run side by side, but those that need the whole machine run alone.
for n in 1 2; do script "$work/tests/negative/s$n.sh" '[ -z "$(ls $TMPDIR/running* 2>/dev/null)" ] || exit 1; touch $TMPDIR/running$$; sleep 0.5; rm $TMPDIR/running$$'; done
run "negative controls run one at a time" "negative" 0 "2 passed, 0 failed, 0 skipped" '^ok   negative/s2'

script "$work/tests/python/a.sh" 'sleep 0.5; echo a >>$WORK/once; echo "1 passed, 0 failed, 0 skipped"'
script "$work/tests/python/b.sh" 'sleep 0.2; [ "$(head -1 $WORK/once)" = c ] && echo "1 passed, 0 failed, 0 skipped"'
script "$work/tests/python/c.sh" $'# Runs first: it is the longest.\necho c >>$WORK/once; echo "1 passed, 0 failed, 0 skipped"'
run "what is long, and says so, begins" python 0 "3 passed, 0 failed, 0 skipped"

script "$work/tests/python/a.sh" 'exit 0'
script "$work/tests/python/b.sh" 'sleep 1000'
out=$(BUILD=$work/build TESTS=$work/tests TEST_PATIENCE=1 TMPDIR=$work timeout 5 scripts/run-tests.sh python 2>&1)
if [ "$(tail -1 <<<"$out")" = "1 passed, 1 failed, 0 skipped" ] && grep -q 'stopped after .*: 1 of 2 programs were not done' <<<"$out"; then echo "ok   one that is stopped says what it knows"; passed=$((passed + 1))
else echo "FAIL one that is stopped says what it knows"; sed 's/^/       | /' <<<"$out"; failed=$((failed + 1)); fi
echo "$passed passed, $failed failed, 0 skipped"
[ $failed = 0 ]
