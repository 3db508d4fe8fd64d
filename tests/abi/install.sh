#!/bin/bash
# An installed library can be found by pkg-config and by CMake, linked shared and static, moved into another root, and run.
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
"$work/root/usr/bin/vmemctl" --version | grep -q '^vmemctl '
for page in man1/vmemctl.1 man3/libvmem-tier.3 man7/vmem-settings.7; do [ -s "$work/root/usr/share/man/$page" ]; done
echo "vmemctl runs, its manual pages are there"
command -v cmake >/dev/null || { echo "CMake is not installed: its package was not tried"; exit 0; }
cat >"$work/CMakeLists.txt" <<'C'
cmake_minimum_required(VERSION 3.16)
project(app C CXX)
find_package(vmem 1.0 REQUIRED)
add_executable(app app.c)
target_link_libraries(app vmem::vmem)
add_executable(app_static app.c)
target_link_libraries(app_static vmem::static)
C
cmake -S "$work" -B "$work/cmake" -DCMAKE_PREFIX_PATH="$work/root/usr" -DCMAKE_LIBRARY_ARCHITECTURE=x86_64-linux-gnu >"$work/log" 2>&1 &&
  cmake --build "$work/cmake" >>"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
"$work/cmake/app" | grep -q no_such_setting
"$work/cmake/app_static" | grep -q no_such_setting
echo "CMake: shared and static programs run"
