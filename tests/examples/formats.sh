#!/bin/bash
# Compares the examples' file readers with SciPy's and NumPy's on 10,000 odd files (formats.py;
# FORMATS_FILES, FORMATS_SEED), and vmem-sort with sort(1) on odd texts.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
build=$(realpath "${BUILD:-build}") passed=0 failed=0 skipped=0
work=$(mktemp -d "${TMPDIR:-/var/tmp}/vmem-formats.XXXXXX"); trap 'rm -rf "$work"' EXIT
unset "${!VMEM_@}"
export LC_ALL=C TMPDIR=$work

python=$(for each in python3 /usr/bin/python3; do "$each" -c 'import numpy, scipy.io' 2>/dev/null && echo "$each" && break; done)
if [ -n "$python" ]; then
  if "$python" tests/examples/formats.py "$build/tests/examples/formats" "${FORMATS_FILES:-10000}" "${FORMATS_SEED:-32}"; then
    passed=$((passed + 1)); echo "ok   readers agree with SciPy and NumPy"
  else failed=$((failed + 1)); echo "FAIL readers agree with SciPy and NumPy"; fi
else skipped=$((skipped + 1)); echo "     skipped: no SciPy (scripts/setup.sh test)"; fi

texts=('' '\n' '\n\n' 'a' 'b\na' 'b\na\n' 'b\r\na\r\n' 'b\r\na' '\0\n' 'a\0\na\n' 'a\0b\na\0a\n' '\na\n\nb' 'a\n\0' '\377\n\200\n\177\n' 'aaaaaaaa\0\naaaaaaaa\n'
  'aaaaaaaab\naaaaaaaa' 'a\r\n\r\n' '\r' '\t\n \n')
bad=0
for text in "${texts[@]}"; do
  printf "$text" >"$work/in"; rm -f "$work/out"
  sort "$work/in" >"$work/wanted"
  # vmem-sort keeps a last line without a newline as it is; sort(1) adds one.
  if [ -s "$work/in" ] && [ "$(tail -c1 "$work/in" | od -An -tx1)" != " 0a" ]; then truncate -s -1 "$work/wanted"; fi
  timeout 100 "$build/examples/vmem-sort" "$work/in" -o "$work/out" --budget 8MiB >"$work/said" 2>&1 && cmp -s "$work/out" "$work/wanted" ||
    { bad=$((bad + 1)); echo "     failed: '$text'"; cat "$work/said"; }
done
if [ $bad = 0 ]; then passed=$((passed + 1)); echo "ok   vmem-sort sorts as sort(1) does"
else failed=$((failed + 1)); echo "FAIL vmem-sort sorts as sort(1) does"; fi

echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ]
