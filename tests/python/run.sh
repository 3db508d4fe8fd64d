#!/bin/bash
# The Python package's tests with the library of this build, on the host tiers and the simulated
# device.
#   run.sh [PYTEST ARGUMENTS..]
# The interpreter is VMEM_PYTHON, or the first of python3 and /usr/bin/python3 that has pytest; one
# with torch is preferred.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
build=$(realpath "${BUILD:-build}")
[ -e "$build/sim/libvmem.so" ] || { echo "$build/sim/libvmem.so is not built: make build-tests"; exit 1; }
find_python() {
  local modules candidate
  for modules in "pytest, numpy, torch" "pytest, numpy" pytest; do
    for candidate in ${VMEM_PYTHON:-python3 /usr/bin/python3}; do
      "$candidate" -c "import $modules" 2>/dev/null && { echo "$candidate"; return; }
    done
  done
}
python=$(find_python)
[ -n "$python" ] || { echo "skipped: no Python with pytest (python3-pytest)"; exit 77; }
export VMEM_LIBRARY=$build/sim/libvmem.so PYTHONPATH=$PWD/python PYTHONDONTWRITEBYTECODE=1 BUILD=$build
unset VMEM_DEVICE VMEM_HOST_BUDGET VMEM_DEVICE_BUDGET
# Use one thread: with two cores and small matrices, more threads only wait for each other.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$python" -m pytest -p no:cacheprovider -q "$@" tests/python
