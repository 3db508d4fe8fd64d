// What a forked child must not keep. Until it calls exec, a child has every descriptor of its parent's: with it a file
// lock, or the disk space of a file without a name, would outlive the parent for as long as the child runs. And a child
// that gave up its rights could do to its parent's memory what the descriptor allows: a userfaultfd fills absent pages.
// So this is for each descriptor that the library keeps.
#pragma once

namespace vmem::core {

// Closed in every child that fork() makes from now on; not in one that vfork, posix_spawn or clone made, which is about
// to call exec. Without memory for a note of it (one in 64 needs any) the child keeps it.
void close_in_children(int fd);
// The same, for what open() and its like return: -1 is no descriptor. Returns fd, above_standard().
int keep_from_children(int fd);
// Before the descriptor is closed.
void forget_in_children(int fd);
// Both; of -1 nothing.
void close_and_forget(int fd);

// Remembers that this process is the one. Before the first thread; again in a child that begins anew.
void mark_this_process();
// In a child of the one that was marked: also of a raw fork or clone system call, or of _Fork(), where no handler of
// ours runs. Not in one that has its parent's memory (vfork).
bool in_child();
// fork() made this process from one that was marked, or from a child of one: what that had is in memory still.
bool has_parents_state();

}  // namespace vmem::core
