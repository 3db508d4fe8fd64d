#!/bin/bash
# lintian reports neither an error nor a warning about the packages, and every override states its
# reason.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
. tests/package/common.sh
need lintian
make_packages

overrides_have_reasons() {
  local file
  for file in packages/deb/*lintian-overrides; do
    awk '/^#/ {reason = 1; next} /^[^ ]/ && !reason {print FILENAME ": no reason stands over \"" $0 "\""; bad = 1} {reason = 0} END {exit bad}' "$file" || return 1
  done
}
# Use Debian's rules on every system: the changelog is for Debian, and Ubuntu's rules do not know
# "unstable".
lint() { lintian --profile debian --allow-root --no-cfg --fail-on error,warning --tag-display-limit 0 --info "$debs"/*.changes; }
step "every override has a reason" overrides_have_reasons
step "lintian: no error, no warning" lint
finish
