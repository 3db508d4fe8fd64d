// What a forked child must not keep. Until it calls exec, a child has every descriptor of its parent's: with it a file
// lock, or the disk space of a file without a name, would outlive the parent for as long as the child runs.
#pragma once

namespace vmem::core {

// Closed in every child that fork() makes from now on; not in one that vfork, posix_spawn or clone made, which is about
// to call exec. Without memory for a note of it (one in 64 needs any) the child keeps it.
void close_in_children(int fd);
// Before the descriptor is closed.
void forget_in_children(int fd);

}  // namespace vmem::core
