#!/bin/bash
# nightly.sh [LANE..]: .ci/run with the long forms of the tests and the lane "night", which is too
# long for CI. Takes hours.
exec env VMEM_LONG=1 "$(dirname "$0")/../.ci/run" "$@"
