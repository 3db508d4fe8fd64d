// Users as the kernel shows them here. A user namespace has numbers for some users; all others are shown in it as one
// and the same, the overflow uid (65534), so that being shown as the same user does not mean being the same.
#pragma once

#include <sys/types.h>

namespace vmem::core {

// False: in this process's user namespace whoever has no number there is shown as `user`.
bool is_one_user(uid_t user);

// The number of a user of this process's user namespace in the one in which that was made; the same in the first, and
// for whom neither has a number.
uid_t uid_outside(uid_t user);

// Our number of the user that process `pid`, in a user namespace below ours, has as `user`; UINT32_MAX: there is none.
uid_t uid_of_namespace(pid_t pid, uid_t user);

}  // namespace vmem::core
