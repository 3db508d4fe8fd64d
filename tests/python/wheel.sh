#!/bin/bash
# The wheel that "make wheel" makes: its platform and contents. pip installs it into an environment
# in which neither this machine's libvmem nor the libraries it is built with can be found. Also
# pip's answer outside of an environment.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
build=$(realpath "${BUILD:-build}"); work=$(mktemp -d "${TMPDIR:-/var/tmp}/vmem-wheel.XXXXXX"); trap 'rm -rf "$work"' EXIT
passed=0 failed=0 skipped=0
cache=${VMEM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/vmem}
unset "${!VMEM_@}" PYTHONPATH LD_LIBRARY_PATH
export PIP_NO_INDEX=1 PIP_DISABLE_PIP_VERSION_CHECK=1
step() {  # step NAME COMMAND..: 0 passes, 77 skips (the last line of output says why)
  local name=$1 said status; shift
  said=$("$@" 2>&1); status=$?
  case $status in
    0) passed=$((passed + 1)); echo "ok   $name" ;;
    77) skipped=$((skipped + 1)); echo "skip $name"; echo "skipped: $(tail -1 <<<"$said")" ;;
    *) failed=$((failed + 1)); echo "FAIL $name"; tail -30 <<<"$said" | sed 's/^/       | /' ;;
  esac
}

make BUILD="${BUILD:-build}" NO_SETUP=1 wheel >"$work/log" 2>&1 || { cat "$work/log"; echo "make wheel failed"; exit 1; }
wheel=$(echo "$build"/wheel/*.whl)
python=''
for each in python3 /usr/bin/python3; do "$each" -c 'import venv, ensurepip' 2>/dev/null && { python=$each; break; }; done
unpack() { python3 -m zipfile -e "$wheel" "$work/unpacked"; }

# Checks the promise of the file name: every C library symbol that a library in the wheel needs is
# as old as that, and all its other needs are in the wheel.
platform() {
  local library need version
  [[ $wheel =~ -manylinux_([0-9]+)_([0-9]+)_x86_64\.whl$ ]] || { echo "$wheel: no manylinux wheel: $(cat "$work/log")"; return 1; }
  version=${BASH_REMATCH[1]}.${BASH_REMATCH[2]}
  for library in "$work"/unpacked/vmem/*.so*; do
    for need in $(readelf -d "$library" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p'); do
      case $need in libc.so.6 | libm.so.6 | libdl.so.2 | librt.so.1 | libpthread.so.0 | ld-linux-x86-64.so.2) ;;
        *) [ -e "$work/unpacked/vmem/$need" ] || { echo "$library needs $need"; return 1; } ;; esac
    done
    for need in $(readelf -V "$library" | grep -oE 'GLIBC_[0-9.]+' | sort -u); do
      [ "$(printf '%s\n' "${need#GLIBC_}" "$version" | sort -V | tail -1)" = "$version" ] || { echo "$library needs $need, the wheel says $version"; return 1; }
    done
  done
}
# Uses the auditwheel that auditwheel.txt pins, kept with other downloads, with the Python that can
# make environments.
auditor=$cache/auditwheel-$(sha256sum tests/python/auditwheel.txt | cut -c1-12)
fetch_auditwheel() {
  local fresh
  mkdir -p "$cache" && fresh=$(mktemp -d "$cache/.auditwheel-XXXXXX") || return 1
  "$python" -m venv "$work/audit" && env -u PIP_NO_INDEX timeout -k 5 "$((60 * ${TEST_PATIENCE:-1}))" "$work/audit/bin/python" -m pip install --quiet --retries 1 \
    --require-hashes --only-binary :all: --target "$fresh" -r tests/python/auditwheel.txt && mv -T "$fresh" "$auditor" || { rm -rf "$fresh"; [ -d "$auditor" ]; }
}
audit() {
  local said
  [ -n "$python" ] || { echo "no Python that makes virtual environments (python3-venv)"; return 77; }
  [ -d "$auditor" ] || said=$(fetch_auditwheel 2>&1) || { echo "auditwheel cannot be fetched: $(tail -1 <<<"$said")"; return 77; }
  said=$(PYTHONPATH=$auditor "$python" -m auditwheel show "$wheel" 2>&1) || { echo "$said"; return 1; }
  tr -s ' \n' ' ' <<<"$said" | grep -qF "platform tag: \"$(grep -oE 'manylinux_[0-9]+_[0-9]+_x86_64' <<<"${wheel##*/}")\"" || { echo "$said"; return 1; }
}
# The wheel has the licence of every archive that is linked in, and of the library beside it.
licences() {
  local each folder; folder=$(echo "$work"/unpacked/vmem-*.dist-info/licenses)
  [ -s "$folder/LICENSE" ] || { echo "no licence of libvmem"; return 1; }
  [ -d /usr/share/doc/libnuma1 ] || { echo "this system keeps no licences in /usr/share/doc"; return 77; }
  for each in liburing lz4 zstd xxhash numa stdc++ LGPL-2.1; do compgen -G "$folder/*$each*.txt" >/dev/null || { echo "no licence of $each in $folder"; return 1; }; done
}
stranger() { env -i PATH=/usr/bin:/bin HOME="$work" "$work/venv/bin/python" "$@"; }
installed() {
  [ -n "$python" ] || { echo "no Python that makes virtual environments (python3-venv)"; return 77; }
  "$python" -m venv "$work/venv" && "$work/venv/bin/python" -m pip install --quiet "$wheel" && cd "$work" && stranger - <<'P'
import os, vmem
from vmem import _lib
here = os.path.dirname(vmem.__file__)
mapped = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
assert os.path.join(here, "libvmem-tier.so.1") in mapped, mapped
# for the other needs see platform(); Python brings its own zstd
assert os.path.join(here, "libnuma.so.1") in mapped, mapped
vmem.configure(device="none", host_budget="32MiB")
with vmem.alloc("64MiB") as region:
    view = region.memoryview()
    for at in range(0, 64 << 20, 1 << 20): view[at] = at >> 20
    region.evict()
    assert all(view[at] == at >> 20 for at in range(0, 64 << 20, 1 << 20))
    del view
try:
    vmem.set("no_such_setting", "1")
except vmem.Error as e:
    page = os.path.join(here, "docs", "settings.md")
    assert page in e.strerror and os.path.exists(page), e.strerror
else:
    raise SystemExit("a setting that does not exist was taken")
P
}
# The page quotes the answer of Debian and Ubuntu outside of an environment.
outside() {
  local marked said
  marked=$(compgen -G '/usr/lib/python3*/EXTERNALLY-MANAGED') || { echo "this system lets pip install outside of environments"; return 77; }
  /usr/bin/python3 -m pip --version >/dev/null 2>&1 || { echo "the system's Python has no pip (python3-pip)"; return 77; }
  said=$(env -u VIRTUAL_ENV -u PIP_BREAK_SYSTEM_PACKAGES PIP_CONFIG_FILE=/dev/null /usr/bin/python3 -m pip install --dry-run "$wheel" 2>&1) && { echo "pip installs it ($marked): $said"; return 1; }
  grep -q externally-managed-environment <<<"$said" && grep -q externally-managed-environment docs/python.md || { echo "$said"; return 1; }
}

step "the wheel can be unpacked" unpack
step "its name says what system it needs" platform
step "auditwheel says the same" audit
step "the licences of what is in it" licences
step "installed by pip in a virtual environment, it works with nothing else there" installed
step "outside of one pip answers what the page says" outside
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ]
