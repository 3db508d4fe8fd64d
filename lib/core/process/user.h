// Users as the kernel shows them to this process. A user namespace maps some users to numbers and
// shows all others as the overflow uid (65534). So two users shown with the same number may differ.
#pragma once

#include <sys/types.h>

namespace vmem::core {

// False if, in this process's user namespace, users without a number are shown as `user`.
bool is_one_user(uid_t user);

// Maps a user of this process's user namespace to its number in the parent namespace. Returns the
// same number in the first namespace, and for users without a number.
uid_t uid_outside(uid_t user);

// Returns our number of the user that process `pid`, in a user namespace below ours, calls `user`.
// Returns UINT32_MAX if there is none.
uid_t uid_of_namespace(pid_t pid, uid_t user);

}  // namespace vmem::core
