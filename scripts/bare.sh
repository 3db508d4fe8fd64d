#!/bin/bash
# bare.sh [demo|test|wheel..] [RELEASE..]: runs the README's commands, taken from its text, on bare
# systems of Debian or Ubuntu: a copy of this working tree, make, and only the release's own packages.
# The commands install the rest. Default: demo on Debian 12 and 13 and Ubuntu 24.04.
# The last line is "N passed, N failed, N skipped".
#
# It needs root, mounts, the network (for the packages that setup.sh installs), 16 GB of disk for the
# demo and an hour for the tests. A command that is not done after BARE_SECONDS (5400) has failed.
# scripts/lib/clean_system.sh says where the systems are kept.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
passed=0 failed=0 skipped=0
finish() { echo "$passed passed, $failed failed, $skipped skipped"; [ $failed = 0 ]; exit; }
skip_all() { echo "skipped: $1"; skipped=1; finish; }
goals=() releases=()
for word in "$@"; do case $word in demo | test | wheel) goals+=("$word") ;; [a-z]*) releases+=("$word") ;; *) sed -n '2,4s/^# \?//p' "$0"; exit 2 ;; esac; done
[ ${#goals[@]} -gt 0 ] || goals=(demo)
[ ${#releases[@]} -gt 0 ] || releases=(bookworm trixie noble)
work=$(realpath -m "${BUILD:-build}")/bare
. scripts/lib/clean_system.sh
need_clean_systems

# Prints the block of the README that begins with this line.
block_of() { awk -v wanted="$1" '/^```/ {if (inside && index(text, wanted) == 1) {printf "%s", text; exit} inside = !inside; text = ""; next} inside {text = text $0 "\n"}' README.md; }
# Prints a command of the README without its comment; wheel: the whole block, after the packages it
# needs.
command_of() {
  case $1 in
    wheel) [ -n "$(block_of 'make wheel')" ] && block_of 'make wheel' >"$root/tmp/wheel.sh" && echo "scripts/setup.sh build wheel && sh -e /tmp/wheel.sh" ;;
    *) block_of 'make demo' | sed 's/ *#.*//' | grep -x "make $1" ;;
  esac
}
# Checks the end of the command's output.
demo_is_right() { grep -qE 'verified \| 0 mismatches' "$1"; }
wheel_is_right() { grep -qE '^Successfully installed vmem-' "$1" && inside "$root" sh -c 'cd /src && env/bin/python -c "import vmem; print(vmem.stats())"' >>"$1" 2>&1; }
test_is_right() { tail -1 "$1" | grep -qE '^[1-9][0-9]* passed, 0 failed, [0-9]+ skipped$'; }

for release in "${releases[@]}"; do
  root=$work/$release began=$SECONDS
  if ! tarball=$(clean_system "$release" make,ca-certificates); then
    skipped=$((skipped + ${#goals[@]})); printf 'skip %s\nskipped: no clean system could be made: %s\n' "$release" "$(tr '\n' ' ' <<<"$tarball")"; continue
  fi
  unpack "$tarball" "$root" || { echo "FAIL $release: $tarball cannot be unpacked"; failed=$((failed + 1)); continue; }
  # Copy the files as a clone has them.
  copy_sources "$root"
  apt_reaches >"$root/etc/apt/apt.conf.d/90reach"
  cp -L /etc/resolv.conf "$root/etc/resolv.conf" 2>/dev/null
  mkdir -p "$root"/{var/tmp,root}
  echo "     a bare $release is there ($((SECONDS - began)) s)"
  for goal in "${goals[@]}"; do
    began=$SECONDS log=$work/$release-$goal.log
    command=$(command_of "$goal") || { echo "FAIL README.md has no command 'make $goal'"; failed=$((failed + 1)); continue; }
    if inside "$root" timeout -k 30 "${BARE_SECONDS:-5400}" sh -c "cd /src && $command" >"$log" 2>&1 </dev/null && "${goal}_is_right" "$log"; then
      passed=$((passed + 1)); printf 'ok   %s: %s (%d s)\n' "$release" "$command" $((SECONDS - began))
    else
      failed=$((failed + 1)); printf 'FAIL %s: %s (%s)\n' "$release" "$command" "$log"; tail -30 "$log" | sed 's/^/       | /'
    fi
  done
  rm -rf --one-file-system "$root"
done
finish
