#!/bin/bash
# compilers.sh [--quick] [--syntax] [--unit] [--flags FLAGS] [RELEASE/COMPILER..]: builds the library,
# tools, examples and every test with other compilers, each in a clean system of a release of Debian
# or Ubuntu that packages it; "here": in this system, if it has the compiler.
#
# Without names: the oldest and the newest supported compiler. "all": every one in the list below.
# --quick: no tests. --syntax: parse the public headers, library, tools and examples with all warnings,
# but generate no code. --unit: run the unit tests of the last compiler in its system. --flags: "-O0"
# by default; some warnings need "-O2". The last line is "N passed, N failed, N skipped".
#
# --syntax takes some 280 s of CPU time, two to three minutes on two quiet cores. It records what
# passed, by the contents of all parsed files, in ${VMEM_CACHE:-~/.cache/vmem}/passed.
#
# scripts/lib/clean_system.sh says where the systems (350 MB each) come from and are kept, and what
# that needs.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
declare -A compilers=(
  [bookworm]="g++-11 g++-12 clang++-14 clang++-15 clang++-16"
  [trixie]="g++-12 g++-13 g++-14 clang++-17 clang++-18 clang++-19"
  [sid]="clang++-21 g++-15"
  [jammy]="g++-11 clang++-14"
  [noble]="g++-13 clang++-18"
)
libraries=make,pkg-config,libc6-dev,liburing-dev,libnuma-dev,liblz4-dev,libzstd-dev,libxxhash-dev,libcli11-dev,libmicrohttpd-dev,libgtest-dev,libbenchmark-dev,nlohmann-json3-dev
passed=0 failed=0 skipped=0
finish() { echo "$passed passed, $failed failed, $skipped skipped"; [ $failed = 0 ]; exit; }
skip_all() { echo "skipped: $1"; skipped=1; finish; }

targets="lib tools examples build-tests" flags=-O0 unit='' wanted=()
while [ $# -gt 0 ]; do
  case $1 in
    --quick) targets="lib tools examples" ;;
    --syntax) targets=syntax ;;
    --unit) unit=1 ;;
    --flags) flags=$2; shift ;;
    all) for release in bookworm trixie sid jammy noble; do for compiler in ${compilers[$release]}; do wanted+=("$release/$compiler"); done; done ;;
    ?*/?*) wanted+=("$1") ;;
    *) sed -n '2,9s/^# \?//p' "$0"; exit 2 ;;
  esac
  shift
done
[ ${#wanted[@]} -gt 0 ] || wanted=(bookworm/g++-11 sid/g++-15)

work=$(realpath -m "${BUILD:-build}")/compilers
mkdir -p "$work"
. scripts/lib/clean_system.sh
[[ " ${wanted[*]/#here\/*/}" != *[a-z]* ]] || need_clean_systems

# The package of a compiler: g++-14 is its own; clang++-19 is in clang-19.
package_of() { echo "${1/clang++/clang}"; }

# made COMPILER MAKE..: builds; MAKE.. precedes the targets.
made() {
  local compiler=$1 cc; shift
  cc=${compiler/clang++/clang}; cc=${cc/g++/gcc}
  # shellcheck disable=SC2086  # targets are words
  "$@" -k -j"$(nproc)" NO_SETUP=1 PCH=no CUDA=no WERROR=-Werror CXX="$compiler" CC="$cc" CXXFLAGS="$flags" CFLAGS="$flags" $targets
}
# said STATUS: prints the line of one compiler.
said() {
  if [ "$1" = 0 ]; then
    passed=$((passed + 1)); printf 'ok   %s, %s: %s (%d s)\n' "$each" "$flags" "$targets" $((SECONDS - began))
  else
    failed=$((failed + 1)); printf 'FAIL %s, %s (%s)\n' "$each" "$flags" "$log"; grep -E 'error|undefined' "$log" | head -20 | sed 's/^/       /'; grep -qE 'error|undefined' "$log" || tail -5 "$log"
  fi
}
# mark_of SYSTEM: the file that records that this source parses in that system. Only for syntax:
# other targets must build.
mark_of() {
  [ "$targets" = syntax ] || return 0
  local files; files=$(git ls-files --cached --others --exclude-standard -z -- lib include tools examples Makefile mk scripts/check.sh scripts/compilers.sh | xargs -0 sha256sum 2>/dev/null) || return 0
  echo "${VMEM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/vmem}/passed/$({ echo "$each $flags"; cat; echo "$files"; } <<<"$1" | sha256sum | cut -c1-40)"
}
# known MARK: true if it passed before; then it is counted.
known() {
  [ -n "$1" ] && [ -e "$1" ] || return 1
  touch "$1"; passed=$((passed + 1)); printf 'ok   %s, %s: %s, as before on the same files\n' "$each" "$flags" "$targets"
}
remember() { [ -z "$1" ] || { mkdir -p "${1%/*}" && : >"$1"; }; }

# Also checks the public headers, with the flags of strict programs.
headers() { [ "$targets" != syntax ] || "$@"; }

for each in "${wanted[@]}"; do
  release=${each%%/*} compiler=${each#*/} began=$SECONDS
  if [ "$release" = here ]; then
    command -v "$compiler" >/dev/null || { skipped=$((skipped + 1)); printf 'skip %s\nskipped: %s is not installed\n' "$each" "$compiler"; continue; }
    mark=$(mark_of "$("$compiler" --version; dpkg-query -W -f '${Package} ${Version}\n' '*-dev' 2>/dev/null)")
    known "$mark" && continue
    log=$work/here-$compiler.log; rm -rf "$work/here"
    made "$compiler" make BUILD="$work/here" >"$log" 2>&1 && headers env CXX="$compiler" scripts/check.sh header >>"$log" 2>&1
    status=$?; [ $status != 0 ] || remember "$mark"
    said $status
    rm -rf "$work/here"
    continue
  fi
  # All compilers of the default, or of "all", share one system for each release.
  include=$libraries
  for other in $(printf '%s\n' "${wanted[@]}" | sed -n "s|^$release/||p"); do include+=,$(package_of "$other"); done
  root=$work/$release
  if ! tarball=$(clean_system "$release" "$include"); then
    skipped=$((skipped + 1)); printf 'skip %s\nskipped: no clean system could be made: %s\n' "$each" "$(tr '\n' ' ' <<<"$tarball")"; continue
  fi
  mark=$(mark_of "$(stat -c '%n %s %Y' "$tarball")")
  known "$mark" && continue
  if [ ! -e "$root/.made" ] || [ "$(cat "$root/.made")" != "$include" ]; then
    unpack "$tarball" "$root" || { echo "FAIL $each: $tarball cannot be unpacked"; failed=$((failed + 1)); continue; }
    echo "$include" >"$root/.made"
    echo "     a clean $release is there ($((SECONDS - began)) s)"; began=$SECONDS
  fi
  rm -rf "$root/made"; copy_sources "$root"; log=$work/$release-$compiler.log
  made "$compiler" inside "$root" make -C /src BUILD=/made >"$log" 2>&1 && headers inside "$root" env CXX="$compiler" /src/scripts/check.sh header >>"$log" 2>&1
  status=$?; [ $status != 0 ] || remember "$mark"
  said $status
  if [ -n "$unit" ] && [ "$each" = "${wanted[-1]}" ] && [ -x "$root/made/tests/unit_tests" ]; then
    began=$SECONDS log=$work/$release-$compiler-unit.log
    inside "$root" sh -c 'cd /src && BUILD=/made scripts/run-tests.sh unit' >"$log" 2>&1
    read -r p f s < <(grep -E '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' "$log" | tail -1 | tr -dc '0-9 \n')
    passed=$((passed + ${p:-0})) failed=$((failed + ${f:-1})) skipped=$((skipped + ${s:-0}))
    if [ "${f:-1}" = 0 ]; then printf 'ok   %s: unit tests (%d s)\n' "$each" $((SECONDS - began)); else printf 'FAIL %s: unit tests (%s)\n' "$each" "$log"; grep -vE '^ +\.\. ' "$log" | tail -40 | sed 's/^/       | /'; fi
  fi
  rm -rf "$root/made"
done
for each in "${wanted[@]}"; do rm -rf --one-file-system "${work:?}/${each%%/*}"; done
finish
