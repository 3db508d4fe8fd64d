#!/bin/bash
# nightly.sh [LANE..]: .ci/run with the long forms of the tests, and what is too long for it (its lane "night"). Hours.
exec env VMEM_LONG=1 "$(dirname "$0")/../.ci/run" "$@"
