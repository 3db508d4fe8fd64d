#!/bin/bash
exec "$(dirname "$0")/../../scripts/kmod-guest.sh" debug
