#!/bin/bash
# Runs every example at a small size, with data four times its budget. It must exit with 0, report a
# correct result, and have used the SSD. With one number changed behind its back it must exit with 1
# and say so.
#   run.sh [NAME..]: those examples
# Status 2: the command line or an input is wrong. When run as root, it also runs the examples as a
# user with an unprivileged userfaultfd, whose system calls may not meet an absent block.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
build=${BUILD:-build} as=() passed=0 failed=0 wanted=" $* "
work=$(mktemp -d "${TMPDIR:-/var/tmp}/vmem-examples.XXXXXX"); trap 'rm -rf "$work"' EXIT
unset "${!VMEM_@}"
programs=$build/examples

# expect STATUS TEXT.. -- NAME ARGS..: the example exits with STATUS and prints lines that match the
# extended regular expressions.
expect() {
  local status=$1 texts=() text is said bad=''; shift
  while [ "$1" != -- ]; do texts+=("$1"); shift; done
  shift
  [[ $wanted == "  " || $wanted == *" $1 "* ]] || return 0
  said=$(cat -v <<<"$*")
  timeout $((120 * ${TEST_PATIENCE:-1})) "${as[@]}" "$programs/$1" "${@:2}" >"$work/out" 2>&1; is=$?
  [ $is = "$status" ] || bad="status $is, not $status"
  for text in "${texts[@]}"; do grep -qE "$text" "$work/out" || bad="$bad${bad:+; }no line '$text'"; done
  # Control and direction characters, in bytes, from names of files, devices and libraries.
  LC_ALL=C grep -qaP '[\x00-\x08\x0b-\x1f\x7f]|\xe2\x80[\xaa-\xae]|\xe2\x81[\xa6-\xa9]' "$work/out" && bad="$bad${bad:+; }what steers a terminal"
  if [ -z "$bad" ]; then passed=$((passed + 1)); echo "ok   $said"; return; fi
  failed=$((failed + 1)); echo "FAIL $said"; echo "     failed: $bad"; sed 's/^/       | /' "$work/out" | cat -v
}
more='([1-9][0-9]*(\.[0-9]+)?|0\.0*[1-9][0-9]*)'  # than 0

expect 0 "^sum [0-9]+, $more MiB written to and $more MiB read" -- hello

seq 1 4500000 | shuf --random-source=<(yes) >"$work/lines"
head -c 50331648 /dev/urandom >"$work/records"
verified='verified . 0 mismatches in'
expect 0 'memory budget 12.6 MB \(1/4' "SSD read / written . $more / $more GB" "$verified 786432 records" -- vmem-sort "$work/records" --record-bytes 64 --budget 12MiB
expect 0 "SSD read / written . $more / $more GB" "$verified 4500000 lines" -- vmem-sort "$work/lines" --budget 8388608

expect 0 '\(1/4\.0\)' 'equal, bit for bit' "evicted from the device . $more" -- vmem-stream --device sim --make 32MiB --passes 1
expect 0 '\(1/4\.0\)' 'equal, bit for bit' "evicted from the device . $more" -- vmem-stream --device sim-handles --make 32MiB --passes 1

# Hostile file names, also as a shell's * expands them.
steers=$'\e]0;owned\a\u202etxt'
head -c 33554432 "$work/records" >"$work/$steers"
expect 0 'weights in .*owned' 'equal, bit for bit' -- vmem-stream "$work/$steers" --device sim --passes 1
for name in vmem-sort vmem-stream vmem-bfs vmem-cache vmem-gemm; do
  expect 2 'owned' -- $name "--o$steers"  # without a letter first, newer CLI11 takes it for a file name
done

expect 0 '33.6 MB, memory budget 8.4 MB' "$more MB read" '^vmem-bfs: verified: 0 mismatches' -- vmem-bfs --scale 19
expect 0 "$more MB read" '^vmem-bfs: verified: 0 mismatches' -- vmem-bfs --scale 17 --degree 64 --uniform --budget 8MiB
printf '# a path and a triangle\n0 1\n1 2\n2 3 0.5\n5,6\n\n6\t7\n7 5\n' >"$work/graph.txt"
printf '%%%%MatrixMarket matrix coordinate pattern symmetric\n%% the same path\n8 8 3\n2 1\n3 2\n4 3\n' >"$work/graph.mtx"
expect 0 '8 vertices, 6 edges' '4 vertices can be reached from 0, the farthest over 3 edges' 'verified: 0 mismatches in 8 levels' -- vmem-bfs "$work/graph.txt" -o "$work/levels"
expect 2 'File exists' -- vmem-bfs "$work/graph.txt" -o "$work/levels"
expect 0 '1 vertices can be reached from 3,' 'verified: 0 mismatches' -- vmem-bfs "$work/graph.txt" --source 3
expect 0 '4 vertices can be reached from 3, the farthest over 3 edges' -- vmem-bfs "$work/graph.txt" --source 3 --undirected
expect 0 '8 vertices, 6 edges' '4 vertices can be reached from 3, the farthest over 3 edges' -- vmem-bfs "$work/graph.mtx" --source 3
for banner in '%%MatrixMarket matrix coordinate pattern Symmetric' '%%matrixmarket matrix coordinate pattern symmetric' '%%MatrixMarket MATRIX COORDINATE PATTERN SYMMETRIC'; do
  printf '%s\n%% a comment\n\n5 5 4\n2 1\n3 2\n4 3\n5 4\n' "$banner" >"$work/any.mtx"
  expect 0 '5 vertices, 8 edges' '5 vertices can be reached from 4, ' 'verified: 0 mismatches' -- vmem-bfs "$work/any.mtx" --source 4
done
sed -i '1s/.*/%MatrixMarket matrix coordinate pattern symmetric/' "$work/any.mtx"
expect 2 'any.mtx, line 1: a Matrix Market file begins with %%MatrixMarket' -- vmem-bfs "$work/any.mtx"
expect 2 'no vertex 8: the last is 7' -- vmem-bfs "$work/graph.txt" --source 8
expect 2 'lines, line 1: two numbers' -- vmem-bfs "$work/lines"
printf '1 2 a\0b\n' >"$work/nul"
expect 2 'nul, line 1: "a\?b" is no weight$' -- vmem-bfs "$work/nul"
printf '%%%%MatrixMarket matrix coordinate a\0b general\n' >"$work/nul"
expect 2 'nul, line 1: field a\?b is none of pattern, real, integer and complex$' -- vmem-bfs "$work/nul"
echo '0 4294967290' >"$work/far"
expect 2 'has a vertex 4294967290: memory is there for' -- vmem-bfs "$work/far"
# Inputs that can be read only once, and inputs that claim more bytes than they have.
sys=/sys/kernel/mm/transparent_hugepage/enabled
for name in vmem-sort vmem-bfs vmem-cache vmem-stream; do
  expect 2 'is a pipe, which can be read only once: write' -- $name <(cat "$work/graph.txt")
  expect 2 'is a folder' -- $name "$work"
  expect 2 '/proc/self/maps says that it has 0 bytes, and does not' -- $name /proc/self/maps
  [ ! -r $sys ] || expect 2 "$sys says that it has 4096 bytes, and does not" -- $name $sys
done
expect 2 'is a pipe, which can be read only once: write' -- vmem-gemm <(cat "$work/graph.txt") "$work/graph.txt"
# a search that scans all vertices in each level takes hours
awk 'BEGIN { for (i = 0; i < 1000000; i++) print i, i + 1 }' >"$work/path"
expect 0 '1000001 vertices can be reached from 0, the farthest over 1000000 edges' 'verified: 0 mismatches' -- vmem-bfs "$work/path"
printf '%%%%MatrixMarket matrix coordinate pattern general\n%% MatrixMarket file of x\n%%%%MatrixMarket\n2 2 1\n1 2\n' >"$work/comment.mtx"
expect 0 '2 vertices, 1 edges' -- vmem-bfs "$work/comment.mtx"
expect 1 '^vmem-bfs: verified: [1-9][0-9]* mismatches' -- vmem-bfs --scale 14 --spoil

expect 0 'values in 33\.[0-9] MB, memory budget 8.4 MB' "$more MB read" "$more % hits, $more % waited" '^vmem-cache: verified: 0 mismatches' -- vmem-cache --capacity 32MiB --keys 30000 --gets 40000
expect 1 '^vmem-cache: verified: [1-9][0-9]* mismatches' -- vmem-cache --capacity 8MiB --keys 3000 --gets 6000 --spoil
awk 'BEGIN { for (i = 0; i < 20000; i++) { v = sprintf("%d-", i); while (length(v) < 1000) v = v v; printf "key%d\t%s\n", i, v } print "empty\t" }' >"$work/pairs"
{ seq -f key%g 0 19999; seq -f key%g 0 19999; echo empty; echo empty; echo none; } >"$work/ask"
expect 0 "budget 8.4 MB, $more MB read" "$more % hits" 'verified: 0 mismatches' -- vmem-cache "$work/pairs" --budget 8MiB
expect 0 '20001 values' '1 keys of .*ask are not in .*pairs' '40002 gets, 50.0 % hits' 'verified: 0 mismatches in 20001 values' -- vmem-cache "$work/pairs" --ask "$work/ask"
expect 0 "$more MB read" 'verified: 0 mismatches' -- vmem-cache "$work/pairs" --capacity 24MiB --budget 8MiB --gets 60000
expect 2 'lines, line 1: .* is not "key, tab, value"' -- vmem-cache "$work/lines"
printf 'ab\0cd\nx\ty\n' >"$work/nul"
expect 2 'nul, line 1: "ab\?cd" is not "key, tab, value"$' -- vmem-cache "$work/nul"
{ printf 'key\t'; head -c 2500000 /dev/zero | tr '\0' v; } >"$work/wide"
expect 2 'a value of [0-9]+ bytes is larger than --capacity' -- vmem-cache "$work/wide" --capacity 3MiB

expect 0 'on the CPU' '38.5 MB with 9.6 MB' "$more MB read" '^vmem-gemm: verified: 0 mismatches' -- vmem-gemm --device cpu --n 1792 --tile 256
expect 0 'on simulated device' "$more MB read" '^vmem-gemm: verified: 0 mismatches' -- vmem-gemm --device sim --n 1792
expect 0 'on simulated device' "$more MB read" '^vmem-gemm: verified: 0 mismatches' -- vmem-gemm --device sim-handles --n 1792
expect 1 '^vmem-gemm: verified: 1 mismatches' -- vmem-gemm --device cpu --n 512 --spoil
expect 0 'by a plain loop' 'verified: 0 mismatches' -- vmem-gemm --device cpu --n 512 --blas none
expect 2 'is no BLAS' -- vmem-gemm --device cpu --n 512 --blas libm.so.6
python=$(for each in python3 /usr/bin/python3; do "$each" -c 'import numpy' 2>/dev/null && echo "$each" && break; done)
if [ -n "$python" ]; then
  "$python" - "$work" <<'P'
import sys, numpy as np
random = np.random.default_rng(1)
np.save(sys.argv[1] + "/a.npy", random.standard_normal((700, 1100), dtype="f4"))
np.save(sys.argv[1] + "/b.npy", random.standard_normal((1100, 900), dtype="f4"))
np.save(sys.argv[1] + "/double.npy", np.zeros((3, 3)))
# Numbers at the limits: NaN and infinities are right if NumPy computes them too.
for name, a, b in ("nan", np.nan, 1), ("inf", np.inf, 2), ("infzero", np.inf, 0), ("over", -1e30, 1e30), ("tiny", 1e-30, 1e-15), ("zero", 0, 0):
    np.save(sys.argv[1] + f"/{name}.a.npy", np.array([[a]], "f4"))
    np.save(sys.argv[1] + f"/{name}.b.npy", np.array([[b]], "f4"))
left, right = random.standard_normal((150, 170), dtype="f4"), random.standard_normal((170, 90), dtype="f4")
left[3, 5], left[100, 2], right[7, 7] = np.nan, np.inf, -np.inf
np.save(sys.argv[1] + "/mixed.a.npy", left)
np.save(sys.argv[1] + "/mixed.b.npy", right)
# So many rows and columns that their number of bytes overflows 64 bits, to half a MiB.
header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (4292870656, 2148532480), }"
with open(sys.argv[1] + "/wraps.npy", "wb") as f:
    f.write(b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header)
    f.truncate(1 << 20)
header = b"{'a\0b': 1}"
with open(sys.argv[1] + "/nul.npy", "wb") as f:
    f.write(b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header)
P
  expect 0 '700 x 900' 'verified: 0 mismatches in 192 samples' -- vmem-gemm "$work/a.npy" "$work/b.npy" --device cpu --tile 256 -o "$work/c.npy"
  expect 2 'File exists' -- vmem-gemm "$work/a.npy" "$work/b.npy" --device cpu --tile 256 -o "$work/c.npy"
  expect 2 '1100 columns, .* 700 rows: no product' -- vmem-gemm "$work/a.npy" "$work/a.npy" --device cpu
  expect 2 'float32' -- vmem-gemm "$work/double.npy" "$work/a.npy" --device cpu
  expect 2 'nul.npy has a header with an unknown key, a\?b$' -- vmem-gemm "$work/nul.npy" "$work/a.npy" --device cpu
  expect 2 'wraps.npy is cut off' -- vmem-gemm "$work/wraps.npy" "$work/a.npy" --device cpu
  for name in nan inf infzero over tiny zero mixed; do
    expect 0 'verified: 0 mismatches' '0 numbers are not as in the files' -- vmem-gemm "$work/$name.a.npy" "$work/$name.b.npy" --device cpu --tile 64 -o "$work/$name.c.npy"
  done
  if [[ $wanted == "  " || $wanted == *" vmem-gemm "* ]]; then
    if "$python" -c 'import sys, numpy as np
np.seterr(all="ignore")
each = lambda case: (np.load(sys.argv[1] + f"/{case}{name}.npy") for name in "abc")
wrong = [case for case in ("", "nan.", "inf.", "infzero.", "over.", "mixed.") for a, b, c in [each(case)] if not np.allclose(a @ b, c, atol=1e-3, equal_nan=True)]
a, b, c = each("tiny.")
sys.exit("%s, %g" % (wrong, c[0, 0]) if wrong or c[0, 0] != (a @ b)[0, 0] else 0)' "$work"; then passed=$((passed + 1)); echo "ok   NumPy finds the same product"
    else failed=$((failed + 1)); echo "FAIL NumPy finds another product"; fi
  fi
fi
expect 2 '^vmem-gemm: --n 1000 is no multiple of --tile 512$' -- vmem-gemm --n 1000 --tile 512

if [ "$(id -u)" = 0 ] && setpriv --reuid=65534 --regid=65534 --clear-groups true 2>/dev/null; then
  awk 'BEGIN { for (i = 0; i < 700; i++) { v = sprintf("%d-", i); while (length(v) < 16384) v = v v; printf "key%d\t%s\n", i, substr(v, 1, 16384) } }' >"$work/long"
  mkdir "$work/theirs" "$work/programs"; chmod 755 "$work" "$work/programs"; chown -R 65534 "$work/theirs"; chmod a+r "$work"/*
  cp "$build"/examples/vmem-* "$work/programs" 2>/dev/null
  programs=$work/programs as=(setpriv --reuid=65534 --regid=65534 --clear-groups env TMPDIR="$work/theirs" VMEM_SSD_PATH="$work/theirs")
  expect 0 "$more MB read" 'verified: 0 mismatches' -- vmem-cache "$work/long" --capacity 9MiB --budget 8MiB --gets 4000
  expect 0 "$more MB read" 'verified: 0 mismatches' -- vmem-cache --capacity 32MiB --keys 30000 --gets 40000
  expect 0 "$verified 786432 records" -- vmem-sort "$work/records" --record-bytes 64 --budget 12MiB -o "$work/theirs/sorted"
  expect 0 "$more MB read" 'verified: 0 mismatches' -- vmem-bfs --scale 19
  expect 0 '4 vertices can be reached' -- vmem-bfs "$work/graph.mtx" --source 3 -o "$work/theirs/levels"
  [ -z "$python" ] || expect 0 'verified: 0 mismatches' -- vmem-gemm "$work/a.npy" "$work/b.npy" --device cpu --tile 256 --budget 8MiB -o "$work/theirs/c.npy"
  expect 0 'equal, bit for bit' -- vmem-stream --device sim --make 32MiB --passes 1
  programs=$build/examples as=()
else
  echo "     skipped: as another user: needs root and setpriv"
fi

# An invalid command line gives one line that begins with the program's name, and status 2.
for each in sort bfs cache gemm stream; do expect 2 "^vmem-$each: .*--bogus; vmem-$each --help lists the options$" -- "vmem-$each" --bogus; done
expect 2 '^vmem-bfs: --scale: Value 99 not in range' -- vmem-bfs --scale 99
expect 0 '^Usage: .*vmem-gemm' -- vmem-gemm --help
refused() {  # refused OPTION TEXT ARGS..: so does an argument with an impossible value
  local option=$1 text=$2 name; shift 2
  for name in "$@"; do expect 2 "^$name: $option: $text" -- $name $option "${value--5}"; done
}
every=(vmem-sort vmem-bfs vmem-cache vmem-gemm vmem-stream)
for value in -5 1 0 nonsense 8PiB; do refused --budget '.* is (no|not a) size' "${every[@]}"; done
for value in 1KiB 0 -1; do refused --capacity '.* is (no|not a) size' vmem-cache; done
for value in -5 0 x; do refused --make '.* is (no|not a) size' vmem-sort vmem-stream; done
value=1 refused --host-budget '1 is no size from 8' vmem-stream
value=-1 refused --rows '.*not in range' vmem-stream
expect 2 '100 is no multiple of 64' -- vmem-stream --device sim --n 100
expect 2 '2097152 has no room for a layer, .* 8388608 bytes' -- vmem-stream --device sim --n 2048 --make 32MiB --budget 2MiB
# The value of an empty variable is no name.
for name in "${every[@]}"; do expect 2 'the text that was given is empty' -- $name ''; done
for name in vmem-sort vmem-bfs vmem-gemm; do expect 2 'empty|missing' -- $name -o ''; done
expect 2 'none/levels.*No such file' -- vmem-bfs "$work/graph.txt" -o "$work/none/levels"
# lost NAME ARGS..: if the output cannot be written, the status says so, whatever the result.
lost() {
  [[ $wanted == "  " || $wanted == *" $1 "* ]] || return 0
  local closed
  for closed in '>/dev/full' '>&-'; do
    bash -c "\"\$@\" $closed" lost "$programs/$1" "${@:2}" 2>"$work/out"; is=$?
    if [ $is = 1 ] && grep -q "^$1: standard output cannot be written$" "$work/out"; then passed=$((passed + 1)); echo "ok   $* $closed"; continue; fi
    failed=$((failed + 1)); echo "FAIL $* $closed: status $is"; sed 's/^/       | /' "$work/out"
  done
}
for name in "${every[@]}"; do lost $name --help; done
lost vmem-bfs "$work/graph.txt"
lost vmem-cache "$work/pairs" --ask "$work/ask"
lost vmem-gemm --device cpu --n 64 --tile 64
lost vmem-stream --device sim --make 8MiB --passes 1

echo "$passed passed, $failed failed, 0 skipped"
[ $failed = 0 ] && [ $passed != 0 ]
