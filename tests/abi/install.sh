#!/bin/bash
# pkg-config and CMake find an installed library; it can be linked shared and static, moved into
# another root, and run.
set -euo pipefail
cd "$(dirname "$0")/../.."
build=${BUILD:-build}; work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
make BUILD="$build" DESTDIR="$work/root" PREFIX=/usr LIBDIR=/usr/lib/x86_64-linux-gnu install >/dev/null
lib=$work/root/usr/lib/x86_64-linux-gnu
cat >"$work/app.c" <<'C'
#include <stdio.h>
#include <vmem/vmem.h>
int main(void) { return vmem_set("no_such_setting", "1") == 0 || puts(vmem_last_error()) < 0; }
C
config() { PKG_CONFIG_LIBDIR=$lib/pkgconfig pkg-config --define-variable=prefix="$work/root/usr" --define-variable=libdir="$lib" "$@" vmem; }
# shellcheck disable=SC2046  # flags are words
cc "$work/app.c" -o "$work/shared" $(config --cflags --libs)
readelf -d "$work/shared" | grep -q 'NEEDED.*libvmem-tier\.so\.1\]'
LD_LIBRARY_PATH=$lib "$work/shared" | grep -q no_such_setting
# shellcheck disable=SC2046
c++ -x c "$work/app.c" -x none -o "$work/static" $(config --cflags) "$lib/libvmem.a" $(config --static --libs | sed "s/-lvmem\b//")
"$work/static" | grep -q no_such_setting
echo "pkg-config: shared and static programs run"
cat >"$work/pool.cpp" <<'C'
#include <cstdio>
#include <vmem/pool.hpp>
int main() {
  vmem::pool pool;
  try {
    (void)pool.allocate(size_t{1} << 62);
  } catch (const std::bad_alloc& e) {
    return std::puts(e.what()) < 0;
  }
  return 1;
}
C
# shellcheck disable=SC2046
c++ -std=c++20 "$work/pool.cpp" -o "$work/pool" $(config --cflags --libs)
LD_LIBRARY_PATH=$lib "$work/pool" | grep -q '^vmem::pool: 4611686018427387904 bytes'
echo "a program with vmem::pool runs"
# A compiler in an older language mode first reports that C++20 is missing.
for header in vmem pool; do
  echo "#include <vmem/$header.hpp>" >"$work/old.cpp"
  # shellcheck disable=SC2046
  ! LC_ALL=C c++ -std=c++17 -fsyntax-only "$work/old.cpp" $(config --cflags) 2>"$work/said" || { echo "C++17 compiles $header.hpp"; exit 1; }
  grep -m1 'error' "$work/said" | grep -q 'needs C++20: compile with -std=c++20' || { cat "$work/said"; exit 1; }
done
echo "the headers say that they need C++20"
"$work/root/usr/bin/vmemctl" --version | grep -q '^vmemctl '
for page in man1/vmemctl.1 man3/libvmem-tier.3 man3/vmem_acquire.3vmem man7/vmem-settings.7; do [ -s "$work/root/usr/share/man/$page" ]; done
echo "vmemctl runs, its manual pages are there"
command -v cmake >/dev/null || { echo "CMake is not installed: its package was not tried"; exit 0; }
cat >"$work/CMakeLists.txt" <<'C'
cmake_minimum_required(VERSION 3.16)
project(app C CXX)
find_package(vmem 1.0 REQUIRED COMPONENTS shared static)
add_executable(app app.c)
target_link_libraries(app vmem::vmem)
add_executable(app_static app.c)
target_link_libraries(app_static vmem::static)
add_executable(pool pool.cpp)  # only the package requires C++20
target_link_libraries(pool vmem::vmem)
set(CMAKE_CXX_STANDARD 17)  # a project that asks for an older standard does not override that
add_executable(pool_static pool.cpp)
target_link_libraries(pool_static vmem::static)
C
prefix=(-DCMAKE_PREFIX_PATH="$work/root/usr" -DCMAKE_LIBRARY_ARCHITECTURE=x86_64-linux-gnu)
cmake -S "$work" -B "$work/cmake" "${prefix[@]}" >"$work/log" 2>&1 && cmake --build "$work/cmake" >>"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
"$work/cmake/app" | grep -q no_such_setting
"$work/cmake/app_static" | grep -q no_such_setting
for each in pool pool_static; do "$work/cmake/$each" | grep -q '^vmem::pool: '; done
echo "CMake: shared and static programs run"
# A project without C++ can use the shared library, and the package must not require C++20 of it.
mkdir "$work/only-c"
printf '%s\n' 'cmake_minimum_required(VERSION 3.16)' 'project(app C)' 'find_package(vmem REQUIRED)' 'add_executable(app ../app.c)' \
  'target_link_libraries(app vmem::vmem)' >"$work/only-c/CMakeLists.txt"
cmake -S "$work/only-c" -B "$work/only-c/build" "${prefix[@]}" >"$work/log" 2>&1 && cmake --build "$work/only-c/build" >>"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
"$work/only-c/build/app" | grep -q no_such_setting
echo "CMake: a project in C alone links"

# One project looks for the package in many ways. Each answer is a line "found", or "not found:
# why".
mkdir "$work/ask"
cat >"$work/ask/CMakeLists.txt" <<'C'
cmake_minimum_required(VERSION 3.19)
project(ask C CXX)
function(ask)
  set(vmem_DIR "vmem_DIR-NOTFOUND" CACHE PATH "" FORCE)
  find_package(vmem ${ARGN} QUIET)
  if(vmem_FOUND)
    message("${ARGN}: found ${vmem_VERSION}, shared ${vmem_shared_FOUND}, static ${vmem_static_FOUND}")
  else()
    message("${ARGN}: not found: ${vmem_NOT_FOUND_MESSAGE}${vmem_CONSIDERED_VERSIONS}")
  endif()
endfunction()
ask()
foreach(version IN ITEMS 0.9 1 1.0 1.99 2 0.5...2 1.0...<2 0.1...0.9 1.5...3 0.5...1.0 0.5...<1.0)
  ask(${version})
endforeach()
ask(1.0 EXACT)
ask(COMPONENTS shared)
ask(COMPONENTS static)
ask(COMPONENTS gpu)
ask(OPTIONAL_COMPONENTS gpu)
C
answers() { rm -rf "$work/ask/build"; cmake -S "$work/ask" -B "$work/ask/build" "${prefix[@]}" 2>&1 | tr ';' ' ' | grep -E ': (not )?found' | sed 's/^ *//'; }
expect() { grep -qE "$1" "$work/answers" || { echo "find_package: no answer like '$1' in:"; cat "$work/answers"; exit 1; }; }
answers >"$work/answers"
have=$(sed -n 's/^Version: //p' "$lib/pkgconfig/vmem.pc")
expect "^: found $have, shared TRUE"
for version in 1 1.0 0.5...2 "1.0...<2" 0.5...1.0 "1.0 EXACT"; do expect "^${version//./\\.}: found $have,"; done
for version in 0.9 1.99 2 0.1...0.9 1.5...3 "0.5...<1.0"; do expect "^${version//./\\.}: not found: "; done
expect '^COMPONENTS shared: found'
expect '^COMPONENTS static: found.*static TRUE'
expect '^COMPONENTS gpu: not found: vmem, component gpu: there is no such component .there are: shared, static.'
expect '^OPTIONAL_COMPONENTS gpu: found'
mv "$lib/libvmem.a" "$lib/elsewhere"; answers >"$work/answers"
expect '^: found'
expect "^COMPONENTS static: not found: vmem, component static: .*/libvmem.a is not there"
mv "$lib/elsewhere" "$lib/libvmem.a"; mv "$lib/libvmem-tier.so.1" "$lib/elsewhere"; answers >"$work/answers"
expect '^: not found: vmem, component shared: .*/libvmem-tier.so.1 is not there'
expect '^COMPONENTS static: found'
mv "$lib/elsewhere" "$lib/libvmem-tier.so.1"
# On systems where /lib is a link to /usr/lib, a package found through the link has its headers
# beside the link's target.
ln -s usr/lib "$work/root/lib"
cat >"$work/ask/CMakeLists.txt" <<'C'
cmake_minimum_required(VERSION 3.19)
project(ask C CXX)
find_package(vmem REQUIRED)
get_target_property(where vmem::vmem INTERFACE_INCLUDE_DIRECTORIES)
message("include: found ${where}")
C
prefix=(-Dvmem_DIR="$work/root/lib/x86_64-linux-gnu/cmake/vmem"); answers >"$work/answers"
expect "^include: found $work/root/usr/include\$"
echo "CMake: versions, ranges and components are answered right"
