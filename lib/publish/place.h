// Where publications lie, whose they are, and which of them belong to processes that are gone.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "core/descriptor.h"
#include "core/status.h"

namespace vmem::publish {

// A descriptor that closes itself.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(core::above_standard(fd)) {}
  Fd(Fd&& other) noexcept : fd_(other.release()) {}
  Fd& operator=(Fd&& other) noexcept;
  ~Fd() { reset(); }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release();
  void reset();

 private:
  int fd_ = -1;
};

// Folders in which a process of `user` may publish, best first: $XDG_RUNTIME_DIR/vmem, /run/user/UID/vmem, those only
// where their parent is the user's, and /dev/shm/vmem-UID. UID: in a user namespace the number that the user has
// outside of it, whose the folders are there. runtime_dir: the variable's value, or null.
std::vector<std::string> folders(uid_t user, const char* runtime_dir);

// Opens a folder of publications; `make` creates it (0700) and takes access of others away. -EACCES when it is not
// `owner`'s, or when that may be anybody (core::is_one_user), or is a symbolic link: somebody else may have put it
// there; -EXDEV when it is on a file system that a program of a user's answers for. Follows no link at the last
// component. Nothing asks such a file system, here or where names in the folder are opened (publish/lookup.h).
core::Status open_folder(const std::string& path, uid_t owner, bool make, Fd* out);

// Names of publications are PID-RANDOM and never used again; the socket beside one is called NAME.sock.
bool is_name(const std::string& name);
std::string socket_name(const std::string& name);

// Entries of a folder that are looked at: who can write there must not be able to keep a reader busy for ever.
inline constexpr size_t kMaxEntries = 4096;

// Publications among the folder's first kMaxEntries entries, any state; -errno when it cannot be read.
core::Status list(int folder, std::vector<std::string>* names);

// Opens one for reading: a regular file of `owner`, no link. -ENOENT when it has gone, -EXDEV when something is mounted
// on it.
core::Status open_file(int folder, const std::string& name, uid_t owner, Fd* out);

// The writer marks its file for as long as it lives; exec and death end the mark.
bool mark_alive(int file);
bool is_alive(int file);

// Opens the socket beside a publication, as a place to connect to (socket_path): a socket of `owner`, no link. -ENOENT
// when there is none, -EACCES when it is something else.
core::Status open_socket(int folder, const std::string& name, uid_t owner, Fd* out);
// The address of what open_socket opened: nobody can put something else in its place.
std::string socket_path(const Fd& socket);

// Removes what dead processes left in the folder, and nothing else: the folder is `owner`'s alone (0700), and what goes
// has our name, our kind, our owner and, if it is a file, our first bytes. Returns how many publications that were. The
// caller is the owner: who writes to a file can keep whoever removes it waiting for good.
size_t sweep(int folder, uid_t owner);

// Inode of this process's pid namespace; start of a process (0: of this one, also where /proc is that of another pid
// namespace) in clock ticks since boot. 0: unknown, or there is none.
uint64_t pid_namespace();
uint64_t start_ticks(pid_t pid);

// A path by which a name in an open folder fits a socket address, however long the folder's own path is.
std::string short_path(int folder, const std::string& name);

}  // namespace vmem::publish
