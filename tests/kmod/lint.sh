#!/bin/bash
# The module's source under sparse and W=1 for each stock kernel, under checkpatch, and its size. No
# tool may print anything.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
passed=0 failed=0 skipped=0
report() {  # report NAME FINDINGS
  if [ -z "$2" ]; then passed=$((passed + 1)); echo "ok   $1"; else failed=$((failed + 1)); printf 'FAIL %s\n%s\n' "$1" "$2"; fi
}
missing() { skipped=$((skipped + 1)); echo "skipped: $1"; }

for kernel in 6.12 6.1; do
  if ! command -v sparse >/dev/null; then missing "sparse on $kernel: no sparse, apt-get install sparse"; continue; fi
  headers=$(scripts/vm/kernel.sh "$kernel" --headers) || { missing "sparse on $kernel: $headers"; continue; }
  # Compile everything anew: tools do not check files that make finds up to date.
  work=$(realpath -m "${BUILD:-build}/kmod-lint-$kernel"); rm -rf "$work"; mkdir -p "$work/include/vmem"
  cp -r kmod "$work/"; cp include/vmem/vmem_uapi.h "$work/include/vmem/"
  make -C "$work/kmod" KDIR="$headers" W=1 C=2 CF=-Wcontext >"$work/log" 2>&1 || echo "make ended with status $?" >>"$work/log"
  [ "$(grep -c '^ *CHECK ' "$work/log")" = "$(ls kmod/*.c | wc -l)" ] || echo "sparse did not see every file: warning: $work/log" >>"$work/log"
  report "sparse and W=1 on $kernel" "$(grep -E 'warning:|error:|make ended' "$work/log")"
  # A later stable release may export more symbols than the early ones, which people run. So the
  # list has every symbol that the module takes from 6.1, each looked up in an early release.
  [ "$kernel" != 6.1 ] || report "symbols of $kernel" "$(comm -13 <(grep -v '^#' tests/kmod/symbols-6.1.txt) <(nm -u "$work/kmod/vmem.ko" | awk '{print $2}' | LC_ALL=C sort) |
    sed 's/$/ is not in tests\/kmod\/symbols-6.1.txt/'; [ -s "$work/kmod/vmem.ko" ] || echo "no module was built")"
done

# checkpatch needs no kernel tree; a debug kernel's build folder has it, and so has every kernel
# source.
shopt -s nullglob
scripts=(${VMEM_CHECKPATCH:+"$VMEM_CHECKPATCH"} "${VMEM_DEBUG_KERNEL:-${VMEM_CACHE:-$HOME/.cache/vmem}/debug-6.12}"/*/scripts/checkpatch.pl
  /usr/src/linux-source-*/scripts/checkpatch.pl)
if [ ${#scripts[@]} = 0 ] || ! command -v perl >/dev/null; then
  missing "checkpatch: no checkpatch.pl; VMEM_CHECKPATCH names one"
else
  check() { perl "${scripts[0]}" --no-tree --terse --show-types --max-line-length=100 "$@" 2>&1 | grep -E ': (ERROR|WARNING|CHECK):'; }
  report checkpatch "$(check --strict -f kmod/*.[ch] kmod/delay/*.h kmod/probes/*.c; check -f include/vmem/vmem_uapi.h)"
fi
# A probe that fails for another reason must stop the build: here the compiler breaks, always or at
# one probe.
broken=$(mktemp); trap 'rm -f "$broken"' EXIT
printf '#!/bin/sh\ncase "$*" in *vm_flags_set.c) echo "x.h:1: error: unknown type name" >&2; exit 1 ;; esac\n' >"$broken"; chmod +x "$broken"
loud() { sh kmod/probes/probe.sh kmod/probes "$1" | grep -q '^error: ' || echo "nothing was said of a compiler like $1"; }
report "probes that fail" "$(loud false; loud "$broken")"
# Compares syzkaller's description with the header: each call, the order and width of each struct's
# fields, each flag and constant.
# fields FILE: prints "struct field bits" for each; a type that syzkaller names is as wide as
# declared
fields() {
  sed -E 's/\t+\(out\)$//' "$1" | awk '
    /^struct vmem_[a-z]+ \{/ || /^vmem_[a-z_]+ \{/ { name = $1 == "struct" ? $2 : $1; next }
    /^}/ { name = "" }
    name != "" && NF >= 2 {
      field = $1 ~ /^__[us]/ ? $2 : $1; type = $1 ~ /^__[us]/ ? $1 : $2 " " $3 " " $4
      bits = type ~ /64|vmem_(pool|region|any_offset|block|frame)/ ? 64 : 32
      sub(";", "", field); print name, field, bits }' | grep -v '^vmem_create_pool '
}
text=kmod/syzkaller/dev_vmem.txt header=include/vmem/vmem_uapi.h
report syzkaller "$(diff <(fields $header | grep -v '^vmem_event ' | sort -s -k1,1) <(fields $text | sort -s -k1,1)
  for name in $(grep -oE '^#define VMEM_(IOC|FEATURE|CREATE|POPULATE|OPF|PIN|KIND)_[A-Z_]+' $header | cut -d' ' -f2 | grep -v _MAGIC); do
    grep -qw "$name" $text || echo "$name is in $header and not in $text"
  done
  for name in $(grep -oE 'VMEM_[A-Z_]+\b' $text | sed 's/_POOL$\|_REGION$//' | sort -u); do
    grep -q "define $name" $header || echo "$name is in $text and not in $header"
  done
  # syzkaller refuses a comment that reads as a directive.
  grep -nE '^#[[:space:]]*(include|incdir|define|resource|type|meta)\>' $text)"
report size "$(cat kmod/*.[ch] | wc -l | awk '$1 >= 2500 {print $1 " lines, under 2500 promised"}')"
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ]
