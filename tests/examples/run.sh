#!/bin/bash
# Every example at a small size, with the data four times its budget: it ends with 0, says that its result is right and
# that the SSD was used; with one number changed behind its back it ends with 1 and says so.
#   run.sh [NAME..]: those examples
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
build=${BUILD:-build} passed=0 failed=0 wanted=" $* "
work=$(mktemp -d "${TMPDIR:-/var/tmp}/vmem-examples.XXXXXX"); trap 'rm -rf "$work"' EXIT
unset "${!VMEM_@}"

# expect STATUS TEXT.. -- NAME ARGS..: the example ends so, and prints lines that match the extended regular expressions.
expect() {
  local status=$1 texts=() text is said bad=''; shift
  while [ "$1" != -- ]; do texts+=("$1"); shift; done
  shift
  [[ $wanted == "  " || $wanted == *" $1 "* ]] || return 0
  said=$(cat -v <<<"$*")
  timeout $((120 * ${TEST_PATIENCE:-1})) "$build/examples/$1" "${@:2}" >"$work/out" 2>&1; is=$?
  [ $is = "$status" ] || bad="status $is, not $status"
  for text in "${texts[@]}"; do grep -qE "$text" "$work/out" || bad="$bad${bad:+; }no line '$text'"; done
  # Controls and characters of direction, in bytes: from the names of files, of devices and of libraries.
  LC_ALL=C grep -qaP '[\x00-\x08\x0b-\x1f\x7f]|\xe2\x80[\xaa-\xae]|\xe2\x81[\xa6-\xa9]' "$work/out" && bad="$bad${bad:+; }what steers a terminal"
  if [ -z "$bad" ]; then passed=$((passed + 1)); echo "ok   $said"; return; fi
  failed=$((failed + 1)); echo "FAIL $said"; echo "     failed: $bad"; sed 's/^/       | /' "$work/out" | cat -v
}
more='([1-9][0-9]*(\.[0-9]+)?|0\.0*[1-9][0-9]*)'   # than 0

expect 0 "^sum [0-9]+, $more MiB written to and $more MiB read" -- hello

seq 1 4500000 | shuf --random-source=<(yes) >"$work/lines"
head -c 50331648 /dev/urandom >"$work/records"
verified='verified . 0 mismatches in'
expect 0 'memory budget 12.6 MB \(1/4' "SSD read / written . $more / $more GB" "$verified 786432 records" -- vmem-sort "$work/records" --record-bytes 64 --budget 12MiB
expect 0 "SSD read / written . $more / $more GB" "$verified 4500000 lines" -- vmem-sort "$work/lines" --budget 8388608

expect 0 '\(1/4\.0\)' 'equal, bit for bit' "evicted from the device . $more" -- vmem-stream --device sim --make 32MiB --passes 1
expect 0 '\(1/4\.0\)' 'equal, bit for bit' "evicted from the device . $more" -- vmem-stream --device sim-handles --make 32MiB --passes 1

# Names that others gave to files, also as a shell's * gives them.
steers=$'\e]0;owned\a\u202etxt'
head -c 33554432 "$work/records" >"$work/$steers"
expect 0 'weights in .*owned' 'equal, bit for bit' -- vmem-stream "$work/$steers" --device sim --passes 1
for name in vmem-sort vmem-stream vmem-bfs vmem-cache vmem-gemm; do
  expect 2 'owned' -- $name "--o$steers"  # without a letter before it newer CLI11 takes it for a file's name
done

expect 0 '33.6 MB, memory budget 8.4 MB' "$more MB read" '^vmem-bfs: verified: 0 mismatches' -- vmem-bfs --scale 19
expect 0 "$more MB read" '^vmem-bfs: verified: 0 mismatches' -- vmem-bfs --scale 17 --degree 64 --uniform --budget 8MiB
printf '# a path and a triangle\n0 1\n1 2\n2 3 0.5\n5,6\n\n6\t7\n7 5\n' >"$work/graph.txt"
printf '%%%%MatrixMarket matrix coordinate pattern symmetric\n%% the same path\n8 8 3\n2 1\n3 2\n4 3\n' >"$work/graph.mtx"
expect 0 '8 vertices, 6 edges' '4 vertices can be reached from 0, the farthest over 3 edges' 'verified: 0 mismatches in 8 levels' -- vmem-bfs "$work/graph.txt" -o "$work/levels"
expect 1 'File exists' -- vmem-bfs "$work/graph.txt" -o "$work/levels"
expect 0 '1 vertices can be reached from 3,' 'verified: 0 mismatches' -- vmem-bfs "$work/graph.txt" --source 3
expect 0 '4 vertices can be reached from 3, the farthest over 3 edges' -- vmem-bfs "$work/graph.txt" --source 3 --undirected
expect 0 '4 vertices, 6 edges' '4 vertices can be reached from 3, the farthest over 3 edges' -- vmem-bfs "$work/graph.mtx" --source 3
expect 1 'no vertex 8: the last is 7' -- vmem-bfs "$work/graph.txt" --source 8
expect 1 'lines, line 1: two numbers' -- vmem-bfs "$work/lines"
echo '0 4294967290' >"$work/far"
expect 1 'has a vertex 4294967290: memory is there for' -- vmem-bfs "$work/far"
# A file that its owner changes while it is read: each reader of this pipe gets the next text.
mkfifo "$work/changes"
for texts in '0 1\n1 2,0 99999999\n1 2' '0 1\n1 2,0 1\n1 2,0 99999999'; do
  { IFS=, read -r -a each <<<"$texts"; for text in "${each[@]}"; do printf "$text\n" >"$work/changes"; sleep 0.2; done; } & writer=$!
  expect 1 'changes was changed meanwhile' -- vmem-bfs "$work/changes"
  kill $writer 2>/dev/null; wait $writer
done
expect 1 '^vmem-bfs: verified: [1-9][0-9]* mismatches' -- vmem-bfs --scale 14 --spoil

expect 0 'values in 33\.[0-9] MB, memory budget 8.4 MB' "$more MB read" "$more % hits, $more % waited" '^vmem-cache: verified: 0 mismatches' -- vmem-cache --capacity 32MiB --keys 30000 --gets 40000
expect 1 '^vmem-cache: verified: [1-9][0-9]* mismatches' -- vmem-cache --capacity 8MiB --keys 3000 --gets 6000 --spoil
awk 'BEGIN { for (i = 0; i < 20000; i++) { v = sprintf("%d-", i); while (length(v) < 1000) v = v v; printf "key%d\t%s\n", i, v } print "empty\t" }' >"$work/pairs"
{ seq -f key%g 0 19999; seq -f key%g 0 19999; echo empty; echo empty; echo none; } >"$work/ask"
expect 0 "budget 8.4 MB, $more MB read" "$more % hits" 'verified: 0 mismatches' -- vmem-cache "$work/pairs" --budget 8MiB
expect 0 '20001 values' '1 keys of .*ask are not in .*pairs' '40002 gets, 50.0 % hits' 'verified: 0 mismatches in 20001 values' -- vmem-cache "$work/pairs" --ask "$work/ask"
expect 0 "$more MB read" 'verified: 0 mismatches' -- vmem-cache "$work/pairs" --capacity 24MiB --budget 8MiB --gets 60000
expect 1 'is not "key, tab, value"' -- vmem-cache "$work/lines"
expect 1 'no room|limit_bytes' -- vmem-cache --capacity 1KiB

expect 0 'on the CPU' '38.5 MB with 9.6 MB' "$more MB read" '^vmem-gemm: verified: 0 mismatches' -- vmem-gemm --device cpu --n 1792 --tile 256
expect 0 'on simulated device' "$more MB read" '^vmem-gemm: verified: 0 mismatches' -- vmem-gemm --device sim --n 1792
expect 0 'on simulated device' "$more MB read" '^vmem-gemm: verified: 0 mismatches' -- vmem-gemm --device sim-handles --n 1792
expect 1 '^vmem-gemm: verified: 1 mismatches' -- vmem-gemm --device cpu --n 512 --spoil
expect 0 'by a plain loop' 'verified: 0 mismatches' -- vmem-gemm --device cpu --n 512 --blas none
expect 1 'is no BLAS' -- vmem-gemm --device cpu --n 512 --blas libm.so.6
python=$(for each in python3 /usr/bin/python3; do "$each" -c 'import numpy' 2>/dev/null && echo "$each" && break; done)
if [ -n "$python" ]; then
  "$python" - "$work" <<'P'
import sys, numpy as np
random = np.random.default_rng(1)
np.save(sys.argv[1] + "/a.npy", random.standard_normal((700, 1100), dtype="f4"))
np.save(sys.argv[1] + "/b.npy", random.standard_normal((1100, 900), dtype="f4"))
np.save(sys.argv[1] + "/double.npy", np.zeros((3, 3)))
# So many rows and columns that 64 bits hold only a rest of the number of their bytes: half a MiB.
header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (4292870656, 2148532480), }"
with open(sys.argv[1] + "/wraps.npy", "wb") as f:
    f.write(b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header)
    f.truncate(1 << 20)
P
  expect 0 '700 x 900' 'verified: 0 mismatches in 192 samples' -- vmem-gemm "$work/a.npy" "$work/b.npy" --device cpu --tile 256 -o "$work/c.npy"
  expect 1 'File exists' -- vmem-gemm "$work/a.npy" "$work/b.npy" --device cpu --tile 256 -o "$work/c.npy"
  expect 1 '1100 columns, .* 700 rows: no product' -- vmem-gemm "$work/a.npy" "$work/a.npy" --device cpu
  expect 1 'float32' -- vmem-gemm "$work/double.npy" "$work/a.npy" --device cpu
  expect 1 'wraps.npy is cut off' -- vmem-gemm "$work/wraps.npy" "$work/a.npy" --device cpu
  if [[ $wanted == "  " || $wanted == *" vmem-gemm "* ]]; then
    if "$python" -c 'import sys, numpy as np
a, b, c = (np.load(sys.argv[1] + f"/{name}.npy") for name in "abc")
sys.exit(not np.allclose(a @ b, c, atol=1e-3))' "$work"; then passed=$((passed + 1)); echo "ok   NumPy finds the same product"
    else failed=$((failed + 1)); echo "FAIL NumPy finds another product"; fi
  fi
fi
expect 1 '^vmem-gemm: --n 1000 is no multiple of --tile 512$' -- vmem-gemm --n 1000 --tile 512

# A command line that is not understood: one line, which begins with the program's name, and status 2.
for each in sort bfs cache gemm stream; do expect 2 "^vmem-$each: .*--bogus; vmem-$each --help lists the options$" -- "vmem-$each" --bogus; done
expect 2 '^vmem-bfs: --scale: Value 99 not in range' -- vmem-bfs --scale 99
expect 0 '^Usage: .*vmem-gemm' -- vmem-gemm --help

echo "$passed passed, $failed failed, 0 skipped"
[ $failed = 0 ] && [ $passed != 0 ]
