// Closes the library's descriptors in forked children. Every descriptor that the library keeps is
// registered here. Until it calls exec, a child has all descriptors of its parent:
//
// - A file lock, or the disk space of an unlinked file, would outlive the parent while the child
//   runs.
// - A child that dropped its privileges could still change its parent's memory: a userfaultfd fills
//   absent pages.
#pragma once

namespace vmem::core {

// Closes fd in every child that fork() makes from now on. Children of vfork, posix_spawn and clone
// keep it; they are about to call exec. If there is no memory for the note (one call in 64 needs
// some), children keep fd.
void close_in_children(int fd);
// Same, for the result of open() or a similar call; accepts -1. Returns fd, moved by
// above_standard().
int keep_from_children(int fd);
// Call before closing the descriptor.
void forget_in_children(int fd);
// Forgets fd and closes it. Does nothing for -1.
void close_and_forget(int fd);

// Marks this process as the owner of the library's state. Call before the first thread starts, and
// again in a child that starts anew.
void mark_this_process();
// True in a child of the marked process, including one made by a raw fork or clone system call or
// by _Fork(), where our handlers do not run. False in a child that shares its parent's memory
// (vfork).
bool in_child();
// True if fork() made this process from a marked one, or from a child of one. The parent's state is
// still in memory.
bool has_parents_state();

}  // namespace vmem::core
