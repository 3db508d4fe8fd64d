#!/bin/bash
# vmem-sort does no harm: its input, and existing files at its output path, stay unchanged until a
# complete, verified result replaces them. It leaves nothing behind, however it ends.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
sort=$(realpath "${BUILD:-build}")/examples/vmem-sort passed=0 failed=0
work=$(mktemp -d "${TMPDIR:-/var/tmp}/vmem-sort-test.XXXXXX"); trap 'rm -rf "$work"' EXIT
unset "${!VMEM_@}"
export LC_ALL=C TMPDIR=$work

# step NAME COMMAND..: runs in an empty folder.
step() {
  local name=$1 said began=$SECONDS; shift
  rm -rf "$work/here" && mkdir "$work/here" && cd "$work/here" || exit 1
  if said=$("$@" 2>&1); then passed=$((passed + 1)); echo "ok   $name ($((SECONDS - began)) s)"
  else failed=$((failed + 1)); echo "FAIL $name"; tail -20 <<<"$said" | sed 's/^/       | /'; fi
}
text() { seq 1 300000 | shuf --random-source=<(yes) >"$1"; }
run() { timeout $((100 * ${TEST_PATIENCE:-1})) "$sort" --budget 8MiB "$@" >said 2>&1; }
# behind ARGS..: runs in the background, as $pid. Clears the output of the previous run, in which a
# caller that waits for a line would find it at once.
behind() { : >said; env --default-signal=INT,HUP "$sort" --threads 1 "$@" >said 2>&1 & pid=$!; }
# says TEXT STATUS: checks the output of run and its status.
says() { [ "$2" = "$3" ] && grep -qE "$1" said || { echo "status $3, not $2, or no '$1' in:"; cat said; return 1; }; }
# Each phase reports its start.
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
# The index of lines stays within its part of the budget, however short the lines are.
index_in_the_budget() {
  local line pid peak
  for line in $(printf '%062d' 0) 1; do
    yes $line | head -c 48M >a
    behind --budget 16MiB a
    while kill -0 $pid 2>/dev/null; do peak=$(sed -n 's/^VmHWM:[^0-9]*\([0-9]*\) kB/\1/p' /proc/$pid/status 2>/dev/null) && [ -n "$peak" ] && echo $peak >peak; sleep 0.02; done
    wait $pid; says 'verified . 0 mismatches' 0 $? || return
    echo "$(cat peak) kB at most with lines of ${#line}"; rm -f a.sorted
    [ ${#line} != 1 ] || [ "$(cat peak)" -lt "$(($(cat long) + 6144))" ] || return
    mv peak long
  done
}
# However short the lines are, there are few enough runs that the merge holds blocks of each. So no
# block is read repeatedly.
short_lines_are_read_once() {
  local read
  head -c 12M /dev/urandom | base64 -w 2 >a
  run a --threads 1; says 'verified . 0 mismatches' 0 $? || return
  read=$(sed -n 's/^| SSD read .*| \([0-9]*\)\.\([0-9]*\) \/.*/\1\2/p' said); cat said
  [ "$read" -lt 40 ]  # in hundredths of a GB; the file has 2.5
}
# The index is made for the items that there are, not for all of a large budget.
budget_above_the_memory() {
  local budget
  seq 1000 | shuf --random-source=<(yes) >a
  for budget in 1TiB 1PiB; do
    rm -f a.sorted; "$sort" --budget $budget --threads 64 a >said 2>&1; says 'verified . 0 mismatches in 1000 lines' 0 $? && sort a | cmp - a.sorted || return
  done
  rm -f a a.sorted; truncate -s 20G a 2>/dev/null || { echo "no such file on this file system"; return 0; }
  "$sort" --budget 1PiB --threads 64 a >said 2>&1
  grep -qE 'index takes [0-9]+ bytes of memory, there are [0-9]+$|are needed beside it' said || { cat said; return 1; }
  only a
}
no_whole_records() { head -c 1000 /dev/urandom >a; cp a b; run a --record-bytes 64; says 'no whole number of records of 64' 2 $? && cmp a b && only a b; }
same_file_refused() {  # by its name, by a link, by another name
  local to
  text a; ln -s a link; ln a other; cp a b
  for to in a ./a link other; do run a -o $to; says 'input and output are one file.*--in-place' 2 $? && cmp a b || return; done
  only a b link other
}
in_place() {
  text a; sort a >b; chmod 640 a; ln -s a link
  run --in-place link; says 'verified . 0 mismatches' 0 $? && cmp a b && [ -L link ] && [ "$(stat -c %a a)" = 640 ] && only a b link
}
in_place_as_its_owner() { text a; chmod 6751 a; run --in-place a; says 'verified . 0 mismatches' 0 $? && [ "$(stat -c %a a)" = 751 ]; }
in_place_with_other_names() { text a; ln a other; cp a b; run --in-place a; says 'has other names' 2 $? && cmp a b && only a b other; }
default_output_not_replaced() { text a; echo mine >a.sorted; run a; says 'is there already: say -o' 2 $? && [ "$(cat a.sorted)" = mine ] && only a a.sorted; }
named_output_replaced() { text a; echo old >out; ln -s out link; run a -o link; says 'verified . 0' 0 $? && sort a | cmp - out && [ -L link ] && only a link out; }
no_ordinary_file() {
  text a
  run a -o /dev/null; says '/dev/null is no ordinary file' 2 $? && [ -c /dev/null ] || return
  run /dev/zero; says '/dev/zero is a device or a terminal, no ordinary file' 2 $? || return
  run .; says 'is a folder, no ordinary file' 2 $? || return
  run missing; says 'missing: No such file' 2 $? && only a
}
file_of_the_kernel() { run /proc/self/maps -o out; says 'says that it has 0 bytes, and does not' 2 $? && only '*'; }
name_without_a_place() {  # of a file, in a folder of devices or of a process
  text a
  for name in /dev/stdin /proc/self/fd/0; do run $name <a; says "$name.sorted is no place for the result: .* -o" 2 $? || return; done
  run /dev/stdin -o out <a; says 'verified . 0' 0 $? && sort a | cmp - out && only a out
}
no_folder() { text a; run a -o none/out; says 'none/out.*No such file' 2 $? && only a; }
nobody_hears() {  # the result is still complete
  text a
  "$sort" --budget 8MiB a >/dev/full 2>said; says '^vmem-sort: standard output cannot be written' 1 $? && sort a | cmp - a.sorted || return
  "$sort" --budget 8MiB a -o out >&- 2>said; says '^vmem-sort: standard output cannot be written' 1 $? && cmp a.sorted out || return
  "$sort" --budget 8MiB a -o out >said 2>&-; says 'verified . 0' 0 $? && cmp a.sorted out && only a a.sorted out
}
link_to_nothing() { text a; ln -s none/here link; run a -o link; says 'link is a link to what is not there' 2 $? && only a link; }
# A user who cannot read the input cannot read the result or the temporary file either.
private_stays_private() {
  local open; umask 022
  text a; chmod 600 a; run a; says 'verified . 0' 0 $? && [ "$(stat -c %a a.sorted)" = 600 ] || { stat -c '%a %n' a.sorted; return 1; }
  text b; run b; says 'verified . 0' 0 $? && [ "$(stat -c %a b.sorted)" = 644 ] || { stat -c '%a %n' b.sorted; return 1; }
  for open in --in-place "-o out"; do
    for mib in 24 128 1024; do  # until the file was seen in time
      head -c ${mib}M /dev/urandom >c; chmod 644 c; echo old >out; : >modes
      # shellcheck disable=SC2086
      behind --budget 8MiB --record-bytes 64 c $open
      while kill -0 $pid 2>/dev/null; do stat -c %a ./*.part >>modes 2>/dev/null; sleep 0.01; done
      wait $pid && [ -s modes ] && break
    done
    [ "$(sort -u modes | grep -v 644)" = 600 ] || { echo "$open: $(sort modes | uniq -c)"; return 1; }
  done
}
# An access list that allows one user but not the group, and an extended attribute.
list='import os, struct, sys
one = lambda tag, may, who=0xffffffff: struct.pack("<HHI", tag, may, who)
acl = struct.pack("<I", 2) + one(1, 6) + one(2, 6, 61501) + one(4, 0) + one(16, 6) + one(32, 0)
try: os.setxattr("a", "system.posix_acl_access", acl); os.setxattr("a", "user.note", b"mine")
except OSError: sys.exit(77)'
has_list='import os, sys
sys.exit(not (len(os.getxattr(sys.argv[1], "system.posix_acl_access")) == 44 and os.stat(sys.argv[1]).st_mode & 0o777 == 0o660))'
access_list() {
  text a; python3 -c "$list" || { [ $? = 77 ] && { echo "no access lists here"; return 0; }; return 1; }
  run --in-place a; says 'verified . 0' 0 $? && python3 -c "$has_list" a || { echo "--in-place: its group may read it"; return 1; }
  python3 -c 'import os; assert os.getxattr("a", "user.note") == b"mine"' || return
  text b; run b -o a; says 'verified . 0' 0 $? && python3 -c "$has_list" a || { echo "-o: its group may read it"; return 1; }
}
# while_sorted CHANGE ARGS..: makes the change while runs are sorted; retries with more data if the
# program was faster.
while_sorted() {
  local change=$1 pid; shift
  for mib in 24 128 1024; do
    rm -f a a.sorted other; head -c ${mib}M /dev/urandom >a; cp a b
    behind --budget 8MiB --record-bytes 64 a "$@"
    until grep -q ^sorting said || ! kill -0 $pid 2>/dev/null; do sleep 0.02; done
    set -C; $change; set +C
    wait $pid || return 0
  done
  echo "the change was not noticed"; cat said; return 1
}
new_name() { echo mine 2>/dev/null >a.sorted; }
output_appears() { while_sorted new_name && grep -q 'a.sorted: File exists' said && [ "$(cat a.sorted)" = mine ] && cmp a b && only a a.sorted b; }
set_back() { touch -r a time; printf X | dd of=a bs=1 seek=5 conv=notrunc status=none; touch -r time a; }
changed_meanwhile() { while_sorted set_back --in-place && grep -q 'a was changed meanwhile' said && [ "$(stat -c %s a)" = "$(stat -c %s b)" ] && only a b time; }
changed_beside_output() { while_sorted set_back -o out && grep -q 'a was changed meanwhile' said && only a b time; }
group_of_another() {  # reported before the sort
  [ "$(id -u)" = 0 ] && setpriv --reuid=65534 --regid=65534 --clear-groups true 2>/dev/null || { echo "needs root and setpriv"; return 0; }
  text a; cp a "$work/b"; chown 65534:0 a . "$work/b"; chmod 755 "$work"; cp "$sort" "$work/sort"
  setpriv --reuid=65534 --regid=65534 --clear-groups "$work/sort" --budget 8MiB --in-place a >said 2>&1
  says 'a is of a group that you cannot give to the sorted file' 2 $? && ! grep -q sorting said && cmp a "$work/b" && only a
}
second_name() { ln a other 2>/dev/null; }
named_meanwhile() { while_sorted second_name --in-place && grep -q 'a was changed meanwhile' said && cmp a b && only a b other; }
room_before_the_merge() {  # or another file might take the space
  fallocate -l 1M room 2>/dev/null || { echo "no room can be taken on this file system"; return 0; }
  for how in "-o out" --in-place; do
    for mib in 24 128 1024; do  # until the file was seen in time
      : >room; head -c ${mib}M /dev/urandom >a
      # shellcheck disable=SC2086
      behind --budget 8MiB --record-bytes 64 a $how
      until grep -q ^sorting said || ! kill -0 $pid 2>/dev/null; do sleep 0.02; done
      stat -c '%b %s' ./*.part >room 2>/dev/null
      wait $pid && [ -s room ] && break
    done
    awk '{ exit !($1 * 512 >= $2 && $2 != 0) }' room && [ -s room ] || { echo "$how: $(cat room)"; return 1; }
  done
}
nobody_reads() {  # the reader of its output has closed the pipe
  text a
  "$sort" --budget 8MiB a 2>/dev/null | true
  [ "${PIPESTATUS[0]}" = 141 ] && only a
}
too_large() { text a; (ulimit -f 100; "$sort" --budget 8MiB a >/dev/null 2>&1); [ $? = 153 ] && only a; }
# Blocks do not fit on the SSD, so a touch gets SIGBUS or a call fails.
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
no_room() {  # for a sparse file of 16 TiB: its result would not fit on the disk
  truncate -s 16T a 2>/dev/null || { echo "no such file on this file system"; return 0; }
  run a -o out; says 'are needed beside it' 1 $? && only a
}
nothing_to_make() {
  run --make 63; says 'make is less than a record of 64 bytes' 2 $? || return; run --make 0; says 'make: 0 is no size from 1' 2 $? &&
    [ -z "$(find "$work" -name 'vmem-sort.*')" ] && only '*'
}
# stopped WHEN SIGNAL STATUS ARGS..: sends the signal when a line that begins with WHEN is printed;
# retries with more data if the program was faster. (A shell without job control makes its
# background jobs ignore SIGINT.)
stopped() {
  local when=$1 signal=$2 status=$3 mib pid is; shift 3
  for mib in 24 128 1024; do
    behind --budget 8MiB --make ${mib}MiB "$@"
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
step "an index of many short lines takes no more memory" index_in_the_budget
step "short lines are merged without reading runs over and over" short_lines_are_read_once
step "a budget above the memory of the machine" budget_above_the_memory
step "a file that is no whole number of records is refused" no_whole_records
step "input and output may not be one file by accident" same_file_refused
step "--in-place, through a link: sorted, with its mode and its name" in_place
step "--in-place leaves no program that runs as its owner" in_place_as_its_owner
step "--in-place is refused where the file has other names" in_place_with_other_names
step "FILE.sorted is not replaced unasked" default_output_not_replaced
step "an output that was named is replaced, through a link" named_output_replaced
step "devices, folders and missing files are refused" no_ordinary_file
step "files that hide their size are refused" file_of_the_kernel
step "an output that is a link to nothing is refused" link_to_nothing
step "a name with no place beside it asks for -o" name_without_a_place
step "an output in no folder is refused" no_folder
step "an output that cannot be printed is a failure, and spoils no file" nobody_hears
step "nobody reads the result, nor what it is made in, who could not read the file" private_stays_private
step "--in-place and -o keep the access list, --in-place notes as well" access_list
step "FILE.sorted that appears meanwhile is not replaced" output_appears
step "--in-place leaves a file that was changed meanwhile, whatever its time says" changed_meanwhile
step "-o makes nothing of a file that was changed meanwhile" changed_beside_output
step "--in-place says before the sort that a group cannot be kept" group_of_another
step "--in-place leaves a file that got another name meanwhile" named_meanwhile
step "all the room for the result is taken before the merge" room_before_the_merge
step "nothing stays where nobody reads what it prints" nobody_reads
step "nothing stays where a limit ends it" too_large
step "SSD full: input and old output as they were, nothing left" ssd_full
step "no room for the result: said before the sort" no_room
step "no data to make: refused, and nothing left" nothing_to_make
step "SIGINT while data is made" stopped making INT 130
step "SIGINT while runs are sorted" stopped sorting INT 130
step "SIGTERM while runs are merged" stopped merging TERM 143
step "SIGHUP while the result is verified" stopped verifying HUP 129

echo "$passed passed, $failed failed, 0 skipped"
[ $failed = 0 ]
