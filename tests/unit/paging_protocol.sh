#!/bin/bash
# Checks the protocol of kernels that ask (lib/kernel_paging/README.md) with model checkers: its
# model in all interleavings (spin), its source in the executions that the C++ memory model allows
# (relacy), and the source as device code. Each order, check and rule is removed once, and the
# checker must then find an error. Tools: scripts/setup.sh model. VMEM_LONG=1: larger settings, some
# minutes.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
[ -z "${VMEM_SANITIZER:-}" ] || { echo "skipped: it runs nothing of the library, and so the same without a sanitizer"; exit 77; }
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
passed=0 failed=0 skipped=0
report() { # NAME WRONG
  if [ -z "$2" ]; then echo "ok   $1"; passed=$((passed + 1)); else echo "FAIL $1: $2"; failed=$((failed + 1)); fi
}
skip() { echo "skipped: $1"; skipped=$((skipped + 1)); }
limit=$((120 * ${TEST_PATIENCE:-1}))

# ---- the model ----------------------------------------------------------------------------------------------------------
# model NAME=VALUE..|NAME..: prints what spin found: "nothing", "something" or an error.
model() {
  local dir=$work/model word
  rm -rf "$dir"; mkdir "$dir"
  { for word; do case $word in *=*) echo "#define ${word%%=*} ${word#*=}" ;; *) echo "#define $word 1" ;; esac; done; cat tests/protocol/paging.pml; } >"$dir/m.pml"
  (cd "$dir" && spin -a m.pml) >"$dir/log" 2>&1 || { tail -3 "$dir/log"; return; }
  # shellcheck disable=SC2086  # a compiler may be two words
  ${CC:-cc} "${level:--O1}" -w -DSAFETY -DNOFAIR -DCOLLAPSE -DVECTORSZ=2048 -DMEMLIM="${memory:-1500}" "$dir/pan.c" -o "$dir/pan" >"$dir/log" 2>&1 || { tail -3 "$dir/log"; return; }
  (cd "$dir" && timeout -k 3 "$limit" ./pan -m400000 -w"${hash:-22}" -n) >"$dir/log" 2>&1 || { echo "pan ended with $?"; return; }
  if grep -qE 'max search depth|out of memory|Search not completed' "$dir/log" && grep -q 'errors: 0' "$dir/log"; then grep -E 'max search|out of memory|not completed' "$dir/log"
  elif grep -q 'errors: 0$' "$dir/log"; then echo nothing
  elif grep -q 'errors: [1-9]' "$dir/log"; then echo something
  else tail -5 "$dir/log"; fi
}
right() { local found; found=$(model "${@:2}"); report "model: $1" "$([ "$found" = nothing ] || echo "found: $found")"; }
# Errors are found soon: most of the time is compilation.
wrong() { local found; found=$(level=-O0 model "${@:2}"); report "model without $1" "$([ "$found" = something ] || echo "found: $found")"; }

small=(BLOCKS=2 FRAMES=1 CELLS=2 LIMIT=12)
same=("${small[@]}" 'GROUP1=(0,0,1,1,1)' 'GROUP2=(0,0,1,1,1)' SPURIOUS=2)  # two groups write to one block
other=("${small[@]}" 'GROUP1=(0,0,1,1,2)' 'GROUP2=(1,0,1,0,1)')                # one frame for two blocks
several=(BLOCKS=3 FRAMES=2 CELLS=1 LIMIT=12 'GROUP1=(0,1,2,1,1)' 'GROUP2=(2,1,2,0,1)' ROUNDS=0)  # two blocks each, one in common
reads=("${small[@]}" 'GROUP1=(0,0,1,1,2)' 'READER=(0,2)')  # one reads in place what the other one writes
if command -v spin >/dev/null; then
  right "two groups write to a block that comes and goes" "${same[@]}"
  right "two groups want the one frame" "${other[@]}"
  right "two groups want two blocks each, of three" "${several[@]}"
  right ".. and reads fail, and the server ends" "${several[@]}" FAILURES=1 END
  right "a group loads from where a block is that another one stores to" "${reads[@]}"
  right "reads fail, groups give up, the server ends" "${other[@]}" FAILURES=1 GIVE_UPS=1 END
  if [ -n "${VMEM_LONG:-}" ]; then
    memory=8000 hash=26 limit=$((limit * 5))
    right "two groups want two blocks each, and try first without the token" "${several[@]/ROUNDS=0/ROUNDS=1}"
    right "two groups write twice" "${small[@]}" 'GROUP1=(0,0,1,1,2)' 'GROUP2=(0,0,1,1,2)' SPURIOUS=2
  fi
  for name in NO_PIN_FENCE NO_EVICT_FENCE NO_SECOND_LOOK NO_SAME_WORD NO_PUBLISH_RELEASE NO_UNPIN_RELEASE NO_UNPIN_ACQUIRE NO_RAISE NO_MARK_BEFORE; do
    wrong "${name#NO_}" "${same[@]}" $name
  done
  wrong FENCED_GENERATION "${same[@]}" NO_FENCED_GENERATION
  wrong RECALL_LOOK "${reads[@]}" NO_RECALL_LOOK
  for name in NO_WAKE_FENCE NO_SLEEP_LOOK NO_HOLD; do wrong "${name#NO_}" "${other[@]}" $name; done
  for name in NO_TOKEN NO_ALL_OR_NOTHING NO_OTHER_VICTIM NO_UNASK; do wrong "${name#NO_}" "${several[@]}" $name; done
  wrong TURN_BACK "${several[@]}" GIVE_UPS=1 NO_TURN_BACK
  wrong END_LOOK "${other[@]}" END NO_END_LOOK
else
  skip "spin is not installed (scripts/setup.sh model): the model was not checked"
fi

# ---- the source ----------------------------------------------------------------------------------
# shellcheck disable=SC2086  # a compiler may be two words
if echo "#include <relacy/relacy.hpp>" | ${CXX:-g++} -x c++ -std=c++17 -E - >/dev/null 2>&1; then
  # relacy's operator delete has no sized form. Its threads leave by longjmp to another stack, which
  # _FORTIFY_SOURCE (a default of Ubuntu's compilers) takes for an attack. Its warnings are not
  # ours.
  # shellcheck disable=SC2086
  if ${CXX:-g++} -O1 -std=c++17 -fno-sized-deallocation -U_FORTIFY_SOURCE -w -Iinclude -Ilib tests/protocol/paging_orders.cpp -o "$work/orders" >"$work/log" 2>&1; then
    out=$(timeout -k 3 "$limit" "$work/orders" 2>&1); status=$?
    report "text: $(sed -n 's/\(.*\): \([0-9]*\) executions.*/\1 \2,/p' <<<"$out" | tr '\n' ' ')no race, no wrong word, no wait for ever" "$([ $status = 0 ] || echo "status $status: $out")"
    for name in pin_fence settle_fence wake_fence sleep_fence publish_release unpin_release unpin_acquire; do
      out=$(env -u VMEM_LONG timeout -k 3 "$limit" "$work/orders" $name 2>&1); status=$?
      report "text without $name" "$([ $status = 1 ] || echo "status $status: $out")"
    done
  else
    report "text" "does not compile: $(grep -m3 error "$work/log")"
  fi
else
  skip "relacy-dev is not installed (scripts/setup.sh model): the protocol's text was not checked"
fi

# ---- as device code -----------------------------------------------------------------------------------------------------
nvcc=$(command -v nvcc || ls "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" 2>/dev/null)
if [ -n "$nvcc" ]; then
  out=$("$nvcc" -std=c++17 -arch=sm_90 -Werror all-warnings -Iinclude -Ilib -cubin -o "$work/cubin" tests/protocol/paging_device.cu 2>&1); status=$?
  report "device code: nvcc" "$([ $status = 0 ] || echo "$out")"
elif command -v clang++ >/dev/null; then
  # Without CUDA's headers: defines here what the source needs from them.
  out=$(clang++ -x cuda -std=c++17 --cuda-device-only --cuda-gpu-arch=sm_80 -nocudainc -nocudalib -Wno-unknown-cuda-version -include __clang_cuda_builtin_vars.h \
    '-D__device__=__attribute__((device))' '-D__host__=__attribute__((host))' '-D__global__=__attribute__((global))' '-D__shared__=__attribute__((shared))' -Iinclude -Ilib -S -o "$work/ptx" tests/protocol/paging_device.cu 2>&1); status=$?
  report "device code: clang" "$([ $status = 0 ] || echo "$out")"
else
  skip "neither nvcc nor clang++ is installed: the protocol was not compiled as device code"
fi

echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ]
