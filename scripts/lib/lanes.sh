# shellcheck shell=bash
# Sourced by .ci/run: runs parts of lanes, each with a limit, and summarizes them. The caller sets
# $logs, a folder.

passed=0 failed=0 skipped=0 lane='' rows=()
declare -A started=() began_at=()  # background jobs, by name
deadline=$((SECONDS + ${CI_SECONDS:-4980}))
rm -f "$logs"/*-*.log  # from an earlier run
: >"$logs/failures"; : >"$logs/names"

minutes() { printf '%d:%02d' $(($1 / 60)) $(($1 % 60)); }
begin_lane() { lane=$1 lane_began=$SECONDS; echo "##### lane $lane: $2"; }
end_lane() { rows+=("$(printf '%-11s %-11s %40s %8s' "$lane" "in all" '' "$(minutes $((SECONDS - lane_began)))")"); }

# start NAME LIMIT COMMAND..: runs it in the background; `part .. wait_for NAME` waits for it and
# takes its status.
start() {
  local name=$1 limit=$2; shift 2
  rm -f "$logs/$name.end"; : >"$logs/$name.out"
  ( timeout -k 10 "$limit" "$@" >"$logs/$name.out" 2>&1; echo "$? $SECONDS" >"$logs/$name.end.new"; mv "$logs/$name.end.new" "$logs/$name.end" ) &
  began_at[$name]=$SECONDS started[$name]=$!
}
wait_for() {
  wait "${started[$1]}"
  read -r status ended <"$logs/$1.end" || return 1
  took=$((ended - began_at[$1]))
  return "$status"
}

# in_short: filters a part's output for CI. It drops lines about compiling, passed tests and reasons
# for skips (the summary has these), and keeps the first lines of a failure. The part's log has
# everything.
in_short() {
  awk -v every="${CI_HEARTBEAT:-120}" '
    function say(line) { print substr(line, 1, 160); fflush() }
    /^     \.\. / { if (systime() - beat >= every) { beat = systime(); say($0) } next }
    /^FAIL/ { left = 12; say($0); next }
    /^(ok |  )/ { if (left > 0 && /^ +(FAIL|failed:|left running:|never ran|\|)/) { left--; say($0) } next }
    /^==|^note |^$/ { next }
    { left = 0; say($0) }'
}

# part NAME LIMIT COMMAND..: runs it; its totals are the last line of that form. CI_TIMES multiplies
# limits.
part() {
  local name=$1 limit=$(($2 * ${CI_TIMES:-1})) line status p f s began=$SECONDS log=$logs/$lane-$1.log note=''; shift 2
  [ $((deadline - SECONDS)) -ge "$limit" ] || limit=$((deadline - SECONDS > 1 ? deadline - SECONDS : 1))
  echo "##### $lane: $name (at most $((limit / 60)) minutes)"
  took=''
  if [ "$1" = wait_for ]; then
    wait_for "$2"; status=$?
    cp "$logs/$2.out" "$log"
    in_short <"$log"
  else
    timeout -k 10 "$limit" "$@" 2>&1 | tee "$log" | in_short
    status=${PIPESTATUS[0]}
  fi
  line=$(grep -aE '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' "$log" | tail -1)
  read -r p f s < <(tr -dc '0-9 \n' <<<"${line:-0 0 0}")
  if [ "$status" != 0 ] && [ "$f" = 0 ]; then
    f=1
    case $status in 124 | 137) note="not done after $limit s" ;; *) note="ended with status $status" ;; esac
  fi
  [ $((p + f + s)) != 0 ] || { f=1; note="counted nothing"; }
  [ -z "$note" ] || echo "ci: $name $note"
  passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
  rows+=("$(printf '%-11s %-11s %6d passed %5d failed %5d skipped %8s' "$lane" "$name" "$p" "$f" "$s" "$(minutes "${took:-$((SECONDS - began))}")")")
  [ "$f" = 0 ] || remember_failures
}
remember_failures() {
  { echo "--- $lane: $name${note:+: $note} ($log)"
    failures_of "$log" | grep . || [ -z "$note" ] || tail -10 "$log" | sed 's/^/       | /'; } | cut -c1-300 >>"$logs/failures"
  { echo "--- $lane: $name${note:+: $note} ($log)"; failures_of "$log" | grep -aE '^FAIL|^ +(FAIL|failed:|left running:)'; } | cut -c1-200 >>"$logs/names"
}

# reasons: why tests were skipped, with a count for each reason, over all parts.
reasons() {
  sed -nE 's/^ *skipped: //p' "$logs"/*-*.log | awk '
    { n = 1; if (match($0, / \([0-9]+ times\)$/)) { n = substr($0, RSTART + 2) + 0; $0 = substr($0, 1, RSTART - 1) } count[substr($0, 1, 140)] += n }
    END { for (r in count) printf "%5d  %s\n", count[r], r }' | sort -k1,1nr -k2
}

# Prints the reasons for skips, the table, repeated tests and the totals. If anything failed, it
# then prints all failures in short and the totals again, because readers see the end of a long log.
# Exit: 0 if nothing failed.
summary() {
  local why; why=$(reasons)
  [ -z "$why" ] || { echo "##### skipped, and why"; echo "$why"; }
  echo "##### summary"
  printf '%s\n' ${rows[@]+"${rows[@]}"}
  echo "in all $(minutes $SECONDS)"
  grep -haE '^again: ' "$logs"/*-*.log
  totals_line "$passed" "$failed" "$skipped"
  [ "$failed" = 0 ] && return 0
  echo "##### what failed"
  if [ "$(wc -l <"$logs/failures")" -le 80 ]; then cat "$logs/failures"; else cat "$logs/names"; fi
  totals_line "$passed" "$failed" "$skipped"
  return 1
}
