#!/bin/bash
# What README.md and docs/*.md tell the reader to type, taken out of their text and run as it stands, against a library that
# was installed by "make install".
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
build=$(realpath "${BUILD:-build}"); work=$(mktemp -d "${TMPDIR:-/var/tmp}/vmem-snippets.XXXXXX"); trap 'rm -rf "$work"' EXIT
passed=0 failed=0 skipped=0
unset "${!VMEM_@}"

# The blocks of each page: $work/blocks/PAGE/N.LANGUAGE (text: no language), in their order.
mkdir "$work/blocks"
for page in README.md docs/*.md; do
  mkdir -p "$work/blocks/$page"
  awk -v to="$work/blocks/$page" '/^```/ { if (file) { close(file); file = "" } else { language = substr($0, 4); file = to "/" ++n "." (language ? language : "text"); printf "" >file }; next }
    file { print >file }' "$page"
done
block() { echo "$work/blocks/$1"; }

# step NAME COMMAND..: 0 passes, 77 skips (its last line says why).
step() {
  local name=$1 said status; shift
  said=$("$@" 2>&1); status=$?
  case $status in
    0) passed=$((passed + 1)); echo "ok   $name" ;;
    77) skipped=$((skipped + 1)); echo "skip $name"; echo "skipped: $(tail -1 <<<"$said")" ;;
    *) failed=$((failed + 1)); echo "FAIL $name"; tail -30 <<<"$said" | sed 's/^/       | /' ;;
  esac
}

# A folder to work in, as the reader has it after "make install".
env -u MAKEFLAGS make BUILD="$build" PREFIX="$work/prefix" NO_SETUP=1 install >"$work/log" 2>&1 || { cat "$work/log"; echo "make install failed"; exit 1; }
export PKG_CONFIG_PATH=$work/prefix/lib/pkgconfig CMAKE_PREFIX_PATH=$work/prefix LD_LIBRARY_PATH=$work/prefix/lib
hello_is_right() { grep -qE '^sum 562949936644096, [1-9][0-9]* MiB written to and [1-9][0-9]* MiB read' "$1"; }
app() { mkdir -p "$1" && cp "$(block README.md/2.cpp)" "$1/hello.cpp" && printf '#include <vmem/vmem.h>\nint main(void) { return vmem_last_error() == 0; }\n' >"$1/app.c" && cd "$1" || return; }

same_text() { diff "$(block README.md/2.cpp)" examples/hello.cpp; }
by_pkg_config() { app "$work/pkg" && bash -e "$(block README.md/3.sh)" >said && hello_is_right said; }
cmake_project() {  # BLOCK TARGET LANGUAGE SOURCE
  command -v cmake >/dev/null || { echo "CMake is not installed"; return 77; }
  { printf 'cmake_minimum_required(VERSION 3.16)\nproject(%s %s)\n' "$2" "$3"; [ -z "$4" ] || echo "add_executable($2 $4)"; cat "$1"; } >CMakeLists.txt
  cmake -S . -B made && cmake --build made
}
by_cmake() { app "$work/cmake" && { cmake_project "$(block README.md/4.cmake)" hello CXX '' || return; } && made/hello >said && hello_is_right said; }
packages_by_pkg_config() { app "$work/pkg2" && bash -e "$(block docs/packages.md/2.text)" && ./app && ./hello >said && hello_is_right said; }
packages_by_cmake() { app "$work/cmake2" && { cmake_project "$(block docs/packages.md/3.cmake)" app C app.c || return; } && made/app; }

step "README.md shows examples/hello.cpp" same_text
step "README.md: hello.cpp by pkg-config, and what it prints" by_pkg_config
step "README.md: hello.cpp by CMake" by_cmake
step "docs/packages.md: programs by pkg-config" packages_by_pkg_config
step "docs/packages.md: a program by CMake" packages_by_cmake

echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ]
