#!/bin/bash
# once.sh DEPS COMMAND..: runs COMMAND, unless it has passed before on the same contents: of the files that DEPS names (what a
# compiler's -MMD writes), of .clang-tidy, of the tool's version, and of the words themselves. What passed is remembered in
# ${VMEM_CACHE:-~/.cache/vmem}/passed, for all checkouts. CHECK_SYSTEM is a word for the headers of the system, which DEPS does not
# name (check.sh sets it); without it nothing is remembered.
set -uo pipefail
deps=$1; shift
cache=${VMEM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/vmem}/passed mark=''
if [ -n "${CHECK_SYSTEM:-}" ] && [ -s "$deps" ]; then
  # Without the target, and the empty rules for headers that may go.
  mapfile -t files < <(sed 's/\\$//' "$deps" | sed '1s/^[^:]*://; /^[^ ]*:$/d' | tr -s ' ' '\n' | grep .)
  if sums=$(sha256sum -- "${files[@]}" .clang-tidy 2>/dev/null); then
    mark=$cache/$({ echo "$CHECK_SYSTEM"; "$1" --version; printf '%s\n' "$@" "$sums"; } | sha256sum | cut -c1-40)
  fi
fi
if [ -n "$mark" ] && [ -e "$mark" ]; then touch "$mark"; exit 0; fi
"$@" || exit
[ -z "$mark" ] || { mkdir -p "$cache" && touch "$mark"; }
