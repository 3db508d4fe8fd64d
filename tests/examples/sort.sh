#!/bin/bash
# vmem-sort does no harm: what it is given, and what lies where it writes, stays as it is until a whole, verified result takes
# its place; and it leaves nothing behind, however it ends.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
sort=$(realpath "${BUILD:-build}")/examples/vmem-sort passed=0 failed=0
work=$(mktemp -d "${TMPDIR:-/var/tmp}/vmem-sort-test.XXXXXX"); trap 'rm -rf "$work"' EXIT
unset "${!VMEM_@}"
export LC_ALL=C TMPDIR=$work

# step NAME COMMAND..: in an empty folder.
step() {
  local name=$1 said began=$SECONDS; shift
  rm -rf "$work/here" && mkdir "$work/here" && cd "$work/here" || exit 1
  if said=$("$@" 2>&1); then passed=$((passed + 1)); echo "ok   $name ($((SECONDS - began)) s)"
  else failed=$((failed + 1)); echo "FAIL $name"; tail -20 <<<"$said" | sed 's/^/       | /'; fi
}
text() { seq 1 300000 | shuf --random-source=<(yes) >"$1"; }
run() { timeout $((100 * ${TEST_PATIENCE:-1})) "$sort" --budget 8MiB "$@" >said 2>&1; }
# says TEXT STATUS: what run said and how it ended.
says() { [ "$2" = "$3" ] && grep -qE "$1" said || { echo "status $3, not $2, or no '$1' in:"; cat said; return 1; }; }
# Each phase says that it has begun.
phases() { [ "$(sed -n 's/: 0 %, .*//p' "$1" | uniq | tr '\n' ' ')" = "sorting merging writing verifying " ] || { cat "$1"; return 1; }; }
only() { rm -f said; [ "$(echo *)" = "$*" ] || { echo "in the folder: $(echo *), not: $*"; return 1; }; }

lines_by_default() {  # although the size is a multiple of 64
  text a; while [ $(($(stat -c %s a) % 64)) != 0 ]; do echo >>a; done
  run a; says 'verified . 0 mismatches in 3000[0-9]* lines' 0 $? && sort a | cmp - a.sorted && phases said && only a a.sorted
}
last_line_without_newline() { printf 'b\nc\na' >a; run a; says 'verified . 0' 0 $? && printf 'a\nb\nc' | cmp - a.sorted; }
empty_file() { : >a; run a; says 'is empty' 0 $? && [ -f a.sorted ] && [ ! -s a.sorted ]; }
records_of_any_size() {
  local n
  for n in 1 8 10 64 100; do
    head -c $((n * 30000)) /dev/urandom >a; rm -f a.sorted
    run a --record-bytes $n; says 'verified . 0 mismatches in 30000 records' 0 $? || return
    [ -s a.sorted ] && cmp <(od -An -v -tx1 -w$n a | sort) <(od -An -v -tx1 -w$n a.sorted) || return
  done
}
no_whole_records() { head -c 1000 /dev/urandom >a; cp a b; run a --record-bytes 64; says 'no whole number of records of 64' 1 $? && cmp a b && only a b; }
same_file_refused() {  # by its name, by a link, by another name
  local to
  text a; ln -s a link; ln a other; cp a b
  for to in a ./a link other; do run a -o $to; says 'input and output are one file.*--in-place' 1 $? && cmp a b || return; done
  only a b link other
}
in_place() {
  text a; sort a >b; chmod 640 a; ln -s a link
  run --in-place link; says 'verified . 0 mismatches' 0 $? && cmp a b && [ -L link ] && [ "$(stat -c %a a)" = 640 ] && only a b link
}
in_place_as_its_owner() { text a; chmod 6751 a; run --in-place a; says 'verified . 0 mismatches' 0 $? && [ "$(stat -c %a a)" = 751 ]; }
in_place_with_other_names() { text a; ln a other; cp a b; run --in-place a; says 'has other names' 1 $? && cmp a b && only a b other; }
default_output_not_replaced() { text a; echo mine >a.sorted; run a; says 'is there already: say -o' 1 $? && [ "$(cat a.sorted)" = mine ] && only a a.sorted; }
named_output_replaced() { text a; echo old >out; ln -s out link; run a -o link; says 'verified . 0' 0 $? && sort a | cmp - out && [ -L link ] && only a link out; }
no_ordinary_file() {
  text a
  run a -o /dev/null; says '/dev/null is no ordinary file' 1 $? && [ -c /dev/null ] || return
  run /dev/zero; says '/dev/zero is no ordinary file' 1 $? || return
  run .; says 'is no ordinary file' 1 $? || return
  run missing; says 'missing: No such file' 1 $? && only a
}
# What cannot be stored: blocks do not fit on the SSD, so that a touch gets SIGBUS or a call fails.
ssd_full() {
  local status
  head -c 72M /dev/urandom | base64 -w 40 >a; echo old >out; sum=$(cksum <a)
  for how in "-o out" --in-place; do
    # shellcheck disable=SC2086
    VMEM_SSD_BUDGET=1MiB VMEM_FAULT_TIMEOUT_MS=200 run a $how; status=$?
    [ $status != 0 ] && [ $status != 124 ] && [ "$(cksum <a)" = "$sum" ] && [ "$(cat out)" = old ] || { echo "$how: status $status"; cat said; return 1; }
  done
  only a out
}
no_room() {  # a file of 16 TiB that holds nothing: its result would not fit beside it
  truncate -s 16T a 2>/dev/null || { echo "no such file on this file system"; return 0; }
  run a -o out; says 'are needed beside it' 1 $? && only a
}
nothing_to_make() {
  run --make 63; says '--make is less than a record of 64 bytes' 1 $? && run --make 0; says 'less than a record' 1 $? &&
    [ -z "$(find "$work" -name 'vmem-sort.*')" ] && only '*'
}
# stopped WHEN SIGNAL STATUS ARGS..: the signal comes when a line that begins with WHEN was printed; again with more data where
# the program was faster. (A shell without job control has its background jobs ignore SIGINT.)
stopped() {
  local when=$1 signal=$2 status=$3 mib pid is; shift 3
  for mib in 24 128 1024; do
    env --default-signal=INT,HUP "$sort" --budget 8MiB --threads 1 --make ${mib}MiB "$@" >said 2>&1 & pid=$!
    until grep -q "^$when" said || ! kill -0 $pid 2>/dev/null; do sleep 0.02; done
    kill -"$signal" $pid 2>/dev/null; wait $pid; is=$?
    [ $is = 0 ] || break
  done
  [ $is = "$status" ] && [ -z "$(find "$work" -name 'vmem-sort.*')" ] || { echo "status $is"; find "$work"; cat said; return 1; }
}

step "a file is lines of text, whatever its size" lines_by_default
step "a last line without newline" last_line_without_newline
step "an empty file" empty_file
step "records of 1, 8, 10, 64 and 100 bytes" records_of_any_size
step "a file that is no whole number of records is refused" no_whole_records
step "input and output may not be one file by accident" same_file_refused
step "--in-place, through a link: sorted, with its mode and its name" in_place
step "--in-place leaves no program that runs as its owner" in_place_as_its_owner
step "--in-place is refused where the file has other names" in_place_with_other_names
step "FILE.sorted is not replaced unasked" default_output_not_replaced
step "an output that was named is replaced, through a link" named_output_replaced
step "devices, folders and missing files are refused" no_ordinary_file
step "SSD full: input and old output as they were, nothing left" ssd_full
step "no room for the result: said before the sort" no_room
step "no data to make: refused, and nothing left" nothing_to_make
step "SIGINT while data is made" stopped making INT 130
step "SIGINT while runs are sorted" stopped sorting INT 130
step "SIGTERM while runs are merged" stopped merging TERM 143
step "SIGHUP while the result is verified" stopped verifying HUP 129

echo "$passed passed, $failed failed, 0 skipped"
[ $failed = 0 ]
