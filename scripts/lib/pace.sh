# shellcheck shell=bash
# Sourced by the test runner: measures how slow this machine is, and examines a program that met its
# deadline.

# measured_patience FOLDER: the factor, 1 to 12, by which a deadline for a quiet machine must grow
# now. Each core counts to 200,000 (0.2 s on a quiet core); then 32 MiB go to FOLDER's disk (0.4 s).
measured_patience() {
  local began=${EPOCHREALTIME/[.,]/} counted i workers=() cpu disk file=$1/.pace.$BASHPID
  for ((i = $(nproc); i > 0; i--)); do ( for ((counted = 0; counted < 200000; counted++)); do :; done ) & workers+=($!); done
  wait "${workers[@]}"
  cpu=$((${EPOCHREALTIME/[.,]/} - began)) began=${EPOCHREALTIME/[.,]/}
  dd if=/dev/zero of="$file" bs=1M count=32 conv=fsync status=none 2>/dev/null
  disk=$((${EPOCHREALTIME/[.,]/} - began)); rm -f "$file"
  # A quiet machine, too, sometimes takes up to twice the time.
  awk -v cpu=$cpu -v disk=$disk 'BEGIN { c = cpu / 200000; d = disk / 400000; m = c > d ? c : d; m = m <= 2 ? 1 : int(m + 0.999); if (m > 12) m = 12; print m }'
}

# members GROUP: the running processes of a process group.
members() {
  local stat line rest
  for stat in /proc/[0-9]*/stat; do
    read -r line 2>/dev/null <"$stat" || continue
    rest=${line##*) }   # state, parent, group
    # shellcheck disable=SC2086  # words
    set -- "$1" $rest
    [ "$4" = "$1" ] && [ "$2" != Z ] && echo "${line%% *}"
  done
}

# threads_of GROUP: a line for each thread, with where it waits and its CPU time, for a deadline
# about to be met.
threads_of() {
  local pid task name state rest
  for pid in $(members "$1"); do
    [ "$pid" != "$1" ] || continue   # timeout(1) itself
    echo "process $pid $(tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | head -c 120)"
    for task in "/proc/$pid/task"/*; do
      rest=$(cat "$task/stat" 2>/dev/null) || continue
      name=${rest#*\(} name=${name%\)*}
      # shellcheck disable=SC2086  # words: state 0, user and system time 11 and 12
      set -- "$1" ${rest##*\) }
      echo "  thread ${task##*/} $name: $2, $((${13} + ${14})) ticks, $(cat "$task/wchan" 2>/dev/null)"
    done
  done 2>/dev/null | head -80
}

# selected_tests PROGRAM [FILTER]: the tests that a GoogleTest program runs, in order: those of
# FILTER, limited to the shard that GTEST_TOTAL_SHARDS and GTEST_SHARD_INDEX name.
selected_tests() {
  "$1" --gtest_list_tests --gtest_filter="${2:-*}" 2>/dev/null | awk -v parts="${GTEST_TOTAL_SHARDS:-1}" -v part="${GTEST_SHARD_INDEX:-0}" '
    /^[^ ]/ { suite = $1; next }
    /^  / && suite ~ /\.$/ && (suite $1) !~ /(^|[.\/])DISABLED_/ && n++ % parts == part { print suite $1 }'
}

# unfinished_tests LOG NAMES: the tests of the file NAMES that did not end according to LOG; a "+"
# marks one that began.
unfinished_tests() {
  tr -d '\r' <"$1" | awk '
    FILENAME == "-" && /^\[ RUN      \] / { begun[$4] = 1 }
    FILENAME == "-" && /\[  (     OK|FAILED |SKIPPED) \] .* ms\)$/ { sub(/^.*\[  (     OK|FAILED |SKIPPED) \] /, ""); sub(/[, ].*/, ""); ended[$0] = 1 }
    FILENAME != "-" && !($0 in ended) { print ($0 in begun ? "+" : "") $0 }' - "$2"
}

# bad_signs LOG: true if a program that met its deadline printed signs of more than slowness.
bad_signs() {
  grep -aqE '(Address|Leak|Thread|UndefinedBehavior)Sanitizer|runtime error:|: Failure$|^\[  FAILED  \]|^ *FAIL|^E   |terminate called|Assertion .* failed' "$1"
}
