#!/bin/bash
# run-tests.sh SUITE..: runs suites that are built and prints their totals; the last line is "N
# passed, N failed, N skipped".
#
#   unit    $BUILD/tests/unit_tests           system  $BUILD/tests/system_tests, tests/system/*.sh
#   abi     $BUILD/tests/abi/*, tests/abi/*.sh   stress  $BUILD/tests/stress/*, each for VMEM_STRESS_SECONDS (5)
#   ctl     $BUILD/tests/ctl_tests, tests/ctl/*.sh
#   vm      tests/vm/*.sh                     kmod    tests/kmod/*.sh         python  tests/python/*.sh
#   examples  tests/examples/*.sh, which run $BUILD/examples/*
#   deb     tests/package/*.sh           negative tests/negative/*.sh
#
# A program is a GoogleTest binary, or any program whose status is 0 (passed), 77 (skipped; its last
# line, or one that begins with "skipped: ", is the reason) or another one (failed). A program
# counts as many tests if its last such line is "N passed, N failed, N skipped". Each line of a
# folder's file NAME.variants runs NAME once more, with the line as arguments.
#
# The runner starts as many programs at once as there are cores (and GiB of free memory), twice as
# many of unit and system. stress comes last, and then negative, alone, because it needs the whole
# machine.
#
# Every program has a deadline: TEST_TIMEOUT (300 s; with VMEM_LONG=1 1,500 s), five times that for
# vm, kmod and deb, times TEST_PATIENCE (the slowness of the machine, 1 to 12, measured at start). A
# GoogleTest program also meets its deadline when one of its tests takes TEST_ONE_TIMEOUT (300 s)
# times TEST_PATIENCE. A program that met its deadline and reported no failure runs once more, alone
# and with twice the time; of a GoogleTest program only the unfinished tests do. The lines "again:"
# before the totals name them. Status 124 of a program means that it met a deadline of its own. With
# VMEM_LONG=1 stress takes 120 s each.
#
# Exit: 0 if nothing failed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
. scripts/lib/results.sh
. scripts/lib/pace.sh
# The make that this starts has its own jobs: it is not given the job server of the make above, and
# would warn about that.
unset MAKEFLAGS MFLAGS MAKELEVEL GTEST_TOTAL_SHARDS GTEST_SHARD_INDEX
export BUILD=${BUILD:-build}
home=${TESTS:-tests} timeout=${TEST_TIMEOUT:-${VMEM_LONG:+1500}} seconds=${VMEM_STRESS_SECONDS:-${VMEM_LONG:+120}} beat=${TEST_HEARTBEAT:-20}
timeout=${timeout:-300} seconds=${seconds:-5} one=${TEST_ONE_TIMEOUT:-${VMEM_LONG:+1500}}
one=${one:-300}
export VMEM_STRESS_SECONDS=$seconds
logs=$BUILD/test-logs; mkdir -p "$logs"
exec </dev/null
ulimit -c 0

# Tests create their files in a folder of this run, which is removed with all they leave.
scratch=$(mktemp -d "${TMPDIR:-/var/tmp}/vmem-tests.XXXXXX") && state=$(mktemp -d "$logs/.run-XXXXXX") && mkfifo "$state/ended" || exit 1
mkdir "$scratch/tmp" && chmod 755 "$scratch" && chmod 1777 "$scratch/tmp"
export TMPDIR=$scratch/tmp
exec 7<>"$state/ended"
trap 'rm -rf "$scratch" "$state"' EXIT

# ---- one program -----------------------------------------------------------------------------------------------------------
# The state of job I is in $state/I.*: group (of its processes), log, began, out (its lines), counts
# (passed, failed, skipped, seconds), again (tests to run once more after a deadline).

# run_program I NAME DEADLINE PROGRAM ARGS..: sets status, took, log, and lists leftover processes.
run_program() {
  local i=$1 deadline=$3 group began=${EPOCHREALTIME%[.,]*}; log=$logs/${2//[^A-Za-z0-9._-]/_}; shift 3
  rm -f "$log".{log,json,threads}
  local words=("$@")
  if is_gtest "$1"; then words+=("--gtest_output=json:$log.json" --gtest_color=no); fi
  # timeout(1) makes its own process group. The braces keep the shell's message about a crash out of
  # the summary.
  { timeout -k 5 "$deadline" ${WRAP:-} "${words[@]}" >"$log.log" 2>&1 7>&- & group=$!
    printf '%s\n' "$group" "$deadline" "$log" "$began" >"$state/$i.running"
    trap 'kill -TERM "$group" 2>/dev/null; exit 1' TERM
    wait "$group"; status=$?; } 2>/dev/null
  took=$((${EPOCHREALTIME%[.,]*} - began))
  [ $status != 137 ] || [ $took -lt "$deadline" ] || status=124
  rm -f "$state/$i.running"
  left=''
  if [ -n "$(members "$group")" ]; then sleep 2; left=$(members "$group"); fi
  [ -z "$left" ] || { left=$(for pid in $left; do tr '\0' ' ' <"/proc/$pid/cmdline" | head -c 80; echo; done 2>/dev/null); kill -KILL -- "-$group" 2>/dev/null; }
}
is_gtest() { [ -x "$1" ] && grep -q gtest_output "$1"; }

# run_job I AGAIN: runs job I, for the first time (0) or the last (1).
run_job() {
  local i=$1 again=$2 name=${names[$1]} deadline=$((${deadlines[$1]} * patience)) tests='' never=0 status took log left p f s verdict
  local -a words; eval "words=(${commands[$1]})"
  [ -z "${parts[$1]}" ] || export GTEST_TOTAL_SHARDS=${parts[$1]#*/} GTEST_SHARD_INDEX=${parts[$1]%/*}
  if [ "$again" = 1 ]; then
    deadline=$((deadline * 2)) name="$name, again"
    if [ -s "$state/$i.again" ]; then
      unset GTEST_TOTAL_SHARDS GTEST_SHARD_INDEX
      words+=("--gtest_filter=$(paste -sd: "$state/$i.again")")
    fi
  fi
  run_program "$i" "$name" "$deadline" "${words[@]}"
  read -r p f s < <(count_result $status "$log.log" "$log.json")
  # After a crash or a deadline some tests never ran: each has failed, unless it may run once more.
  if is_gtest "${words[0]}" && [ ! -s "$log.json" ]; then
    if [ "$again" = 1 ] && [ -s "$state/$i.again" ]; then cp "$state/$i.again" "$log.tests"; else selected_tests "${words[0]}" >"$log.tests"; fi
    unfinished_tests "$log.log" "$log.tests" >"$log.unfinished"
    never=$(grep -vc '^+' "$log.unfinished")
    tests=$(tr -d + <"$log.unfinished")
  fi
  verdict=ok
  # The second run must contain all unfinished tests, and must run all of them.
  if [ "$again" = 0 ] && [ $status = 124 ] && [ -n "$tests" ] && grep -aq '^\[ RUN ' "$log.log" && [ "$(wc -l <"$log.unfinished")" != "$f" ]; then status=125; fi
  if [ "$again" = 1 ] && [ -s "$state/$i.again" ] && [ $((p + f + s)) -lt "$(wc -l <"$state/$i.again")" ]; then f=$((f + 1)); fi
  if [ $status = 124 ] && [ "$again" = 0 ] && { [ "$took" -lt "$deadline" ] || ! bad_signs "$log.log"; }; then
    echo "$tests" | sed '/^$/d' >"$state/$i.again"
    verdict=slow f=0
    is_gtest "${words[0]}" || p=0 s=0   # a script runs again from its start
  else
    [ $status != 124 ] || [ "$f" != 0 ] || f=1
    [ -z "$left" ] || { verdict=FAIL f=$((f + 1)); }
    [ "$f" = 0 ] || verdict=FAIL
  fi
  {
    printf '%-4s %-44s %s  (%d s)\n' $verdict "$name" "$(totals_line "$p" "$f" "$s")" "$took"
    [ "$s" = 0 ] || skip_reasons $status "$log.log" | sort -u | sed 's/^/       skipped: /'
    # A script that ran several programs has printed the result of each.
    case ${words[0]} in *.sh) grep -aE '^(ok  |FAIL|     +(skipped|failed): )' "$log.log" | sed 's/^/     /' ;; esac
    if [ $status = 124 ]; then
      echo "       not done after $took s$([ $verdict != slow ] || echo "$([ -z "$tests" ] || echo ", $(wc -l <"$state/$i.again") tests"): once more, alone, at the end")"
      [ -z "$tests" ] || sed -n 's/^+\(.*\)/       at its deadline: \1/p' "$log.unfinished"
      sed 's/^/       | /' "$log.threads" 2>/dev/null
    fi
    if [ $verdict = FAIL ]; then
      failed_tests "$log.log" | sed 's/^/       failed: /'
      [ $never = 0 ] || { echo "       never ran, each counted as failed ($never):"; grep -v '^+' "$log.unfinished" | sed 's/^/         /'; }
      [ -z "$left" ] || sed 's/^/       left running: /' <<<"$left"
      echo "       status $status; from $log.log:"; failed_output "$log.log" | sed 's/^/       | /'
    fi
  } >"$state/$i.out"
  echo "$p $f $s $took" >"$state/$i.counts"
}

# ---- the jobs --------------------------------------------------------------------------------------------------------------
suites=() names=() deadlines=() parts=() alone=() commands=() suite_order=()
declare -A passed=() failed=() skipped=() busy=()
all_passed=0 all_failed=0 all_skipped=0 done_jobs=0
count() { # SUITE PASSED FAILED SKIPPED SECONDS
  passed[$1]=$((${passed[$1]} + $2)) failed[$1]=$((${failed[$1]} + $3)) skipped[$1]=$((${skipped[$1]} + $4)) busy[$1]=$((${busy[$1]} + $5))
  all_passed=$((all_passed + $2)) all_failed=$((all_failed + $3)) all_skipped=$((all_skipped + $4))
}
# job SUITE NAME DEADLINE PART PROGRAM ARGS..
job() {
  suites+=("$1") names+=("$2") deadlines+=("$3") parts+=("$4")
  case $1 in negative) alone+=(1) ;; *) alone+=('') ;; esac
  shift 4; commands+=("$(printf '%q ' "$@")")
}
programs() { find "$1" -maxdepth 1 -type f -perm -u+x ! -name '*.o' ! -name '*.d' 2>/dev/null | sort; }
scripts_of() { find "$home/$1" -maxdepth 1 -name '*.sh' -perm -u+x 2>/dev/null | sort; }

# Tests of unit and system wait for half of their time: two of their parts run in the slot of one
# other program. There are twice as many parts, so that none is long at the end.
cores=$(nproc)
free=$(awk '/^MemAvailable/ {print int($2 / 1048576)}' /proc/meminfo)
[ "${free:-1}" -ge "$cores" ] || cores=$((free > 1 ? free : 1))
slices=$((cores * 4)) room=$((cores * 2)) used=0
share() { case ${suites[$1]} in unit | system) echo 1 ;; *) echo 2 ;; esac; }

plan() {
  local suite=$1 program line i
  # Scripts first: one of them is the longest of the unit suite.
  case $suite in
    stress) line=$((timeout + seconds * 8)) ;;
    vm | kmod | deb | negative) line=$((timeout * 5)) ;;
    *) line=$timeout ;;
  esac
  for program in $(scripts_of "${suite/deb/package}"); do job "$suite" "${program#"$home"/}" $line '' "$program"; done
  case $suite in
    unit | system | ctl)
      program=$BUILD/tests/${suite}_tests
      if [ -x "$program" ]; then
        # In parts that run in parallel.
        if [ "$suite" = ctl ] || [ "$slices" = 1 ]; then job "$suite" "$suite" "$timeout" '' "$program"
        else for ((i = 0; i < slices; i++)); do job "$suite" "$suite, part $((i + 1)) of $slices" "$timeout" "$i/$slices" "$program"; done; fi
      elif compgen -G "$home/$suite/*.cpp" >/dev/null; then echo "FAIL $suite: $program is not built"; count "$suite" 0 1 0 0; fi ;;
    abi) for program in $(programs "$BUILD/tests/abi"); do job abi "abi/${program##*/}" "$timeout" '' "$program"; done ;;
    stress)
      for program in $(programs "$BUILD/tests/stress"); do
        job stress "stress/${program##*/}" $((seconds * 4 + 120)) '' "$program" --seconds "$seconds"
        while read -r line; do
          case $line in '' | '#'*) continue ;; esac
          # shellcheck disable=SC2086  # a line holds several arguments
          job stress "stress/${program##*/} $line" $((seconds * 4 + 120)) '' "$program" --seconds "$seconds" $line
        done < <(cat "$home/stress/${program##*/}.variants" 2>/dev/null)
      done ;;
    vm | kmod | python | examples | deb | negative) ;;
    *) echo "run-tests: no suite '$suite'" >&2; count "$suite" 0 1 0 0 ;;
  esac
}

report() { # I: a job has ended
  cat "$state/$1.out"
  # shellcheck disable=SC2046  # four numbers
  count "${suites[$1]}" $(cat "$state/$1.counts")
}
minutes() { printf '%d:%02d' $(($1 / 60)) $(($1 % 60)); }
heartbeat() {
  local i line test group deadline log began now=${EPOCHREALTIME%[.,]*}
  line="     .. $(minutes $SECONDS), $done_jobs of ${#names[@]} programs done; running:"
  for i in "${!running[@]}"; do
    { read -r group; read -r deadline; read -r log; read -r began; } 2>/dev/null <"$state/$i.running" || continue
    test=$(grep -a '^\[ RUN      \] ' "$log.log" 2>/dev/null | tail -1 | tr -d '\r' | cut -c14-)
    line+=" ${names[i]} ($((now - began)) s${test:+, $(grep -ac '^\[ RUN      \] ' "$log.log") tests, now $test});"
  done
  echo "${line%;}"
}
# When one test takes too long, end its program as timeout(1) would at the deadline.
declare -A tests_begun=() begun_at=()
end_stuck_tests() {
  local i group deadline log began count
  for i in "${!running[@]}"; do
    { read -r group; read -r deadline; read -r log; read -r began; } 2>/dev/null <"$state/$i.running" || continue
    count=$began:$(grep -ac '^\[ RUN      \] ' "$log.log" 2>/dev/null)
    if [ "$count" != "${tests_begun[$i]:-}" ]; then tests_begun[$i]=$count begun_at[$i]=$SECONDS
    elif [ "${count#*:}" != 0 ] && [ $((SECONDS - begun_at[$i])) -ge $((one * patience)) ]; then
      [ -e "$log.threads" ] || threads_of "$group" >"$log.threads"
      kill -ALRM "$group" 2>/dev/null
    fi
  done
}
# Shortly before a deadline, list where each thread waits.
look_at_threads() {
  local i group deadline log began now=${EPOCHREALTIME%[.,]*}
  for i in "${!running[@]}"; do
    { read -r group; read -r deadline; read -r log; read -r began; } 2>/dev/null <"$state/$i.running" || continue
    [ $((began + deadline - now)) -gt 4 ] || [ -e "$log.threads" ] || threads_of "$group" >"$log.threads"
  done
}

declare -A running=()
last_beat=0
# run_all AGAIN JOB..: starts them in this order, in parallel unless they must run alone.
run_all() {
  local again=$1 i pid only=''; shift
  local queue=("$@")
  while [ ${#queue[@]} != 0 ] || [ ${#running[@]} != 0 ]; do
    while [ ${#queue[@]} != 0 ] && [ $((used + $(share "${queue[0]}"))) -le "$room" ] && [ -z "$only" ]; do
      i=${queue[0]}
      if [ "$again" = 1 ] || [ -n "${alone[i]}" ]; then [ ${#running[@]} = 0 ] || break; only=$i; fi
      queue=("${queue[@]:1}")
      rm -f "$state/$i".{counts,out}
      used=$((used + $(share "$i")))
      ( trap - EXIT; run_job "$i" "$again"; echo "$i" >&7 ) & running[$i]=$!
    done
    i=''
    if ! read -r -t 1 -u 7 i; then
      # Notice a job that died without its message, which would otherwise be waited for forever.
      [ -n "$i" ] || for pid in "${!running[@]}"; do kill -0 "${running[$pid]}" 2>/dev/null || { i=$pid; break; }; done
    fi
    if [ -n "$i" ] && [ -n "${running[$i]:-}" ]; then
      wait "${running[$i]}" 2>/dev/null
      [ -s "$state/$i.counts" ] || { echo "0 1 0 0" >"$state/$i.counts"; echo "FAIL ${names[i]}: the runner lost it" >"$state/$i.out"; }
      unset "running[$i]"; only='' used=$((used - $(share "$i")))
      [ -e "$state/$i.again" ] && [ "$again" = 0 ] || done_jobs=$((done_jobs + 1))
      report "$i"
    fi
    [ ${#running[@]} = 0 ] || look_at_threads
    if [ ${#running[@]} != 0 ] && [ $((SECONDS - last_beat)) -ge "$beat" ]; then heartbeat; end_stuck_tests; last_beat=$SECONDS; fi
  done
}

repeated=()
totals() {
  local suite i
  echo "=="
  for suite in "${suite_order[@]}"; do
    printf '%-8s %7d passed %7d failed %7d skipped %6d s\n' "$suite" "${passed[$suite]}" "${failed[$suite]}" "${skipped[$suite]}" "${busy[$suite]}"
  done
  for i in ${repeated[@]+"${repeated[@]}"}; do
    echo "again: ${names[i]} met its deadline and ran once more, alone: $([ -s "$state/$i.counts" ] && awk '{print $2 ? "failed" : $1 + 0 ? "passed" : "skipped"}' "$state/$i.counts" || echo "not done")"
  done
  totals_line $all_passed $all_failed $all_skipped
}
# shellcheck disable=SC2317  # called by the trap
stopped() {
  trap '' TERM INT
  local i
  heartbeat
  for i in "${!running[@]}"; do kill "${running[$i]}" 2>/dev/null; done
  echo "run-tests: stopped after $(minutes $SECONDS): $((${#names[@]} - done_jobs)) of ${#names[@]} programs were not done, each counted as failed"
  all_failed=$((all_failed + ${#names[@]} - done_jobs))
  totals
  exit 1
}

for suite in "$@"; do
  suite_order+=("$suite") passed[$suite]=0 failed[$suite]=0 skipped[$suite]=0 busy[$suite]=0
  plan "$suite"
done
trap stopped TERM INT
fixed=${TEST_PATIENCE:-}
export TEST_PATIENCE=${fixed:-$(measured_patience "$scratch")}
patience=$TEST_PATIENCE
echo "== ${#names[@]} programs of $*, $cores at a time (two parts of unit and system where one other); deadlines times $patience"
# Start the longest scripts (their second line says "Runs first") first, so that none runs alone at
# the end.
long=() first=() late=() last=()
for i in "${!names[@]}"; do
  script=$home/${names[i]}
  if [ -n "${alone[i]}" ]; then last+=("$i")
  elif [ "${suites[i]}" = stress ]; then late+=("$i")
  elif [ -f "$script" ] && sed -n 2p "$script" | grep -q '^# Runs first'; then long+=("$i")
  else first+=("$i"); fi
done
run_all 0 ${long[@]+"${long[@]}"} ${first[@]+"${first[@]}"} ${late[@]+"${late[@]}"} ${last[@]+"${last[@]}"}
for i in "${!names[@]}"; do [ ! -e "$state/$i.again" ] || repeated+=("$i"); done
if [ ${#repeated[@]} != 0 ]; then
  slower=${fixed:-$(measured_patience "$scratch")}
  [ "$slower" -le "$patience" ] || { patience=$slower; export TEST_PATIENCE=$slower; }
  echo "== ${#repeated[@]} programs once more, each alone; deadlines times $((patience * 2))"
  run_all 1 "${repeated[@]}"
fi

# ---- what is left ----------------------------------------------------------------------------------------------------------
# A process that left its process group still has this run's folder in its environment.
for pid in $(grep -laF "TMPDIR=$TMPDIR" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3); do
  [ "$pid" != $$ ] && [ "$pid" != "$BASHPID" ] && said=$(tr '\0' ' ' 2>/dev/null <"/proc/$pid/cmdline" | head -c 100) && [ -n "$said" ] || continue
  echo "FAIL left running: process $pid $said"; all_failed=$((all_failed + 1)); kill -KILL "$pid" 2>/dev/null
done
size() { du -shx "$@" 2>/dev/null | awk '{print $1}'; }
forgotten=$(find "$TMPDIR" -mindepth 1 -maxdepth 1 -printf '%f\n' | sed 's/[._-][A-Za-z0-9]\{6,8\}$//' | sort | uniq -c | awk '{print $1 " x " $2}' | paste -sd, | sed 's/,/, /g')
[ -z "$forgotten" ] || echo "== tests forgot $(size "$TMPDIR") of files, which are removed: $forgotten"
cache=${VMEM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/vmem}
echo "== left: $BUILD $(size "$BUILD") (make clean)$([ ! -d "$cache" ] || echo ", cache $cache $(size "$cache")"), nothing else"
[ $((all_passed + all_failed)) != 0 ] || { echo "run-tests: nothing ran"; all_failed=1; }
totals
[ $all_failed = 0 ]
