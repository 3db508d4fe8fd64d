#!/bin/bash
# Run this first: it takes half of the suite's time.
exec "$(dirname "$0")/../../scripts/kmod-guest.sh" debug
