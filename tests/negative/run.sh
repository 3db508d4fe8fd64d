#!/bin/bash
# run.sh [NAME..]: negative controls. Removes one protection at a time from the library
# (lib/core/break.h) and checks that each of the tests named below notices: it must fail, crash or
# hang. The same tests must pass on the unchanged library. Without names: the controls marked short;
# all with VMEM_LONG=1. $BUILD must be built. The last line has the totals.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
build=${BUILD:-build}
# protection | short or long | test, test, ..: a GoogleTest filter for unit or system, or a stress program's arguments
controls='
digest_check   | short | unit PagerSteps.WrongBytesFromTheStoreAreNeverShown
compare        | short | unit PagerSteps.WhatIsEvictedComesBack, model --seconds 4
write_protect  | short | history --seconds 4 --no-move, model --seconds 6 --no-move
pins           | short | pins --seconds 4
release_event  | short | model --seconds 8 --device sim
unknown_mark   | long  | unit PagerMarks.*
compare_again  | long  | unit PagerBackgroundWrites.WhatAPinnedPageGetsAfterTheWriteIsNotLost
write_report   | long  | unit PagerSteps.ABackgroundFailureIsReportedByTheNextSyncOnce
lost_mark      | long  | unit PagerMarks.*
leased_drop    | long  | unit PagerMarks.DontNeedLeavesABlockThatWasLeasedWhileItWaited
free_again     | long  | unit PagerMarks.WhatALeaseChangedWhileFreeWroteIsWrittenToo
file_end       | long  | system *Truncation.WriteBackMakesNoFileLongerAndBringsNoByteBack*
table_retry    | long  | unit PagerMetadataCharges.AnAccessThatIsRefusedIsMadeAgainWhenThereIsRoom
unfail_retry   | long  | unit PagerCpuMappings.WithoutMemoryItIsTriedOnceMoreAndThenRefused
full_disk      | long  | unit *PagerFullDisk.ASmallBlockIsWrittenOverItsOldCopy*, unit PagerSteps.WhatCanBeWrittenOverItsOldCopyDoesNotWaitForWhatFindsNoRoom
read_refused   | long  | unit PagerRefusedReads.AnAccessIsAnsweredWhenThereIsMemory
revive         | long  | unit PagerSteps.AFaultThatFailedForWantOfMemoryRevivesWhenMemoryIsFreed
credit         | long  | history --seconds 25 --transfer copy
budget         | long  | unit MemoryFrames.FramesAreDistinctAndEndWithTheBudget
let_store      | long  | unit TrapTransfer.AFrameTakesNoWriteProtectionAlong
lease_hold     | long  | system Leases.ALeasedBlockStaysWhileEverythingElseIsChasedOut
signal_mask    | long  | system Signals.EveryThreadOfTheLibraryHasANameAndBlocksThemAll
signals_deferred | long | system Signals.HandlersMayInterruptCalls
faults_let_in  | long  | system DeviceLeaseHandles.TheCallbackAndTheSinkMayStoreToABlockOnADevice
stream_order   | long  | history --seconds 4 --device sim, model --seconds 8 --device sim
copy_wait      | long  | history --seconds 4 --device sim
credit_after_release | long | system DeviceFree.*
signals_in_copies | long | system *DeviceSignals*managed
exit_after_destructors | long | system Exit.StoresOfStaticDestructorsReachSharedFiles
exit_before_context | long | system *ExitAfterTheContext*
live_streams   | long  | system *ExitUnderALease*
leased_copy    | long  | system Ends.AFlushLeavesLeasedBlocksWritable
work_count     | long  | system DeviceWorkers.*
shown_goes     | long  | system DeviceUnleased.AReadLeaseKeepsTheCopyAndAWriteLeaseDropsIt, history --seconds 15 --device sim-handles
kernel_writes  | long  | history --seconds 4 --device sim, model --seconds 8 --device sim
file_flush     | long  | system *FaultInjection.AFlushOfTheFileThatFailsIsReportedBySync*, durable --seconds 3
kernel_pins    | long  | system KernelPaging.WhatAKernelHasStaysWhateverOthersAskFor
kernel_stores  | long  | system KernelStores.WhatIsStoredIsNotLostAmongIt
kernel_arrival | long  | system KernelPaging.NoKernelIsToldOfABlockBeforeItsBytesAreThere
absent_pages   | long  | unit GuardedRead.WhatIsElsewhereIsReadThoughNoPageTableHasIt
spare_copy     | long  | unit SpareCopies.ABlockThatSomebodyWantsDoesNotWaitForTheTurnOfOthers, system *Rights.GuardPagesInAllOfAFullBudgetLeaveWhenAsked*
own_memory     | long  | system Leases.ALeasedBlockStaysWhileEverythingElseIsChasedOut
own_stack      | long  | system *SmallStack.EveryCallIsRightOnTheSmallestStack*
file_lock      | long  | system FilesMore.SharedIsExclusive
scheduling     | long  | system Odd/Scheduling.*
inherited      | long  | system Fork.AnAccessOfAnInheritedRegionSaysWhyItEndsTheChild
one_path       | long  | system *StorePaths.AnotherTakesWhatOneRefuses*
anew_in_child  | long  | system Fork.ManyWorkersServeBesideTheirParent
'
log=$build/negative/log; mkdir -p "$build/negative"
passed=0 failed=0 skipped=0 table=()

# Every control must be named in a source file of lib, and every such name must be in the list; this
# check includes the long controls. The script recompiles the source files that contain the name,
# also in a comment. If a header tests the protection, the source files that use the header must
# therefore name it.
listed=$(awk -F'|' 'NF > 1 {gsub(/ /, "", $1); print $1}' <<<"$controls" | sort)
named=$(grep -rhoE --include='*.cpp' 'broken\("[a-z_]+"\)' lib | cut -d'"' -f2 | sort -u)
while read -r name; do
  [ -n "$name" ] || continue
  echo "FAIL $name: in the list of controls or in a source file of lib, and not in both"; failed=$((failed + 1))
done < <(comm -3 <(echo "$listed") <(echo "$named") | tr -d '\t')

# run_test FOLDER-OF-UNIT FOLDER-OF-STRESS TEST: returns its status.
run_test() {
  local at=$1 stress=$2 program arguments; read -r program arguments <<<"$3"
  # shellcheck disable=SC2086  # several arguments
  case $program in
    unit | system) timeout -k 3 $((60 * ${TEST_PATIENCE:-1})) "$at/${program}_tests" --gtest_brief=1 --gtest_filter="$arguments" >"$log" 2>&1 ;;
    *) timeout -k 3 $((150 * ${TEST_PATIENCE:-1})) "$stress/$program" $arguments >"$log" 2>&1 ;;
  esac
}
how() { # STATUS
  case $1 in 124 | 137) echo "hung" ;; 1) echo "failed" ;; *) [ "$1" -gt 128 ] && echo "crashed (signal $(($1 - 128)))" || echo "status $1" ;; esac
}
# Keeps Bash's own lines about crashes out of the table.
exec 3>&2 2>/dev/null
while IFS='|' read -r name length tests; do
  name=${name// /} length=${length// /}
  [ -n "$name" ] || continue
  if [ $# -gt 0 ]; then [[ " $* " == *" $name "* ]] || continue
  elif [ "$length" = long ] && [ -z "${VMEM_LONG:-}" ]; then continue; fi
  dir=$build/negative/$name; IFS=',' read -ra list <<<"$tests"
  programs=()
  for t in "${list[@]}"; do read -r program _ <<<"$t"; case $program in unit | system) program=${program}_tests ;; esac; programs+=("$dir/$program"); done
  if ! ${MAKE:-make} NO_SETUP=1 BUILD="$build" BREAK="$name" "${programs[@]}" >"$log" 2>&1; then
    echo "FAIL $name: does not build"; tail -5 "$log"; failed=$((failed + 1)); continue
  fi
  for t in "${list[@]}"; do
    t=${t# }; t=${t% }
    run_test "$build/tests" "$build/tests/stress" "$t"; status=$?
    if [ $status = 77 ] || { [ $status = 0 ] && grep -q '\[  SKIPPED \]' "$log"; }; then
      echo "skipped: $t: cannot run here"; skipped=$((skipped + 1)); continue
    elif [ $status != 0 ] || grep -q ' 0 tests from' "$log"; then
      echo "FAIL $t fails on the library as it is (status $status)"; head -40 "$log"; failed=$((failed + 1)); continue
    fi
    run_test "$dir" "$dir" "$t"; status=$?
    # On a busy machine fewer calls overlap in the same time: repeat a timed control with more
    # seconds.
    if [ $status = 0 ] && [[ $t =~ (.*--seconds\ )([0-9]+)(.*) ]]; then
      run_test "$dir" "$dir" "${BASH_REMATCH[1]}$((BASH_REMATCH[2] * 3 * ${TEST_PATIENCE:-1}))${BASH_REMATCH[3]}"; status=$?
    fi
    if [ $status = 0 ]; then
      echo "FAIL $name is gone and nothing is noticed by: $t"; failed=$((failed + 1)); table+=("$(printf '%-15s | %-70s | NOT CAUGHT' "$name" "$t")")
    else
      passed=$((passed + 1)); table+=("$(printf '%-15s | %-70s | %s' "$name" "$t" "$(how $status)")")
    fi
  done
  rm -rf "$dir"
done <<<"$controls"
exec 2>&3
printf '%s\n' "${table[@]}"
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
