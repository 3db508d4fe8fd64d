#!/bin/bash
# once.sh DEPS COMMAND..: runs COMMAND, unless it passed before with the same inputs: the files that
# DEPS names (a compiler's -MMD output), .clang-tidy, the tool's version, and the command line.
# Passed runs are recorded in ${VMEM_CACHE:-~/.cache/vmem}/passed, for all checkouts. CHECK_SYSTEM
# identifies the system's headers, which DEPS does not name (check.sh sets it); without it nothing
# is recorded.
set -uo pipefail
deps=$1; shift
cache=${VMEM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/vmem}/passed mark=''
if [ -n "${CHECK_SYSTEM:-}" ] && [ -s "$deps" ]; then
  # Drop the target, and the empty rules for headers that may disappear.
  mapfile -t files < <(sed 's/\\$//' "$deps" | sed '1s/^[^:]*://; /^[^ ]*:$/d' | tr -s ' ' '\n' | grep .)
  if sums=$(sha256sum -- "${files[@]}" .clang-tidy 2>/dev/null); then
    mark=$cache/$({ echo "$CHECK_SYSTEM"; "$1" --version; printf '%s\n' "$@" "$sums"; } | sha256sum | cut -c1-40)
  fi
fi
if [ -n "$mark" ] && [ -e "$mark" ]; then touch "$mark"; exit 0; fi
"$@" || exit
[ -z "$mark" ] || { mkdir -p "$cache" && touch "$mark"; }
