#!/bin/bash
# Runs the commands and code blocks of README.md and docs/*.md, extracted from their text and
# unchanged, against a library installed by "make install".
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
top=$PWD
build=$(realpath "${BUILD:-build}"); work=$(mktemp -d "${TMPDIR:-/var/tmp}/vmem-snippets.XXXXXX"); trap 'rm -rf "$work"' EXIT
passed=0 failed=0 skipped=0
unset "${!VMEM_@}"

# Extracts the blocks of each page in order: $work/blocks/PAGE/N.LANGUAGE (text: no language).
mkdir "$work/blocks"
for page in README.md docs/*.md; do
  mkdir -p "$work/blocks/$page"
  awk -v to="$work/blocks/$page" '/^```/ { if (file) { close(file); file = "" } else { language = substr($0, 4); file = to "/" ++n "." (language ? language : "text"); printf "" >file }; next }
    file { print >file }' "$page"
done
block() { echo "$work/blocks/$1"; }

# step NAME COMMAND..: 0 passes, 77 skips (the last line of output says why).
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
env -u MAKEFLAGS make BUILD="${BUILD:-build}" PREFIX="$work/prefix" NO_SETUP=1 install >"$work/log" 2>&1 || { cat "$work/log"; echo "make install failed"; exit 1; }
export PKG_CONFIG_PATH=$work/prefix/lib/pkgconfig CMAKE_PREFIX_PATH=$work/prefix LD_LIBRARY_PATH=$work/prefix/lib
prefix_lib=$work/prefix/lib
hello_is_right() { grep -qE '^sum 562949936644096, [1-9][0-9]* MiB written to and [1-9][0-9]* MiB read' "$1"; }
app() { mkdir -p "$1" && cp "$(block README.md/4.cpp)" "$1/hello.cpp" && printf '#include <vmem/vmem.h>\nint main(void) { return vmem_last_error() == 0; }\n' >"$1/app.c" && cd "$1" || return; }

stripped() {
  local lib=$prefix_lib/libvmem-tier.so.1
  ! readelf -S "$lib" | grep -q '\.debug_info' && readelf -S "$lib" | grep -q '\.gnu_debuglink' &&
    readelf -S "$prefix_lib/.debug/libvmem-tier.so.1.debug" | grep -q '\.debug_info' && nm "$prefix_lib/libvmem.a" 2>/dev/null | grep -q vmem_init
}
same_text() { diff "$(block README.md/4.cpp)" examples/hello.cpp; }
by_pkg_config() { app "$work/pkg" && bash -e "$(block README.md/5.sh)" >said && hello_is_right said; }
cmake_project() {  # cmake_project BLOCK TARGET LANGUAGE SOURCE
  command -v cmake >/dev/null || { echo "CMake is not installed"; return 77; }
  { printf 'cmake_minimum_required(VERSION 3.16)\nproject(%s %s)\n' "$2" "$3"; [ -z "$4" ] || echo "add_executable($2 $4)"; cat "$1"; } >CMakeLists.txt
  cmake -S . -B made && cmake --build made
}
by_cmake() { app "$work/cmake" && { cmake_project "$(block README.md/6.cmake)" hello CXX '' || return; } && made/hello >said && hello_is_right said; }
packages_by_pkg_config() { app "$work/pkg2" && bash -e "$(block docs/install.md/2.text)" && ./app && ./hello >said && hello_is_right said; }
packages_by_cmake() { app "$work/cmake2" && { cmake_project "$(block docs/install.md/3.cmake)" app C app.c || return; } && made/app; }

# The wheel, the virtual environment, and the pages' Python code. The block on memory runs, with
# smaller numbers. Blocks that need models do not run, but every name of the package that any block
# uses must exist.
find_python() { for each in python3 /usr/bin/python3; do "$each" -c "import $1" 2>/dev/null && { echo "$each"; return; }; done; return 1; }
wheel() {
  local python made
  python=$(find_python venv,numpy || find_python venv) || { echo "no Python with venv"; return 77; }
  cd "$work" && "$python" -m venv --system-site-packages venv || { echo "this Python makes no virtual environments (python3-venv)"; return 77; }
  mkdir wheel && strip --strip-debug -o wheel/libvmem-tier.so.1 "$prefix_lib/libvmem-tier.so.1" && made=$("$python" "$top/scripts/wheel.py" wheel wheel/libvmem-tier.so.1) &&
    venv/bin/python -m pip install --quiet --no-index --disable-pip-version-check "$made"
}
in_venv() { [ -x "$work/venv/bin/python" ] || { echo "no virtual environment"; return 77; }; env -u LD_LIBRARY_PATH VMEM_DEVICE=none "$work/venv/bin/python" "$@"; }
memory_snippet() {
  in_venv -c 'import numpy' 2>/dev/null || { echo "NumPy is not installed"; return 77; }
  mkdir -p "$work/py" && cd "$work/py" && head -c 1000000 /dev/urandom >in.bin || return
  # Defines the names that the page leaves to the reader: the stream, the array that the kernel
  # writes, and an open file. The parts that need a device are left out (tests/python/test_kernel.py
  # runs vmem.kernel, test_export.py vmem.export).
  { echo 'import contextlib, vmem; stream, out, file, vmem.device_stats = None, vmem.alloc("4MiB").array("uint8"), open("in.bin", "rb"), lambda device: None'
    echo 'vmem.kernel = lambda *arrays, device, stream, budget: contextlib.nullcontext(); vmem.export = lambda array: -1'
    sed -e 's/location=0/location=vmem.HOST/g' "$(block docs/python.md/2.python)"; echo 'import asyncio, os; asyncio.run(use()); assert os.path.getsize("out.bin") == region.nbytes'
  } | sed 's/"16GiB"/"1GiB"/; s/(1 << 16, 1 << 16)/(1 << 12, 1 << 12)/' >snippet.py
  in_venv snippet.py
}
# docs/settings.md: regions with attributes, as on the page, preceded by the declarations that the
# page leaves to the reader.
choosing_cpp() {
  mkdir -p "$work/choosing" && cd "$work/choosing" && head -c 65536 /dev/urandom >input.bin || return
  { printf '#include <vmem/vmem.hpp>\nint main() {\n  vmem::set("device", "none");\n  const size_t bytes = 16 << 20, size = 65536;\n'
    cat "$(block docs/settings.md/1.cpp)"; printf '  table.view<char>()[1] = 2;\n  return table.view<char>()[1] == 2 && input.size() == size ? 0 : 1;\n}\n'; } >choosing.cpp
  # shellcheck disable=SC2046  # flags are words
  g++ -std=c++20 -Wall -Wextra -Werror choosing.cpp -o cpp $(pkg-config --cflags --libs vmem) && ./cpp
}
choosing_c() {
  mkdir -p "$work/choosing" && cd "$work/choosing" || return
  { printf '#include <vmem/vmem.h>\nint main(void) {\n  void *table = 0;\n  const size_t bytes = 16 << 20;\n'; sed 's/^/  /' "$(block docs/settings.md/2.c)"
    printf '  return table == 0 || *(char *)table != 0 || vmem_free(table) != 0;\n}\n'; } >choosing.c
  # shellcheck disable=SC2046
  cc -std=c99 -Wall -Werror choosing.c -o c $(pkg-config --cflags --libs vmem) && VMEM_DEVICE=none ./c
}
choosing_python() { { echo 'import vmem'; cat "$(block docs/settings.md/3.text)"; echo 'assert table.query().zero_bytes == 16 << 30'; } >"$work/choosing.py" && in_venv "$work/choosing.py"; }
# A step here or another test runs each block of each page, unless there is nothing to run. A new
# block needs a step, or a reason.
every_block() {
  # run by scripts/bare.sh; tests/python/wheel.sh; tests/package
  local known=" README.md/1 README.md/2 docs/python.md/1 docs/install.md/1 "
  # run here
  known+="README.md/4 README.md/5 README.md/6 docs/install.md/2 docs/install.md/3 docs/python.md/2 docs/settings.md/1 docs/settings.md/2 docs/settings.md/3 "
  # need a model: the step on names; tests/python/test_torch_*.py
  known+="README.md/3 docs/python.md/3 docs/python.md/4 docs/python.md/5 "
  # no commands; a sketch, whose complete text is in tests/gpu
  known+="docs/vmemctl.md/1 docs/gpu-paging.md/1 docs/gpu-paging.md/2 "
  known+="docs/device-tier.md/1 "  # a GPU
  local each wrong=0 name
  while read -r each; do
    name=${each%.*}
    [[ $known == *" $name "* ]] || { echo "$name is run by nothing: $(head -3 "$work/blocks/$each")"; wrong=1; }
    known=${known/ $name / }
  done < <(cd "$work/blocks" && find . -type f -printf '%P\n')
  [ -z "${known// /}" ] || { echo "not there:$known"; wrong=1; }
  return $wrong
}
names() {
  cat >"$work/names.py" <<'P'
import ast, glob, sys
top = sys.argv[1]
def defined(path):
    found = set()
    for node in ast.walk(ast.parse(open(path).read())):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)): found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store): found.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)): found |= {(a.asname or a.name).split(".")[0] for a in node.names}
    return found
known = {"vmem": defined(top + "/python/vmem/__init__.py") | {"torch"}, "vt": defined(top + "/python/vmem/torch/__init__.py")}
blocks = 0
for path in sys.argv[2:]:
    blocks += 1
    for node in ast.walk(ast.parse(open(path).read(), path)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in known:
            assert node.attr in known[node.value.id], f"{path}: {node.value.id}.{node.attr} does not exist"
assert blocks >= 4, blocks
P
  python3 "$work/names.py" "$top" "$work"/blocks/*/*.python "$work"/blocks/docs/*/*.python
}

step "README.md shows examples/hello.cpp" same_text
step "README.md: hello.cpp by pkg-config, and what it prints" by_pkg_config
step "README.md: hello.cpp by CMake" by_cmake
step "docs/install.md: programs by pkg-config" packages_by_pkg_config
step "docs/install.md: a program by CMake" packages_by_cmake
step "a wheel, installed by pip in a virtual environment" wheel
step "docs/python.md: memory, as it stands but smaller" memory_snippet
step "docs/settings.md: attributes in C++" choosing_cpp
step "docs/settings.md: attributes in C" choosing_c
step "docs/settings.md: attributes in Python" choosing_python
step "every block of every page is run, or known to be none to run" every_block
step "README.md, docs/python.md: every name that they use exists" names

echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ]
