#!/bin/bash
# fsx.sh: runs programs that exercise shared mappings of files on vmem_map, with
# tests/fsx/mmap_shim.c preloaded. They are our own (tests/fsx/exercise.cpp), and xfstests' fsx and
# holetest. Those two are free software under other terms (GPL) and in no Debian package: their
# source comes from VMEM_XFSTESTS, or from the cache (~/.cache/vmem/xfstests), or is fetched into
# it. Takes three to four times VMEM_STRESS_SECONDS. The last line has the totals.
#
# Two modes are left out, since a region is not a mapping there (docs/reliability.md, "Files"):
# - holetest -w: write(2) into pages that another thread stores to
# - holetest -F: stores of forked children
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
build=$(realpath "${BUILD:-build}") out=$(realpath "${BUILD:-build}")/tests/fsx seconds=${VMEM_STRESS_SECONDS:-5}
cache=${VMEM_CACHE:-$HOME/.cache/vmem} source=${VMEM_XFSTESTS:-}
passed=0 failed=0 skipped=0
mkdir -p "$out"
folder=$(mktemp -d "${TMPDIR:-/var/tmp}/vmem-fsx.XXXXXX"); trap 'rm -rf "$folder"' EXIT

note() { printf '%-4s %s\n' "$1" "$2"; }
# run NAME LIMIT PROGRAM..: runs it with the shim, which must have taken a mapping; with NAME "plain
# ..", without the shim.
run() {
  local name=$1 limit=$(($2 * ${TEST_PATIENCE:-1})) log=$folder/log; shift 2
  if [[ $name == plain* ]]; then timeout -k 3 "$limit" "$@" >"$log" 2>&1
  else
    env LD_PRELOAD="$out/shim.so" VMEM_SHIM_FOLDER="$folder" VMEM_HOST_BUDGET="$budget" VMEM_BLOCK_SIZE="$block" \
      VMEM_TRANSFER="$transfer" VMEM_TRAP="${VMEM_TRAP:-uffd}" VMEM_DEVICE=none VMEM_PUBLISH=off timeout -k 3 "$limit" "$@" >"$log" 2>&1
  fi
  local status=$?
  [ "$status" -le 128 ] || echo "ended by a signal" >>"$log"
  if [ "$status" = 0 ] && { [[ $name == plain* ]] || grep -aqE '^shim: [1-9]' "$log"; }; then passed=$((passed + 1)); note ok "$name"
  else failed=$((failed + 1)); note FAIL "$name (status $status)"; grep -av '^ok' "$log" | tail -20; fi
}
probe() { env LD_PRELOAD="$out/shim.so" VMEM_SHIM_FOLDER="$folder" VMEM_HOST_BUDGET=16MiB VMEM_TRAP="${VMEM_TRAP:-uffd}" VMEM_DEVICE=none "$out/exercise" "$folder/probe" 0.2 1 65536; }

# A sanitizer's library must be preloaded first, and these programs are built without sanitizers.
if grep -q -e '-fsanitize' "$build/flags" 2>/dev/null; then echo "skipped: a sanitized library cannot be preloaded"; exit 77; fi
${CC:-cc} -O1 -g -Wall -Wextra -Werror -fPIC -shared -Iinclude tests/fsx/mmap_shim.c -o "$out/shim.so" -L"$build" -lvmem -Wl,-rpath,"$build" -ldl -pthread &&
  ${CXX:-g++} -std=c++20 -O1 -g -Wall -Wextra -Werror -D_GNU_SOURCE tests/fsx/exercise.cpp -o "$out/exercise" -pthread || { echo "FAILED: does not build"; exit 1; }

# If the kernel offers this user no trap, there is nothing to exercise.
if ! probe >"$folder/probe.log" 2>&1 && grep -qE 'vmem_map: -(1|38|95) ' "$folder/probe.log"; then
  echo "skipped: $(grep -m1 vmem_map "$folder/probe.log")"; exit 77
fi

cases=("4KiB copy 8MiB 1" "64KiB auto 8MiB 2" "2MiB auto 20MiB 3" "2MiB copy 24MiB 4" "auto auto 8MiB 5")
each=$(awk -v s="$seconds" -v n="${#cases[@]}" 'BEGIN {print s / n < 0.5 ? 0.5 : s / n}')
run "plain exercise, on the kernel's own mmap" 120 "$out/exercise" "$folder/plain" 1 1 $((1 << 20))
for c in "${cases[@]}"; do
  read -r block transfer budget number <<<"$c"
  run "exercise, blocks of $block, $transfer, 32 MiB in $budget" $((seconds * 2 + 60)) "$out/exercise" "$folder/long" "$each" "$number" $((32 << 20))
  run "exercise, blocks of $block, $transfer, 300 KiB" $((seconds * 2 + 60)) "$out/exercise" "$folder/short" "$each" "1$number" 300000
done
# notices NAME PROGRAM..: drops all stores; the program must fail. (holetest reads back only through
# its mapping, so it cannot.)
notices() {
  local name=$1; shift
  if VMEM_SHIM_LOSE=1 LD_PRELOAD="$out/shim.so" VMEM_SHIM_FOLDER="$folder" VMEM_HOST_BUDGET=8MiB VMEM_BLOCK_SIZE=64KiB VMEM_TRAP="${VMEM_TRAP:-uffd}" \
    VMEM_DEVICE=none VMEM_PUBLISH=off timeout -k 3 $((60 * ${TEST_PATIENCE:-1})) "$@" >"$folder/log" 2>&1; then
    failed=$((failed + 1)); note FAIL "$name does not notice lost changes"
  elif grep -aqE '^shim: [1-9]|FAILED' "$folder/log"; then passed=$((passed + 1)); note ok "$name notices lost changes"
  else failed=$((failed + 1)); note FAIL "$name fails, and not for lost changes"; tail -20 "$folder/log"; fi
}
notices exercise "$out/exercise" "$folder/lost" 3 6 300000

# The programs of xfstests.
[ -n "$source" ] || source=$cache/xfstests
if [ ! -e "$source/ltp/fsx.c" ] && [ -z "${VMEM_XFSTESTS:-}" ] && command -v git >/dev/null; then
  timeout 60 git clone -q --depth 1 https://git.kernel.org/pub/scm/fs/xfs/xfstests-dev.git "$source" >/dev/null 2>&1 || rm -rf "$source"
fi
if [ ! -e "$source/ltp/fsx.c" ] || [ ! -e "$source/src/holetest.c" ]; then
  echo "skipped: xfstests' fsx and holetest: no source in $source, and it cannot be fetched"
  skipped=$((skipped + 2))
else
  printf '#include <err.h>\n#include <getopt.h>\n' >"$out/config.h"
  have=(); for h in SYS_TYPES SYS_STAT SYS_TIME SYS_WAIT SYS_IOCTL SYS_PARAM SYS_STATVFS SYS_MMAN STDLIB UNISTD STRINGS ERRNO FCNTL ASSERT LINUX_FALLOC; do have+=("-DHAVE_${h}_H"); done
  if ${CC:-cc} -w -O1 -D_GNU_SOURCE -D_FILE_OFFSET_BITS=64 -DFALLOCATE -DHAVE_FALLOCATE "${have[@]}" -I"$out" -I"$source/src" "$source/ltp/fsx.c" -o "$out/xfstests-fsx" 2>"$folder/cc.log" &&
    ${CC:-cc} -w -O1 -D_GNU_SOURCE -pthread "$source/src/holetest.c" -o "$out/xfstests-holetest" 2>>"$folder/cc.log"; then
    for c in "${cases[@]}"; do
      read -r block transfer budget number <<<"$c"
      # The limit is a number of operations: in a fixed time, a slow machine makes few. Options:
      # - -e: the bytes behind the end of the file, in its last page, are not zeros when its size
      #   changes
      # - -X: compares the whole file after each operation
      # - -q: quiet
      run "fsx, blocks of $block, $transfer, 4 MiB" $((seconds * 2 + 90)) "$out/xfstests-fsx" -q -e 1 -S "$number" -N $((seconds * 60)) -l $((4 << 20)) -P "$folder" "$folder/fsx"
      run "fsx, blocks of $block, $transfer, 1 MiB, compared whole" $((seconds * 2 + 90)) "$out/xfstests-fsx" -q -X -S "1$number" -N $((seconds * 30)) -l $((1 << 20)) -P "$folder" "$folder/fsx"
      run "fsx, blocks of $block, $transfer, 32 MiB in $budget" $((seconds * 2 + 90)) "$out/xfstests-fsx" -q -e 1 -S "2$number" -N $((seconds * 20)) -l $((32 << 20)) -o $((2 << 20)) -P "$folder" "$folder/fsx"
      # Plain stores; stores to pages that were read first; the same on private mappings.
      for options in "" -r -rp; do
        rm -f "$folder/holes"
        # shellcheck disable=SC2086  # no argument if empty
        run "holetest $options, blocks of $block, $transfer, 24 MiB in $budget" $((seconds * 2 + 60)) "$out/xfstests-holetest" $options "$folder/holes" 24
      done
    done
    rm -f "$folder/holes"
    notices fsx "$out/xfstests-fsx" -q -S 7 -N 2000 -l $((1 << 20)) -P "$folder" "$folder/fsx"
  else
    echo "FAILED: xfstests' programs do not build"; cat "$folder/cc.log"; failed=$((failed + 1))
  fi
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
