#!/bin/bash
exec "$(dirname "$0")/../../scripts/kmod-guest.sh" 6.1
