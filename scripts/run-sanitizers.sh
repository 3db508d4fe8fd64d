#!/bin/bash
# run-sanitizers.sh [--build] [asan|tsan]..: builds unit, system and stress (SAN_SUITES: some of them)
# under the sanitizers and runs them (not with --build); the last line counts.
#
# asan: AddressSanitizer and UndefinedBehaviorSanitizer. tsan: ThreadSanitizer. tests/README.md says
# what each needs.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
. scripts/lib/results.sh
# The make that this starts has its own jobs: it is not given the job server of the make above, and
# would warn about that.
unset MAKEFLAGS MFLAGS MAKELEVEL
base=${BUILD:-build} passed=0 failed=0 skipped=0 rows=()
build_only=''; [ "${1:-}" != --build ] || { build_only=1; shift; }
[ $# -gt 0 ] || set -- asan tsan
# One job for each core, limited by memory: each takes up to 1 GiB with sanitizers.
jobs=${JOBS:-$(nproc)}
mkdir -p "$base"

# GCC 12's ThreadSanitizer refuses address layouts with more than 28 random bits. Run without
# randomisation if the kernel permits it; some containers do not, and there it works only sometimes.
without_aslr() { setarch -R true 2>/dev/null && echo "setarch -R"; }

suites=${SAN_SUITES:-unit system stress}

# build NAME [WRAP..]: builds, starting from what an earlier build left. The short form compiles the
# library with AddressSanitizer, and takes most tests from the build without sanitizers
# (mk/sources.mk).
build() {
  : >"$base/$1.build.log"
  local words=(BUILD="$base/$1" CXXFLAGS="-O1 -g1" CORE_SUITES="$suites")
  case $1${VMEM_LONG:+long} in
    tsan*) words+=(SAN=thread CUDA=no) ;;
    asanlong) words+=(SAN=address,undefined CUDA=no) ;;
    asan)
      make -j"$jobs" BUILD="$base" test-objects >>"$base/$1.build.log" 2>&1 || return
      words+=(SAN=address,undefined SAN_TESTS=address TESTS_OF="$base") ;;
  esac
  "${@:2}" make -j"$jobs" "${words[@]}" core-tests >>"$base/$1.build.log" 2>&1
}

for name in "$@"; do
  case $name in asan | tsan) ;; *) echo "run-sanitizers: no sanitizer '$name'; there are asan and tsan" >&2; exit 2 ;; esac
done
ahead=''
while [ $# -gt 0 ]; do
  name=$1; shift
  wrap=''; [ "$name" != tsan ] || wrap=$(without_aslr)
  echo "==== $name"
  build=$base/$name log=$base/$name.log
  [ -z "$ahead" ] || wait "$ahead"
  if ! build "$name"; then
    echo "FAIL $name: the build failed"; grep -E 'error|Error' "$base/$name.build.log" | head -20 | sed 's/^/       | /'; tail -20 "$base/$name.build.log" | sed 's/^/       | /'; failed=$((failed + 1)); continue
  fi
  if [ -n "$build_only" ]; then passed=$((passed + 1)); continue; fi
  # The tests leave a core idle half of the time: start the next build on it.
  ahead=''
  [ $# = 0 ] || { build "$1" nice -n 10 & ahead=$!; }
  # TSan: a report makes the exit status 66. tests/README.md describes its interception of memory
  # calls. By default it sleeps a second at the end of each process with threads: most of the time
  # of tests that end hundreds of processes.
  # shellcheck disable=SC2086  # suites are words
  BUILD=$build WRAP=$wrap TEST_TIMEOUT=${TEST_TIMEOUT:-900} VMEM_SANITIZER=$name \
    ASAN_OPTIONS="detect_stack_use_after_return=1:strict_string_checks=1:handle_segv=1:allow_user_segv_handler=1:detect_leaks=1:abort_on_error=0:${ASAN_OPTIONS:-}" \
    UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1:${UBSAN_OPTIONS:-}" \
    TSAN_OPTIONS="halt_on_error=0:second_deadlock_stack=1:history_size=4:atexit_sleep_ms=100:suppressions=$PWD/tests/tsan.supp:${TSAN_OPTIONS:-}" \
    scripts/run-tests.sh $suites | tee "$log"
  read -r p f s < <(tail -1 "$log" | tr -dc '0-9 \n')
  passed=$((passed + ${p:-0})) failed=$((failed + ${f:-1})) skipped=$((skipped + ${s:-0}))
  rows+=("$(printf '%-8s %s' "$name" "$(totals_line "${p:-0}" "${f:-1}" "${s:-0}")")")
done
printf '%s\n' "====" "${rows[@]}"
totals_line $passed $failed $skipped
[ $failed = 0 ]
