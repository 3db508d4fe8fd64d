#!/bin/bash
# If neither userfaultfd nor its device is allowed (Docker's default), the library says so and how
# to enable it.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
build=${BUILD:-build}
exec scripts/vm/run-guest.sh --kernel "${1:-6.12}" --user nobody --only-container --file "$build/examples/hello:/bin/hello" --label container-refused \
  -- sh -c 'out=$(hello 2>&1) && { echo "hello ran where nothing traps"; exit 1; }; echo "$out"; echo "$out" | grep -q userfaultfd'
