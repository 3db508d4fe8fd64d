// Finds folders of publications, checks their owners, and removes publications of dead processes.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "core/status.h"
#include "publish/fd.h"

namespace vmem::publish {

// Returns the folders in which a process of `user` may publish, best first: $XDG_RUNTIME_DIR/vmem
// and /run/user/UID/vmem, if their parent is the user's, and /dev/shm/vmem-UID. In a user namespace
// UID is the user's number outside, where the folders come from. runtime_dir: the variable's value,
// or null.
std::vector<std::string> folders(uid_t user, const char* runtime_dir);

// Opens a folder of publications. `make` creates it (0700) and removes access for others. Follows
// no link at the last component. Asks no file system of a user's program, neither here nor where
// names in the folder are opened (publish/lookup.h). Returns:
// - -EACCES if it is not `owner`'s, if `owner` stands for several users (core::is_one_user), or if
//   it is a symbolic link, which another user may have made;
// - -EXDEV if it is on a file system that a user's program serves.
core::Status open_folder(const std::string& path, uid_t owner, bool make, Fd* out);

// Publications are named PID-RANDOM, never twice the same; the socket beside one is NAME.sock.
bool is_name(const std::string& name);
std::string socket_name(const std::string& name);

// Entries of a folder that are looked at: a user who can write there must not keep a reader busy
// for ever.
inline constexpr size_t kMaxEntries = 4096;

// Lists publications, in any state, among the folder's first kMaxEntries entries. Returns -errno if
// the folder cannot be read.
core::Status list(int folder, std::vector<std::string>* names);

// Opens a publication for reading: a regular file of `owner`, not a link. Returns -ENOENT if it has
// gone, -EXDEV if another file system is mounted on it.
core::Status open_file(int folder, const std::string& name, uid_t owner, Fd* out);

// mark_alive() marks the writer's file while the writer lives; exec and death end the mark.
bool mark_alive(int file);
bool is_alive(int file);

// Opens the socket beside a publication as a place to connect to (socket_path): a socket of
// `owner`, not a link. Returns -ENOENT if there is none, -EACCES if it is another kind of file.
core::Status open_socket(int folder, const std::string& name, uid_t owner, Fd* out);
// Returns the address of a socket that open_socket() opened; no other file can take its place.
std::string socket_path(const Fd& socket);

// Removes only files that dead processes left in the folder, and returns the number of publications
// removed. The folder must be `owner`'s alone (0700). A removed file has our name, kind and owner
// and, if it is a regular file, our first bytes. The caller must be the owner: a writer to a file
// can block its removal for ever.
size_t sweep(int folder, uid_t owner);

// pid_namespace(): inode of this process's pid namespace. start_ticks(): start of a process in
// clock ticks since boot; 0 means this process, also if /proc is that of another pid namespace.
// Both return 0 if unknown.
uint64_t pid_namespace();
uint64_t start_ticks(pid_t pid);

// Returns a path to a name in an open folder that fits a socket address, however long the folder's
// path is.
std::string short_path(int folder, const std::string& name);

}  // namespace vmem::publish
