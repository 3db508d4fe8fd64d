#!/bin/bash
# container-profile.sh DEFAULT.json: prints Docker's default seccomp profile with userfaultfd and
# io_uring allowed.
#
# DEFAULT.json is profiles/seccomp/default.json of the Moby project, in the version of your Docker.
# Then:
#   docker run --security-opt seccomp=vmem.json ..
# io_uring was removed from the default because of kernel bugs that reached the host: allow it on
# kernels you keep current.
set -euo pipefail
command -v jq >/dev/null || { echo "container-profile: needs jq" >&2; exit 1; }
exec jq '.syscalls += [{"names": ["userfaultfd", "io_uring_setup", "io_uring_enter", "io_uring_register"], "action": "SCMP_ACT_ALLOW"}]' \
  "${1:?usage: container-profile.sh DEFAULT.json >vmem.json}"
