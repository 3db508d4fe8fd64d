#!/bin/bash
# Which goals of make install packages (demo, test and setup), and what the others print instead.
# The dpkg-query here lacks one package, and the apt-get only records its calls.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
[ -z "${VMEM_SANITIZER:-}" ] || { echo "skipped: nothing in it is built with a sanitizer"; exit 77; }
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
passed=0 failed=0
unset MAKEFLAGS MFLAGS MAKELEVEL NO_SETUP
report() { # NAME WRONG
  if [ -z "$2" ]; then echo "ok   $1"; passed=$((passed + 1)); else echo "FAIL $1: $2"; failed=$((failed + 1)); fi
}

mkdir "$work/bin"
# shellcheck disable=SC2016  # for the generated script
printf '#!/bin/bash\nfor name; do case $name in -*|"$MISSING") ;; *) echo "ii $name" ;; esac; done\nexit 1\n' >"$work/bin/dpkg-query"
# shellcheck disable=SC2016
printf '#!/bin/bash\necho "$*" >>"%s/apt"\n' "$work" >"$work/bin/apt-get"
chmod +x "$work"/bin/*
export PATH=$work/bin:$PATH MISSING=libzstd-dev

# Prints what a goal would run, without running it.
plan() { make -n BUILD="$work/plan" "$@" 2>/dev/null | grep -oE 'scripts/setup\.sh( --quiet| --check| [a-z]+)*' | sort -u; }
for goal in all lib unit check bench deb test-sanitizers debug-kernel; do
  out=$(plan $goal)
  report "make $goal installs nothing" "$(grep -v -- --check <<<"${out:-no call}")"
done
for goal in demo test setup; do
  out=$(plan $goal SUITES=unit)
  report "make $goal installs" "$(grep -v -- --check <<<"$out" | grep -q 'setup.sh.* build' || echo "not what the build needs: $out")"
done

# The same, run: it names the missing packages each time, and leaves no mark that would silence it.
for turn in 1 2; do
  out=$(make BUILD="$work/build" "$work/build/.setup-build" 2>&1); status=$?
  bad=''
  [ $status = 0 ] || bad="status $status"
  grep -q 'missing: libzstd-dev$' <<<"$out" && grep -q 'install with:  scripts/setup.sh build' <<<"$out" || bad+=" said: $out"
  [ ! -e "$work/apt" ] || bad+=" apt-get was called: $(cat "$work/apt")"
  report "what is missing is said, and how to install it (time $turn)" "$bad"
done
if [ "$(id -u)" = 0 ]; then
  out=$(scripts/setup.sh --quiet build 2>&1)
  report "setup.sh installs it, and says so" "$(grep -q 'install .*libzstd-dev' "$work/apt" || echo "apt-get was not called")$(grep -q 'installing libzstd-dev' <<<"$out" || echo " said: $out")"
fi
# Two packages are missing, and no release has one of them: the other one is installed.
if [ "$(id -u)" = 0 ]; then
  mkdir "$work/lacking"
  # shellcheck disable=SC2016  # for the generated scripts
  printf '#!/bin/bash\nfor name; do case $name in -*|liblz4-dev|libzstd-dev) ;; *) echo "ii $name" ;; esac; done\nexit 1\n' >"$work/lacking/dpkg-query"
  # shellcheck disable=SC2016
  printf '#!/bin/bash\ncase " $* " in *" libzstd-dev "*) exit 100 ;; *" install "*) echo "$*" >>"%s/alone" ;; esac\n' "$work" >"$work/lacking/apt-get"
  chmod +x "$work"/lacking/*
  out=$(PATH=$work/lacking:$PATH scripts/setup.sh --quiet build 2>&1)
  report "a package that cannot be had keeps no other away" "$(grep -q ' liblz4-dev$' "$work/alone" 2>/dev/null || echo "liblz4-dev was not installed;")$(
    grep -q 'could not install libzstd-dev$' <<<"$out" || echo " said: $out")"
fi
# In any order of the groups: make checks them side by side.
out=$(scripts/setup.sh --quiet --check test 2>&1)
report "group test asks for what group build does: none of it compiles without" "$(grep -q 'missing: libzstd-dev$' <<<"$out" || echo " said: $out")"
rm -f "$work/apt"
out=$(make BUILD="$work/build" NO_SETUP=1 "$work/build/.setup-build" 2>&1)
report "NO_SETUP=1 says nothing" "$out$(cat "$work/apt" 2>/dev/null)"
rm -rf "$work/build"
out=$(MISSING='' make BUILD="$work/build" "$work/build/.setup-build" 2>&1)
report "nothing is said where nothing is missing" "$out$([ -e "$work/build/.setup-build" ] || echo " and no mark is left")"

echo "$passed passed, $failed failed, 0 skipped"
[ $failed = 0 ]
