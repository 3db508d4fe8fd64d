#!/bin/bash
# power_loss.sh [KERNEL]: a shared file on ext4 on dm-log-writes, in a guest. The data that
# vmem_sync promised is there after a loss of power at any instant (power_loss.cpp).
# VMEM_STRESS_SECONDS (3) is the time of writing; testing losses takes four times as long.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
build=${BUILD:-build} kernel=${1:-6.12} seconds=${VMEM_STRESS_SECONDS:-3}
[ -x "$build/tests/vm/power_loss" ] || { echo "FAILED: $build/tests/vm/power_loss is not built"; exit 1; }
work=$(mktemp -d "${TMPDIR:-/tmp}/vmem-power-XXXXXX"); trap 'rm -rf "$work"' EXIT
truncate -s 16M "$work/fs.img"
PATH=$PATH:/sbin:/usr/sbin mkfs.ext4 -q -b 4096 "$work/fs.img" || { echo "skipped: mkfs.ext4 is not here"; exit 77; }
programs=()
n=0
for variant in "--block 4KiB" "--block 64KiB" "--block 2MiB --engine threads"; do
  n=$((n + 1))
  # shellcheck disable=SC2086,SC2206  # words
  programs+=(-- "$build/tests/vm/power_loss" --seconds "$seconds" --check-seconds $((seconds * 4)) --seed $n $variant)
done
scripts/vm/run-guest.sh --kernel "$kernel" --user root --in-tree brd --in-tree dm-mod --in-tree dm-log-writes --file "$work/fs.img:/fs.img" \
  --timeout $((seconds * 24 + 300)) --command-timeout $((seconds * 8 + 90)) --label "power-loss-$kernel" "${programs[@]}"
