#!/bin/bash
# run-guest.sh: boots a test kernel and runs programs in it.
#
#   scripts/vm/run-guest.sh --kernel 6.1|6.12|debug [options] -- PROGRAM ARGS.. [-- PROGRAM ARGS..]
#
#   --user root|nobody|UID  the user of the programs; several: each program once for each (root)
#   --container             also run every program as each user under Docker's default profile
#   --only-container        run the programs only that way
#   --module FILE.ko[:p=v]  load before the programs, remove after them; a failed removal counts
#   --helper FILE.ko[:p=v]  load and keep (test_hmm.ko of the debug kernel leaks when it is removed)
#   --in-tree NAME          also load a module of the kernel itself, with its dependencies
#   --file HOST:GUEST       also copy a file
#   --env NAME=VALUE        environment of the programs
#   --before COMMAND        shell command that root runs in the guest before the programs
#   --memory MIB (2048)  --cpus N (stock: 1, debug: 2)  --disk MIB (4096, sparse)  --fs ext4|none
#   --node-without-cpus     a second memory node of 512 MiB without a CPU, its own tier like CXL
#   --timeout S (300)  --command-timeout S (the rest of --timeout)  --append KERNEL_PARAMETERS
#   --no-kmemleak           no leak scan (6 s); the debug kernel runs one if a module is given
#   --label TEXT            the run's name in the summary   --log FILE  keep the console   --verbose  show it
#
# In the guest, /data is a file system on a virtual drive (O_DIRECT and O_TMPFILE work); TMPDIR and
# VMEM_TEST_DIR name it. VMEM_TEST_BLOCK_DEVICE names a second drive of 256 MiB. Huge pages need
# madvise. Programs that are files of this machine are copied with their shared libraries; other
# names are busybox's. At the end the kernel's log is searched for reports; a report is a failure.
# Emulation shows function and races, not speed.
#
# Prints the counts of every program, then "N passed, N failed, N skipped". TEST_PATIENCE (1), the
# slowness of the machine, multiplies times. Exit: 0 passed, 1 failed, 77 all skipped, 124 only
# deadlines were met.
set -euo pipefail
. "$(dirname "$0")/common.sh"
. "$here/../lib/results.sh"
. "$here/../lib/pace.sh"

kernel='' users=() containers=(0) modules=() extra=() environment=() before=() label='' log='' verbose='' qemu=()
memory=2048 cpus='' disk=4096 fs=ext4 timeout=300 command_timeout='' append='' kmemleak=''
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  case $1 in
    --container) containers=(0 1); shift ;;
    --only-container) containers=(1); shift ;;
    --no-kmemleak) kmemleak=0; shift ;;
    --node-without-cpus) qemu=(node); shift ;;
    --verbose) verbose=1; shift ;;
    *)
      [ $# -ge 2 ] || die "$1 needs a value"
      case $1 in
        --kernel) kernel=$2 ;;
        --user) users+=("$2") ;;
        --module) modules+=(--load "$2") ;;
        --helper) modules+=(--helper "$2") ;;
        --in-tree | --file) extra+=("$1" "$2") ;;
        --env) environment+=("$2") ;;
        --before) before+=("$2") ;;
        --memory) memory=$2 ;;
        --cpus) cpus=$2 ;;
        --disk) disk=$2 ;;
        --fs) fs=$2 ;;
        --timeout) timeout=$2 ;;
        --command-timeout) command_timeout=$2 ;;
        --append) append=$2 ;;
        --label) label=$2 ;;
        --log) log=$2 ;;
        *) die "unknown option $1; the top of $0 lists them" ;;
      esac
      shift 2 ;;
  esac
done
[ $# -gt 0 ] || die "no program given: run-guest.sh --kernel 6.12 -- PROGRAM"
[ -n "$kernel" ] || die "--kernel 6.1, 6.12 or debug is missing"
[ ${#users[@]} -gt 0 ] || users=(root)
label=${label:-$kernel}

skipped_whole() { echo "skipped: $*"; totals_line 0 0 1; exit 77; }
for tool in qemu-system-x86_64 busybox cpio; do
  command -v "$tool" >/dev/null || skipped_whole "$tool is not installed; scripts/setup.sh vm installs it"
done
dir=$("$here/kernel.sh" "$kernel") || { [ $? = 77 ] && skipped_whole "${dir#skipped: }"; die "kernel $kernel: ${dir:-not prepared}"; }

work=$(mktemp -d "${TMPDIR:-/tmp}/vmem-guest-XXXXXX"); trap 'rm -rf "$work"' EXIT
enter=$work/guest-enter
${CC:-cc} -O1 -static -Wall -o "$enter" "$here/guest-enter.c"

# The plan: one call of init's run() for each program, user and container setting.
programs=() titles=() number=0
for command in ${environment[@]+"${environment[@]}"}; do printf 'export %q\n' "$command"; done >"$work/plan"
for command in ${before[@]+"${before[@]}"}; do printf '%s\n' "$command"; done >>"$work/plan"
while [ $# -gt 0 ]; do
  shift; words=()
  while [ $# -gt 0 ] && [ "$1" != -- ]; do words+=("$1"); shift; done
  [ ${#words[@]} -gt 0 ] || die "an empty program between two --"
  name=${words[0]##*/} gtest=''
  if [ -f "${words[0]}" ]; then programs+=("${words[0]}"); ! grep -q gtest_output "${words[0]}" || gtest=1; words[0]=/bin/$name
  elif [[ ${words[0]} == */* ]]; then die "no such program: ${words[0]}"; fi
  for container in "${containers[@]}"; do
    for user in "${users[@]}"; do
      printf 'run %d %q %d' "$number" "$user" "$container" >>"$work/plan"
      printf ' %q' "${words[@]}" >>"$work/plan"
      [ -z "$gtest" ] || printf ' --gtest_output=json:/tmp/result-%d.json --gtest_color=no' "$number" >>"$work/plan"
      echo >>"$work/plan"
      in=''; [ "$container" = 1 ] && in=', container'
      titles+=("$name ($user$in)"); number=$((number + 1))
    done
  done
done

if [ "$kernel" = debug ]; then
  # Two CPUs run in parallel only here: multi-threaded emulation of QEMU before 8.1 kills one boot
  # in 50 of a kernel with jump labels; the debug kernel has none.
  export CPUS=${cpus:-2} THREAD=multi
  [ ${#modules[@]} -gt 0 ] && kmemleak=${kmemleak:-1}
  [ "${kmemleak:-0}" = 1 ] && append="kmemleak=on $append"
else
  export CPUS=${cpus:-1} THREAD=single
fi
[ ${#qemu[@]} -eq 0 ] || {
  small=512 big=$((memory - 512))
  [ "$CPUS" -gt 1 ] || CPUS=2
  export MACHINE=q35,hmat=on
  qemu=(-object "memory-backend-ram,id=near,size=${big}M" -object "memory-backend-ram,id=far,size=${small}M"
    -numa "node,nodeid=0,cpus=0-$((CPUS - 1)),memdev=near" -numa node,nodeid=1,memdev=far,initiator=0 -numa dist,src=0,dst=1,val=20
    -numa hmat-lb,initiator=0,target=0,hierarchy=memory,data-type=access-latency,latency=80
    -numa hmat-lb,initiator=0,target=0,hierarchy=memory,data-type=access-bandwidth,bandwidth=80G
    -numa hmat-lb,initiator=0,target=1,hierarchy=memory,data-type=access-latency,latency=300
    -numa hmat-lb,initiator=0,target=1,hierarchy=memory,data-type=access-bandwidth,bandwidth=20G)
}
# A slow machine takes longer; if only deadlines were met the status is 124.
patience=${TEST_PATIENCE:-1}
timeout=$((timeout * patience)) command_timeout=${command_timeout:+$((command_timeout * patience))}
export MEMORY=$memory TIMEOUT=$timeout APPEND=$append
command_timeout=${command_timeout:-$((timeout > 60 ? timeout - 40 : timeout / 2))}
printf 'FS=%s\nKMEMLEAK=%s\nCOMMAND_TIMEOUT=%s\n' "$fs" "${kmemleak:-0}" "$command_timeout" >"$work/config"

"$here/mkinitrd.sh" "$work/initrd.gz" "$dir" "$work/plan" "$work/config" ${extra[@]+"${extra[@]}"} ${modules[@]+"${modules[@]}"} \
  "$enter" ${programs[@]+"${programs[@]}"}

boot() {
  rm -f "$work"/*.img
  truncate -s "${disk}M" "$work/data.img"; truncate -s 256M "$work/raw.img"
  [ "$fs" = none ] || PATH=$PATH:/sbin:/usr/sbin "mkfs.$fs" -q "$work/data.img"
  verdict=0
  "$here/run-vm.sh" "$(kernel_image "$dir")" "$work/initrd.gz" "$work" ${qemu[@]+"${qemu[@]}"} || verdict=$?
}
[ -z "$verbose" ] || { touch "$work/console.log"; tail -f "$work/console.log" >&2 & follower=$!; trap 'kill $follower 2>/dev/null; rm -rf "$work"' EXIT; }
boot
if [ $verdict = 126 ]; then
  mkdir -p "$build/vm"; cat "$work/qemu.log" "$work/console.log" >"$build/vm/early-death.log"
  note "the guest died before userland (its console: $build/vm/early-death.log); once more"; boot
fi
tr -d '\r' <"$work/console.log" >"$work/console"; tr -d '\r' <"$work/results.log" >"$work/results"
[ -z "$log" ] || { mkdir -p "$(dirname "$log")"; cp "$work/console" "$log"; }

passed=0 failed=0 skipped=0 wrong=0
add() { passed=$((passed + $1)); failed=$((failed + $2)); skipped=$((skipped + $3)); }
for ((i = 0; i < number; i++)); do
  sed -n "/^@@START $i\$/,/^@@STOP $i /p" "$work/console" | grep -vE '^@@ST(ART|OP)' >"$work/log" || true
  status=$(awk -v n="$i" '$1 == "@@RESULT" && $2 == n {print $3}' "$work/results")
  sed -n "/^@@RESULT $i /,/^@@END $i\$/p" "$work/results" | grep -v '^@@' >"$work/json" || true
  if [ -z "$status" ]; then status=$([ $verdict = 124 ] && echo 124 || echo 255); : >"$work/json"; fi
  read -r p f s < <(count_result "$status" "$work/log" "$work/json")
  add "$p" "$f" "$s"
  [ "$f" = 0 ] || { [ "$status" = 124 ] && ! bad_signs "$work/log"; } || wrong=1
  printf '%-4s %s: %s on %s\n' "$([ "$f" = 0 ] && echo ok || echo FAIL)" "${titles[i]}" "$(totals_line "$p" "$f" "$s")" "$label"
  [ "$s" = 0 ] || skip_reasons "$status" "$work/log" | sed 's/^/       skipped: /'
  if [ "$f" != 0 ]; then
    failed_tests "$work/log" | sed 's/^/       failed: /'
    echo "       status $status; its output:"
    grep -avE '^\[ *[0-9]+\.[0-9]+\]' "$work/log" >"$work/own" || true
    failed_output "$work/own" | sed 's/^/       | /'
  fi
done
problem() { add 0 1 0; wrong=1; echo "FAIL $1 on $label"; }
while read -r line; do problem "kernel: ${line#@@KERNEL }"; done < <(grep '^@@KERNEL' "$work/results" | head -5)
while read -r line; do problem "guest: ${line#@@SETUP }"; done < <(grep '^@@SETUP' "$work/results" | head -1)
case $verdict in
  124) was=$wrong; problem "guest: not done after $timeout s"; wrong=$was ;;
  125) problem "guest: died (a panic, or it left without a verdict)" ;;
  126) problem "guest: died before userland, twice" ;;
  127) problem "guest: QEMU refused to start" ;;
  *) [ "$verdict" = 0 ] || [ "$failed" != 0 ] || problem "guest: verdict $verdict that no test accounts for" ;;
esac
if [ $failed != 0 ]; then
  kept=$build/vm/failed-${label//[^A-Za-z0-9.]/-}.log
  mkdir -p "$build/vm"; cp "$work/console" "$kept"
  [ "$verdict" -lt 124 ] || tail -30 "$work/console" | sed 's/^/  console| /'
  echo "     the whole console: ${kept#"$PWD"/}"
fi
totals_line $passed $failed $skipped
[ $failed = 0 ] || exit $((wrong ? 1 : 124))
[ $passed != 0 ] || exit 77
