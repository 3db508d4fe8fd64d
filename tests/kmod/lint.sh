#!/bin/bash
# The module's source under sparse and W=1 for each stock kernel, under checkpatch, and its size. Nothing may be said.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
passed=0 failed=0 skipped=0
report() { # NAME WHAT-WAS-FOUND
  if [ -z "$2" ]; then passed=$((passed + 1)); echo "ok   $1"; else failed=$((failed + 1)); printf 'FAIL %s\n%s\n' "$1" "$2"; fi
}
missing() { skipped=$((skipped + 1)); echo "skipped: $1"; }

for kernel in 6.12 6.1; do
  if ! command -v sparse >/dev/null; then missing "sparse on $kernel: no sparse, apt-get install sparse"; continue; fi
  headers=$(scripts/vm/kernel.sh "$kernel" --headers) || { missing "sparse on $kernel: $headers"; continue; }
  # Everything is compiled anew: what make finds up to date it does not check.
  work=$(realpath -m "${BUILD:-build}/kmod-lint-$kernel"); rm -rf "$work"; mkdir -p "$work/include/vmem"
  cp -r kmod "$work/"; cp include/vmem/vmem_uapi.h "$work/include/vmem/"
  make -C "$work/kmod" KDIR="$headers" W=1 C=2 CF=-Wcontext >"$work/log" 2>&1 || echo "make ended with status $?" >>"$work/log"
  [ "$(grep -c '^ *CHECK ' "$work/log")" = "$(ls kmod/*.c | wc -l)" ] || echo "sparse did not see every file: warning: $work/log" >>"$work/log"
  report "sparse and W=1 on $kernel" "$(grep -E 'warning:|error:|make ended' "$work/log")"
done

# It needs no tree; a debug kernel's build folder has it, and so has every kernel's source.
shopt -s nullglob
scripts=(${VMEM_CHECKPATCH:+"$VMEM_CHECKPATCH"} "${VMEM_DEBUG_KERNEL:-${VMEM_CACHE:-$HOME/.cache/vmem}/debug-6.12}"/*/scripts/checkpatch.pl
  /usr/src/linux-source-*/scripts/checkpatch.pl)
if [ ${#scripts[@]} = 0 ] || ! command -v perl >/dev/null; then
  missing "checkpatch: no checkpatch.pl; VMEM_CHECKPATCH names one"
else
  check() { perl "${scripts[0]}" --no-tree --terse --show-types --max-line-length=100 "$@" 2>&1 | grep -E ': (ERROR|WARNING|CHECK):'; }
  report checkpatch "$(check --strict -f kmod/*.[ch] kmod/delay/*.h kmod/probes/*.c; check -f include/vmem/vmem_uapi.h)"
fi
# A probe that fails for a reason of its own must stop the build: here a compiler that breaks, at all or at one probe.
broken=$(mktemp); trap 'rm -f "$broken"' EXIT
printf '#!/bin/sh\ncase "$*" in *vm_flags_set.c) echo "x.h:1: error: unknown type name" >&2; exit 1 ;; esac\n' >"$broken"; chmod +x "$broken"
loud() { sh kmod/probes/probe.sh kmod/probes "$1" | grep -q '^error: ' || echo "nothing was said of a compiler like $1"; }
report "probes that fail" "$(loud false; loud "$broken")"
report size "$(cat kmod/*.[ch] | wc -l | awk '$1 >= 2500 {print $1 " lines, under 2500 promised"}')"
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ]
