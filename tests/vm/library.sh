#!/bin/bash
# The library's own tests inside stock kernels, as root and as an ordinary user: 6.1 has no
# UFFDIO_MOVE, 6.12 has it.
#   library.sh [KERNEL..]
# Emulation is ten times slower than the machine. By default only tests that depend on the kernel
# run, on blocks of 64 KiB if the size does not matter; the stress test covers random writes and
# leases by several threads. VMEM_VM_FULL=1 runs every test, which takes about two hours. Prints a
# line per program and its own totals.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
. scripts/lib/results.sh
build=${BUILD:-build} passed=0 failed=0 skipped=0 work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
[ $# -gt 0 ] || set -- 6.1 6.12
seconds=${VMEM_STRESS_SECONDS:-5}

boots=() wrong=0 limit=460
# Tests of the trap with this kernel's features. Not the variants without features that an older
# kernel lacks, nor the substitutes for them, nor tests in which the kernel has no part.
units=('--gtest_filter=*Trap*.*-*/uffd_no_*:*/uffd_oldest:*UnderThePagersLock*')
# As an ordinary user the longest tests are left out too: the user matters to them only by the kind
# of trap, and root runs them on that trap as well.
user_units=("${units[0]}:*/TrapRanges.*:*/TrapWithout.*")
filter=(--gtest_filter=Api.*:Leases.*:FilesMore.*:Paging.*copy_64k-*RandomWritesBySeveral*:*LeaseAtRandom*)
# In a container the module and the library's threads replace the calls that are refused: run each
# call, files, and blocks on them.
inside=(--gtest_filter=Api.*:FilesMore.*:Paging.*copy_64k-*RandomWritesBySeveral*)
[ -z "${VMEM_VM_FULL:-}" ] || { limit=3600 units=() user_units=() filter=() inside=(); }
# boot LABEL ARGS..: boots one guest in the background. A stock guest has one CPU, and this machine
# has more.
boot() {
  local label=$1; shift
  case $left_out in *" $label "*) echo "skipped: $label: scripts/nightly.sh boots it"; skipped=$((skipped + 1)); return ;; esac
  while [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do wait -n; done
  { scripts/vm/run-guest.sh --label "$label" --log "$build/vm/$label.log" "$@" >"$work/$label" 2>&1; echo $? >"$work/$label.status"; } &
  boots+=("$label")
}
# In CI each kernel boots for one kind of user, and one for a container; the night has all.
left_out=''; [ -z "${CI:-}" ] || [ -n "${VMEM_LONG:-}" ] || left_out=" 6.1-nobody 6.1-container 6.12-root "
for kernel in "$@"; do
  programs=(-- "$build/tests/system_tests" ${filter[@]+"${filter[@]}"})
  [ -x "$build/tests/stress/stress" ] && programs+=(-- "$build/tests/stress/stress" --seconds "$seconds" --bytes 48MiB --budget 24MiB --threads 4)
  boot "$kernel-root" --kernel "$kernel" --user root --timeout $limit --command-timeout $((limit - 100)) \
    -- "$build/tests/unit_tests" ${units[@]+"${units[@]}"} "${programs[@]}"
  boot "$kernel-nobody" --kernel "$kernel" --user nobody --timeout $limit --command-timeout $((limit - 100)) \
    -- "$build/tests/unit_tests" ${user_units[@]+"${user_units[@]}"} "${programs[@]}"
  # A container under Docker's default profile, which allows neither system call. With the device
  # passed in, and the library's thread engine in place of io_uring, everything works.
  boot "$kernel-container" --kernel "$kernel" --user root --user nobody --only-container --timeout $limit --command-timeout $((limit - 100)) \
    --before 'chmod 666 /dev/userfaultfd' -- "$build/tests/system_tests" ${inside[@]+"${inside[@]}"}
done
wait
for label in "${boots[@]}"; do
  case $(cat "$work/$label.status") in 0 | 77 | 124) ;; *) wrong=1 ;; esac
  read -r p f s < <(tail -1 "$work/$label" | tr -dc '0-9 \n')
  grep -vE '^[0-9]+ passed' "$work/$label"
  passed=$((passed + ${p:-0})) failed=$((failed + ${f:-1})) skipped=$((skipped + ${s:-0}))
done
totals_line $passed $failed $skipped
[ $failed = 0 ] || exit $((wrong ? 1 : 124))  # 124: only deadlines passed
[ $passed != 0 ] || exit 77
