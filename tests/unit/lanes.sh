#!/bin/bash
# Tests the report at the end of .ci/run (scripts/lib/lanes.sh), on parts that pass, fail, crash,
# are too slow and count nothing. Tests what scripts/lib/once.sh remembers.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
[ -z "${VMEM_SANITIZER:-}" ] || { echo "skipped: nothing in it is built with a sanitizer"; exit 77; }
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
passed=0 failed=0
report() { # NAME WRONG
  if [ -z "$2" ]; then echo "ok   $1"; passed=$((passed + 1)); else echo "FAIL $1: $2"; failed=$((failed + 1)); fi
}
# has TEXT PATTERN..: each pattern must be a line of the text or, with a leading "!", must not be.
has() {
  local text=$1 pattern; shift
  for pattern in "$@"; do
    case $pattern in '!'*) ! grep -qE -- "${pattern#!}" <<<"$text" || echo "says '${pattern#!}'; " ;; *) grep -qE -- "$pattern" <<<"$text" || echo "no '$pattern'; " ;; esac
  done
}

cat >"$work/red" <<'P'
echo 'ok   unit, part 2 of 2   1 passed, 0 failed, 0 skipped  (1 s)'
echo 'FAIL unit, part 1 of 2   1 passed, 2 failed, 0 skipped  (1 s)'
echo '       failed: Suite.Wrong'
echo '       failed: Suite.Dead (did not finish)'
echo '       status 1; from build/x.log:'
for i in 1 2 3 4 5 6 7 8 9 10 11 12; do echo "       | noise $i"; done
echo '       | lib/x_test.cpp:7: Failure'
echo '       | Expected: one'
for i in 1 2 3 4 5 6 7 8 9 10 11 12; do echo "       | more $i"; done
echo 'FAIL python/run.sh   0 passed, 1 failed, 0 skipped  (1 s)'
echo '       status 1; from build/y.log:'
for i in 1 2 3 4 5 6 7 8 9 10 11 12; do echo "       | line $i"; done
echo '     .. 0:20, 1 of 2 programs done; running: x'
echo 'ok   abi/x   1 passed, 0 failed, 0 skipped  (1 s)'
echo '       skipped: for a reason'
echo '3 passed, 3 failed, 0 skipped'
exit 1
P
printf 'echo "FAIL words"; echo "       README.md: blanks"; echo "ok   sizes"; echo "1 passed, 1 failed, 0 skipped"; sleep 0.5; exit 1\n' >"$work/check"
ci() { # PARTS: what the lanes with these parts print
  mkdir -p "$work/logs"; rm -rf "$work"/logs/*
  W=$work bash -c "set -uo pipefail; logs=\$W/logs; . scripts/lib/results.sh; . scripts/lib/lanes.sh; begin_lane fast test; $1; end_lane; summary" 2>&1
}

out=$(ci 'part build 60 echo "2 passed, 0 failed, 1 skipped"; part more 60 echo "3 passed, 0 failed, 0 skipped"'); status=$?
report "green: a table, then the totals" "$([ $status = 0 ] || echo "status $status; ")$(has "$out" '^fast +build +2 passed +0 failed +1 skipped +0:0' '^fast +in all' '!what failed')$([ "$(tail -1 <<<"$out")" = "5 passed, 0 failed, 1 skipped" ] || echo "totals")"

out=$(ci 'start check 60 bash $W/check; part tests 60 bash $W/red; part check 60 wait_for check; part good 60 echo "7 passed, 0 failed, 0 skipped"'); status=$?
end=$(sed -n '/^##### what failed/,$p' <<<"$out")
report "red: totals, all failures in short, the totals again" "$([ $status = 1 ] || echo "status $status; ")$([ "$(tail -1 <<<"$out")" = "11 passed, 4 failed, 0 skipped" ] || echo "totals; ")$(
  [ "$(grep -c '^11 passed, 4 failed, 0 skipped$' <<<"$out")" = 2 ] || echo "not twice; ")$(
  has "$end" '^--- fast: tests' '^FAIL unit, part 1 of 2' 'failed: Suite.Wrong' 'failed: Suite.Dead' 'x_test.cpp:7: Failure' 'Expected: one' '!noise' '!more 9' \
    '^FAIL python/run.sh' '\| line 12$' '!line 2$' '!^ok' '!skipped: for' '!programs done' '^--- fast: check' '^FAIL words' 'README.md: blanks')"

printf 'sleep 0.5; echo "4 passed, 0 failed, 0 skipped"\n' >"$work/slow"
out=$(ci 'start slow 60 bash $W/slow; start check 60 bash $W/check; start quick 60 echo "2 passed, 0 failed, 0 skipped"; part quick 60 wait_for quick; part slow 60 wait_for slow; part check 60 wait_for check'); status=$?
report "three in the background: each is waited for" "$([ $status = 1 ] || echo "status $status; ")$(
  has "$out" '^fast +quick +2 passed +0 failed' '^fast +slow +4 passed +0 failed' '^fast +check +1 passed +1 failed' '!^--- fast: (quick|slow)')"

cat >"$work/much" <<'P'
echo '  C++   lib/x.cpp'
echo 'lib/x.cpp:3: warning: a word of the compiler'
echo 'ok   unit/x   2 passed, 0 failed, 3 skipped  (1 s)'
echo '       skipped: no device (2 times)'
echo '       skipped: not root'
for i in 1 2 3; do echo "     .. 0:${i}0, 1 of 2 programs done; running: x"; done
echo 'FAIL unit/y   0 passed, 1 failed, 0 skipped  (1 s)'
for i in {1..40}; do echo "       | line $i"; done
echo '       skipped: no device'
echo '2 passed, 1 failed, 4 skipped'
exit 1
P
out=$(ci 'part much 60 bash $W/much'); log=$(cat "$work"/logs/fast-much.log)
begin=$(sed '/^##### summary/,$d' <<<"$out")
report "what is shown is short, and the log has all of it" "$(has "$begin" 'a word of the compiler' '1 of 2 programs' '^FAIL unit/y' 'line 1$' '!line 20$' '!C\+\+' '!ok   unit' \
  '^ +3  no device$' '^ +1  not root$' '!skipped:')$([ "$(grep -c 'programs done' <<<"$begin")" = 1 ] || echo "all heartbeats; ")$(has "$log" 'C\+\+   lib/x' 'line 40$' 'skipped: no device \(2')"

out=$(ci 'part slow 1 sleep 20; part none 60 true; part dead 60 bash -c "echo some words; kill -SEGV \$\$"')
end=$(sed -n '/^##### what failed/,$p' <<<"$out")
report "a limit that is met, a part that counts nothing, and a crash are failures" "$(has "$end" '^--- fast: slow: not done after 1 s' '^--- fast: none: counted nothing' '^--- fast: dead: ended with status 139' '\| some words')$(
  [ "$(tail -1 <<<"$out")" = "0 passed, 3 failed, 0 skipped" ] || echo "totals: $(tail -1 <<<"$out")")"

out=$(CI_SECONDS=2 ci 'part slow 60 sleep 20; part after 60 bash -c "sleep 5; echo 1 passed, 0 failed, 0 skipped"')
report "the whole has a limit" "$(has "$out" '^--- fast: slow: not done after [12] s' '^--- fast: after: not done after 1 s')"

out=$(ci 'part many 60 bash -c "for i in {1..200}; do echo FAIL test \$i; echo \"       failed: S.T\$i\"; echo \"       | long\"; done; echo 0 passed, 200 failed, 0 skipped; exit 1"')
end=$(sed -n '/^##### what failed/,$p' <<<"$out")
report "of very many failures all names are said" "$(has "$end" 'failed: S.T1$' 'failed: S.T200$' '!long')"

# .ci/run itself, over stubs of the programs that it starts.
tree=$work/repository; mkdir -p "$tree/scripts"; cp -r .ci "$tree"; cp -r scripts/lib "$tree/scripts"
stub() { printf '#!/bin/bash\necho "stub %s $* stress=${VMEM_STRESS_SECONDS:-} long=${VMEM_LONG:-} san=${SAN_SUITES:-}"; echo "${%s:-1 passed, 0 failed, 0 skipped}"\n' "$1" "$2" >"$tree/scripts/$1"; chmod +x "$tree/scripts/$1"; }
stub setup.sh X; stub check.sh CHECKS; stub run-tests.sh TESTS; stub compilers.sh X; stub bare.sh X; stub run-sanitizers.sh X
printf '.PHONY: all core-tests test\nall core-tests:\n\t@$(BROKEN)\ntest:\n\t@echo "make $@ $(SUITES)"; echo "2 passed, 0 failed, 1 skipped"\n' >"$tree/Makefile"
run_ci() { env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL -u VMEM_LONG -u VMEM_STRESS_SECONDS -u SAN_SUITES BUILD=build "$@" 2>&1; }
out=$(run_ci "$tree/.ci/run"); status=$?
report "CI has three lanes, the fast one first" "$([ $status = 0 ] || echo "status $status; ")$([ "$(tail -1 <<<"$out")" = "7 passed, 0 failed, 1 skipped" ] || echo "totals: $(tail -1 <<<"$out"); ")$(
  has "$out" 'stub run-tests.sh unit system stress= ' '!stub run-tests.sh stress ' 'stub check.sh' 'make test ctl abi examples python stress negative vm kmod deb' 'stub run-sanitizers.sh --build asan stress= long= san=unit stress' 'stub run-sanitizers.sh asan stress= long= san=unit stress' '!compilers.sh' '!bare.sh')$(
  [ "$(grep -oE '^##### lane [a-z]+' <<<"$out" | tr '\n' ' ')" = "##### lane fast ##### lane full ##### lane sanitizers " ] || echo "lanes")"
out=$(run_ci "$tree/.ci/run" fast)
report "one lane alone" "$([ "$(tail -1 <<<"$out")" = "4 passed, 0 failed, 0 skipped" ] || echo "totals: $(tail -1 <<<"$out"); ")$(has "$out" 'stub run-tests.sh stress stress=2 ' '!lane full')"
out=$(run_ci VMEM_LONG=1 "$tree/.ci/run")
report "VMEM_LONG=1 reaches the tests, and adds the night" "$(has "$out" 'lane night' 'stub run-tests.sh unit system stress= long=1' 'stub bare.sh demo test' 'stub compilers.sh' 'stub run-sanitizers.sh asan tsan stress= long=1 san=$')"
out=$(run_ci CHECKS='3 passed, 1 failed, 0 skipped' "$tree/.ci/run"); status=$?
report "a check that fails turns it red" "$([ $status = 1 ] || echo "status $status; ")$([ "$(tail -1 <<<"$out")" = "9 passed, 1 failed, 1 skipped" ] || echo "totals: $(tail -1 <<<"$out")")"
out=$(run_ci BROKEN=false "$tree/.ci/run"); status=$?
report "what does not build is not tested" "$([ $status = 1 ] || echo "status $status; ")$([ "$(tail -1 <<<"$out")" = "0 passed, 1 failed, 0 skipped" ] || echo "totals: $(tail -1 <<<"$out"); ")$(has "$out" '!stub run-tests')"

# once.sh: a "compiler" that records each run, and fails if the header says so.
mkdir "$work/tree" && cp scripts/lib/once.sh "$work/tree" && cd "$work/tree" || exit 1
printf 'echo run >>runs; [ "$1" = --version ] || ! grep -q wrong a.h\n' >tool; chmod +x tool; sed -i '1i #!/bin/bash' tool
sed -i '2i [ "${1:-}" != --version ] || { echo 1; exit 0; }' tool
echo 'one' >a.h; echo 'source' >a.cpp; touch .clang-tidy
printf 'out/a.o: a.cpp \\\n a.h\na.h:\n' >a.d
export VMEM_CACHE=$work/cache CHECK_SYSTEM=1
runs() { wc -l 2>/dev/null <runs || echo 0; }
once() { ./once.sh a.d ./tool a.cpp "$@" >/dev/null 2>&1; }
bad=''
once && once && [ "$(runs)" = 1 ] || bad+="what passed ran again; "
echo 'two' >a.h; once; [ "$(runs)" = 2 ] || bad+="a changed header was not noticed; "
echo 'one' >a.h; once; [ "$(runs)" = 2 ] || bad+="an old state was not known; "
once -x; [ "$(runs)" = 3 ] || bad+="another option was not noticed; "
CHECK_SYSTEM=2 once; [ "$(runs)" = 4 ] || bad+="other packages were not noticed; "
echo x >.clang-tidy; once; [ "$(runs)" = 5 ] || bad+="other checks were not noticed; "
echo wrong >a.h; once && bad+="a failure passed; "; once && bad+="a failure was remembered as good; "; [ "$(runs)" = 7 ] || bad+="a failure was remembered; "
report "what passed does not run again until something changes" "$bad"

echo "$passed passed, $failed failed, 0 skipped"
[ $failed = 0 ]
