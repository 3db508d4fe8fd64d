#!/bin/bash
# check.sh [NAME..]: runs the checks that need no run of the library; all, or those named. $BUILD
# must be built.
#
#   format layers interfaces header names settings manual docs prose readme words sizes shell python statics tidy
# TIDY_FILES=N: clang-tidy reads only the N most recently changed sources; .ci/run does this, and
# the nightly run reads all. Each check prints "ok" or what is wrong; a missing tool is a reported
# skip. Exit 1 if anything is wrong.
set -uo pipefail
shopt -s lastpipe   # report counts in this shell, at the end of a pipe
cd "$(dirname "$0")/.." || exit 1
build=${BUILD:-build}
passed=0 failed=0 skipped=0
export LC_ALL=C.UTF-8
# The make that this starts has its own jobs: it is not given the job server of the make above, and
# would warn about that.
unset MAKEFLAGS MFLAGS MAKELEVEL

tracked() { git ls-files --cached --others --exclude-standard -- "$@" | sort -u | while read -r f; do [ -f "$f" ] && echo "$f"; done; }
# report NAME: reads the findings from standard input.
report() {
  local text; text=$(cat)
  if [ -z "$text" ]; then echo "ok   $1"; passed=$((passed + 1)); else echo "FAIL $1"; sed 's/^/       /' <<<"$text"; failed=$((failed + 1)); fi
}
missing() { echo "skip $1: $2 is not installed"; skipped=$((skipped + 1)); }

check_format() {
  command -v clang-format >/dev/null || { missing format clang-format; return; }
  tracked 'lib/*.cpp' 'lib/*.h' 'tests/*.cpp' 'tests/*.h' 'tests/*.cu' 'tools/*.cpp' 'tools/*.h' 'examples/*.cpp' 'include/vmem/*.hpp' 'include/vmem/*.cuh' 'include/vmem/detail/*.h' |
    xargs clang-format --dry-run -Werror 2>&1 | sed -n 's/^\([^:]*\):.*error: code should be clang-formatted.*/\1: not formatted (clang-format -i)/p' | sort | uniq | report format
}

# Includes go one way, as lib/ROOMS says. Code outside lib includes only the public headers.
check_layers() {
  command -v python3 >/dev/null || { missing layers python3; return; }
  tracked 'lib/*/*.h' 'lib/*/*.cpp' | xargs python3 scripts/lib/check_rooms.py 2>&1 | report layers
}

# The same for names that a file uses through a header of another file. Takes some 3 s of CPU time
# for each file, so without a name it runs only in the long form.
check_arrows() {
  local tool uses=$build/uses; tool=$(compgen -c clang-tidy- | grep -E '^clang-tidy-(1[7-9]|2[0-9])$' | sort -V | tail -1)
  [ -n "$tool" ] || { missing arrows "clang-tidy 17 or later"; return; }
  rm -rf "$uses"; mkdir -p "$uses"
  tracked 'lib/*/*.h' 'lib/*/*.cpp' | xargs -P "$(nproc)" -I{} sh -c '"$1" --quiet --checks=-*,misc-include-cleaner --header-filter="^$" --export-fixes="$2/$(echo "$3" | tr / _).yaml" "$3" -- -x c++ -std=c++20 -D_GNU_SOURCE -Iinclude -Ilib '"${CUDA_HOME:+-isystem $CUDA_HOME/include -DVMEM_HAVE_CUDA=1}"' >/dev/null 2>&1' sh "$tool" "$uses" {}
  tracked 'lib/*/*.h' 'lib/*/*.cpp' | xargs python3 scripts/lib/check_rooms.py --uses "$uses" 2>&1 | report arrows
}

# For each thing outside, one room is the only interface.
check_interfaces() {
  only() { tracked 'lib/*' | grep -v "^lib/$1/" | xargs grep -nE "^ *# *include *[<\"]($2)" 2>/dev/null | sed "s|\$|   (only lib/$1 may)|"; }
  { only store 'liburing'; only device/cuda 'cuda'; only trap 'linux/userfaultfd|vmem/vmem_uapi'
    # The library's threads have names and block all signals.
    tracked 'lib/*.cpp' 'lib/*.h' | grep -v '^lib/core/thread\.cpp$' | xargs grep -nE 'pthread_create|thrd_create|std::(thread|jthread|async)[({]|std::(jthread|async)\b|std::thread +[a-z_]+[({]|(threads|workers)_?\.emplace_back' | sed 's/$/   (core::start_thread starts threads)/'
    # -Wthread-safety knows no lock of the standard library.
    tracked 'lib/core/*' 'lib/trap/*' 'lib/store/*' 'lib/memory/*' 'lib/publish/*' 'lib/kernel_paging/*' 'lib/api/*' | grep -vE '^lib/core/(mutex|big_lock)\.h$' | xargs grep -nE 'std::((recursive_|shared_|timed_)?mutex|lock_guard|unique_lock|scoped_lock)\b' | sed 's/$/   (core::Mutex, core::MutexLock)/'
    # /proc/self is the main thread's, which may have ended.
    tracked 'lib/*.cpp' 'lib/*.h' | xargs grep -nE '"/proc/self/(mem|maps|pagemap|fd|fdinfo|mountinfo|statm|ns)(/|")' | grep -v 'cannot be opened' | sed 's/$/   (\/proc\/thread-self)/'
    # Under AddressSanitizer, a child that uses memory before it execs may wait forever.
    tracked 'tests/system/*' | grep -v '^tests/system/child\.h$' | xargs grep -nE '\b(fork|vfork|execlp?|execv[pe]*|posix_spawnp?)\(' | sed 's/$/   (tests\/system\/child.h starts children)/'
    tracked 'lib/policy/*' | xargs grep -nE '^ *# *include *<(chrono|thread|mutex|atomic|fcntl.h|unistd.h)>' 2>/dev/null | sed 's/$/   (policy: no I\/O, clock or lock)/'
  } | report interfaces
}

# The public header compiles alone, as C99 and C++, with every warning; and without CUDA's headers,
# except for cuda.h.
check_header() {
  local toolkit=${CUDA_HOME:-/usr/local/cuda}/include language header cuda extra
  # Warnings that strict programs enable; with their -Werror a header must cause none.
  local strict="-Wall -Wextra -pedantic -Wshadow -Wconversion -Wsign-conversion -Wcast-qual -Wundef -Wfloat-equal -Werror"
  local strict_cxx="$strict -Wold-style-cast -Wzero-as-null-pointer-constant -Wnon-virtual-dtor -Woverloaded-virtual"
  { for language in "c -std=c99" "c -std=c17" "c++ -std=c++11" "c++ -std=c++20"; do
      for header in include/vmem/*.h; do
        # The ioctl header may use the kernel's headers, which are not strict C99.
        cuda=
        if [ "${header##*/}" = cuda.h ]; then
          [ -e "$toolkit/cuda_runtime_api.h" ] || continue
          cuda="-isystem $toolkit -DVMEM_CUDA_CALLS"
        fi
        extra=$strict
        case $language in c++*) extra=$strict_cxx ;; esac
        # shellcheck disable=SC2086  # language, cuda and extra hold several words
        echo "#include \"vmem/${header##*/}\"" | ${CXX:-g++} -x $language -Iinclude $cuda $extra -fsyntax-only - 2>&1
      done
    done
    for header in include/vmem/*.hpp; do
      [ -f "$header" ] && echo "#include \"vmem/${header##*/}\"" | ${CXX:-g++} -x c++ -std=c++20 -Iinclude $strict_cxx -fsyntax-only - 2>&1
    done
    for header in include/vmem/detail/*.h; do
      echo "#include \"vmem/detail/${header##*/}\"" | ${CXX:-g++} -x c++ -std=c++17 -Iinclude $strict_cxx -fsyntax-only - 2>&1
    done
    ! grep -rnE --exclude=cuda.h 'include *<cuda' include/vmem
  } | report header
}

# vmem.h, the symbol map and the shared library name the same calls, all of them in VMEM_1. The tests
# that make every call know them all.
check_names() {
  local header map exported files word now where at
  header=$(${CC:-cc} -E -P -Iinclude include/vmem/vmem.h | grep -oE '\bvmem_[a-z_]+ *\(' | tr -d ' (' | sort -u)
  map=$(sed -n '/global:/,/local:/p' lib/api/libvmem.map | grep -oE 'vmem_[a-z_]+' | sort -u)
  { diff <(echo "$header") <(echo "$map") | sed -n 's/^< \(.*\)/\1: in vmem.h, not in lib\/api\/libvmem.map/p; s/^> \(.*\)/\1: in lib\/api\/libvmem.map, not in vmem.h/p'
    for at in tests/abi/link_c.c tests/system/small_stack_test.cpp; do
      while read -r word; do grep -qw "$word" "$at" || echo "$at: does not call $word"; done <<<"$map"
    done
    if [ -e "$build/libvmem.so" ]; then
      exported=$(nm -D --defined-only "$build/libvmem.so" | awk '$2 != "A" {print $3}' | sort -u)
      diff <(sed 's/$/@@VMEM_1/' <<<"$map") <(echo "$exported") | sed -n 's/^< \(.*\)/\1: not exported by libvmem.so/p; s/^> \(.*\)/\1: exported by libvmem.so, not in the map/p'
      [ -n "$(grep -w SIM "$build/flags")" ] || nm -C "$build/libvmem.so" | grep -oE '(SimDevices|FaultyEngine|TestHooks)\b' | sort -u | sed 's/$/: for tests, and in libvmem.so/'
      ! readelf -d "$build/libvmem.so" | grep -q STATIC_TLS || echo "libvmem.so: cannot be loaded late (STATIC_TLS): no initial-exec variables"
      readelf -d "$build/libvmem.so" | grep -q 'SONAME.*libvmem-tier\.so\.[0-9]*\]' || echo "libvmem.so: the soname is not libvmem-tier.so.N"
    fi
    # Words that are no longer used.
    files=$(tracked 'lib/*' 'include/*' 'python/*' 'tools/*' 'tests/*' 'docs/*' ':!docs/benchmarks/*')
    grep -v '^#' scripts/old_words.txt | while IFS=$'\t' read -r word now where; do
      grep -E "${where:-.}" <<<"$files" | xargs grep -nIE "(^|[^A-Za-z0-9_])($word)($|[^A-Za-z0-9_])" 2>/dev/null | cut -d: -f1,2 |
        while read -r at; do echo "$at: says $word, which is now $now (scripts/old_words.txt)"; done
    done
  } | report names
}

# The beginning of settings.md is written by hand.
generated() { case $1 in *.md) sed -n '/^<!-- Generated/,$p' "$1" ;; *) cat "$1" ;; esac; }
check_settings() {
  local folder page; folder=$(mktemp -d); mkdir "$folder/man"
  { "$build/tools/docgen" "$folder" || echo "docgen failed"
    for page in settings.md man/vmem-settings.7 man/libvmem-tier.3; do
      diff -q <(generated "$folder/$page") <(generated "docs/$page") >/dev/null || echo "docs/$page is not what the code says: make docs"
    done; } 2>&1 | report settings
  rm -rf "$folder"
}

# Every call of vmem.h has a manual page with a summary line, and groff reports nothing for any
# page.
check_manual() {
  command -v groff >/dev/null || { missing manual groff; return; }
  local folder call page; folder=$(mktemp -d)
  { "$build/tools/docgen" --calls "$folder" || echo "docgen failed"
    ${CC:-cc} -E -P -Iinclude include/vmem/vmem.h | grep -oE '\bvmem_[a-z_]+ *\(' | tr -d ' (' | sort -u | while read -r call; do
      page=$folder/$call.3vmem
      [ -s "$page" ] || { echo "$call: no manual page"; continue; }
      # A page may refer to another one: .so man3/NAME.3vmem
      page=$folder/$(sed -n '1s|^\.so man3/||p' "$page"); [ -f "$page" ] || page=$folder/$call.3vmem
      grep -q "^\.TH VMEM_" "$page" || echo "$call: its page has no title, and names no other page"
      sed -n '/^\.SH NAME/,/^\.SH SYN/p' "$page" | grep -qE '^\\- [a-z].{7,}' || echo "$call: the comment over it in vmem.h does not begin with what it does"
    done
    for page in "$folder"/*.3vmem docs/man/*; do
      grep -q '^\.so ' "$page" || groff -man -Tutf8 -ww -z "$page" 2>&1 | sed "s|^|${page##*/}: |"
    done; } 2>&1 | report manual
  rm -rf "$folder"
}

# Lines of the documents are short and tables complete. Links, files, classes, functions and tests
# that they name exist. Each room of lib has its page, and the architecture's picture matches
# lib/ROOMS.
check_docs() {
  command -v python3 >/dev/null || { missing docs python3; return; }
  { tracked '*.md' | xargs -r python3 scripts/lib/check_docs.py
    python3 scripts/lib/draw_rooms.py --check
    python3 scripts/lib/plot_bench.py --check; } 2>&1 | report docs
}

# Sentences of comments and documents that have to be read twice: at most one in a hundred.
check_prose() {
  command -v python3 >/dev/null || { missing prose python3; return; }
  local planted=; planted=$(mktemp -d)
  { for _ in $(seq 50); do echo '// What is had by nobody stays.'; echo; done >"$planted/a.h"
    [ "$(python3 scripts/lib/check_prose.py "$planted/a.h" | wc -l)" = 50 ] || echo "check_prose.py does not find planted sentences"
    tracked '*.cpp' '*.h' '*.hpp' '*.cu' '*.cuh' '*.c' '*.md' '*.py' '*.sh' '*.mk' | xargs python3 scripts/lib/check_prose.py; } 2>&1 | report prose
  rm -rf "$planted"
}

# The README's example is the one that is built and run.
check_readme() {
  { diff -q <(sed -n '/^```cpp$/,/^```$/p' README.md | sed '1d;$d') examples/hello.cpp >/dev/null || echo "README.md: its example is not examples/hello.cpp"; } | report readme
}

# The repository is complete and names no machine: no unfinished marks, no paths of a home folder.
check_words() {
  { tracked | grep -vE '^(LICENSE|kmod/COPYING|scripts/check\.sh)' | xargs grep -nIE '\b(TODO|FIXME|XXX|HACK)\b' 2>/dev/null | sed 's/^/unfinished: /'
    tracked | grep -v '^scripts/check\.sh' | xargs grep -nIE '(^|[^A-Za-z0-9_.$/}-])/(home|root|work|Users)/[A-Za-z0-9._-]+' 2>/dev/null | sed 's/^/a path of one machine: /'
    tracked | xargs grep -lIE '[[:space:]]+$' 2>/dev/null | grep -E '\.(cpp|h|hpp|c|sh|md)$' | sed 's/$/: blanks at the end of a line/'
    git ls-files -s | awk '$1 == "100755" {print $4}' | while read -r f; do head -c2 "$f" 2>/dev/null | grep -q '#!' || echo "$f: executable, but no script"; done
  } | head -40 | report words
}

# Sources should be split at 600 lines, headers at 250; a fifth more is an error. The public headers
# contain the documentation of every call and have no limit. The module must stay small.
check_sizes() {
  lines() { xargs -r wc -l | awk -v want="$1" -v limit="$2" -v note="$3" '$2 != "total" && $1 > limit {print $2 ": " $1 " lines, at most " want}
    $2 != "total" && $1 > want && $1 <= limit {print "note " $2 ": " $1 " lines, " want " wanted" >note}'; }
  { tracked 'lib/*.cpp' 'tools/*.cpp' 'tests/*.cpp' 'tests/*.cu' 'examples/*.cpp' 'scripts/*' 'kmod/*.c' | lines 600 720 /dev/stderr
    tracked 'lib/*.h' 'tools/*.h' 'include/vmem/detail/*.h' | lines 250 300 /dev/stderr
    tracked 'python/*.py' 'tests/*.py' | lines 600 720 /dev/stderr
    tracked ':(glob)kmod/*.c' ':(glob)kmod/*.h' | xargs -r cat | wc -l | awk '$1 >= 2500 {print "kmod: " $1 " lines, under 2500 promised"}'
  } | report sizes
}

check_shell() {
  command -v shellcheck >/dev/null || { missing shell shellcheck; return; }
  tracked '*.sh' .ci/run | xargs shellcheck -x -S warning -e SC1091,SC2034,SC2154,SC2054,SC2030,SC2031 2>&1 | head -60 | report shell
}

# Python 3.9, short lines, no unused imports; the package declares only calls that the header has.
check_python() {
  local call calls
  command -v python3 >/dev/null || { missing python python3; return; }
  calls=" $(${CC:-cc} -E -P -Iinclude include/vmem/vmem.h | grep -oE '\bvmem_[a-z_]+ *\(' | tr -d ' (' | sort -u | tr '\n' ' ') "
  { tracked '*.py' | xargs -r python3 scripts/lib/check_python.py
    # The interpreter prints and drops what a signal handler raises in such a callback of Python code.
    tracked 'python/*.py' | xargs grep -nE 'weakref\.(Weak|finalize)|gc\.callbacks' | sed 's/$/   (a callback must be C code, as weakref.ref(x, set.discard))/'
    grep -ohE '\bvmem_[a-z_]+\b' python/vmem/_lib.py | sort -u | while read -r call; do
      [[ $calls == *" $call "* ]] || echo "python/vmem/_lib.py: $call is not in vmem.h"
    done
  } 2>&1 | report python
}

# Nothing in lib/ has a constructor or destructor that the C++ runtime calls, thread_local or
# static: the library's threads run on while the process exits, and the program's constructors may
# call the library before its own would have run. Also, where locks are declared, clang finds no
# access without the required lock.
check_statics() {
  command -v clang++ >/dev/null || { missing statics clang++; return; }
  local header type said unlocked='mutex; int x VMEM_GUARDED_BY(mutex) = 0; int get() { return x; } };'
  { make -k -j"$(nproc)" BUILD="$build" statics 2>&1 | grep -E 'error:|Error ' | sort -u | head -60
    # First test the test: it must find planted errors.
    while read -r header type; do
      said=$(printf '#include "%s"\nstruct S { %s %s\n' "$header" "$type" "$unlocked" | clang++ -x c++ -std=c++20 -Ilib -fsyntax-only -Werror=thread-safety - 2>&1)
      [[ $said == *"reading variable 'x' requires holding mutex"* ]] || echo "lib/$header: an access without the lock passes"
    done <<<$'core/mutex.h vmem::core::Mutex\napi/fair_mutex.h vmem::api::FairMutex'
    said=$(printf '#include "core/big_lock.h"\nint f() VMEM_LOCKED;\nint h() VMEM_UNLOCKED;\nint g() { return f(); }\nint x VMEM_GUARDED_BY(vmem::core::big_lock);\nint y() { return x; }\nint z() VMEM_LOCKED;\nint z() { return h(); }\n' | clang++ -x c++ -std=c++20 -Ilib -fsyntax-only -Werror=thread-safety - 2>&1)
    [[ $said == *"'f' requires holding lock 'big_lock'"* && $said == *"reading variable 'x' requires holding lock"* && $said == *"cannot call function 'h'"* ]] || echo "lib/core/big_lock.h: a call without the lock passes"
  } | report statics
}

check_tidy() {
  command -v clang-tidy >/dev/null || { missing tidy clang-tidy; return; }
  local changed only=()
  if [ -n "${TIDY_FILES:-}" ]; then
    # A header is read with the source of the same name.
    changed=$(git log --name-only --format= -n 500 -- lib tools examples | sed -n 's/\.\(cpp\|h\)$/.cpp/p' | awk '!seen[$0]++' |
      while read -r f; do [ ! -e "$f" ] || echo "$f"; done | head -n "$TIDY_FILES" | tr '\n' ' ')
    only=("TIDY_ONLY=$changed")
  fi
  # Shows only findings.
  make -k -j"$(nproc)" BUILD="$build" ${only[@]+"${only[@]}"} tidy 2>&1 | grep -vE '^(clang-tidy |make.*(Nothing|up to date))' | grep -E 'error:|warning:|Error ' | sort -u | head -60 | report tidy
}

# The headers of packages, which scripts/lib/once.sh cannot see. Without dpkg, make decides whether
# clang-tidy runs.
packages=$(dpkg-query -W -f '${Package} ${Version}\n' '*-dev' 2>/dev/null) && CHECK_SYSTEM=$(sha256sum <<<"$packages") && export CHECK_SYSTEM
find "${VMEM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/vmem}/passed" -type f -mtime +30 -delete 2>/dev/null

[ $# -gt 0 ] || set -- format layers interfaces header names settings manual docs prose readme words sizes shell python statics tidy ${VMEM_LONG:+arrows}
for name in "$@"; do
  declare -F "check_$name" >/dev/null || { echo "check: no check '$name'" >&2; exit 2; }
  "check_$name"
done
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ]
