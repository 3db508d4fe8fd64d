#include "publish/lookup.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <linux/openat2.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <utility>

namespace vmem::publish {

using core::error;
using core::Status;
using core::system_error;

namespace {

#ifndef RESOLVE_CACHED
#define RESOLVE_CACHED 0x20  // Linux 5.12
#endif

constexpr int kPlace = O_PATH | O_NOFOLLOW | O_CLOEXEC;
constexpr int kTries = 8;  // a rename anywhere may make a lookup fail

constexpr long kUntold = -1, kUnknown = -2;  // the kernel does not tell; it could not be asked now

// Returns the number of the mount of a place. Asks no file system.
long mount_of(int place) {
  FILE* const file = fopen(("/proc/thread-self/fdinfo/" + std::to_string(place)).c_str(), "re");
  if (file == nullptr) return errno == ENOENT ? kUntold : kUnknown;
  char line[128];
  long id = kUntold;
  while (id == kUntold && fgets(line, sizeof line, file) != nullptr) {
    if (strncmp(line, "mnt_id:", 7) == 0) id = strtol(line + 7, nullptr, 10);
  }
  fclose(file);
  return id;
}

// Returns the type of a mount's file system; "" if the mount is not visible.
std::string kind_of(long mount) {
  std::string kind;
  FILE* const file = fopen("/proc/thread-self/mountinfo", "re");
  if (file == nullptr) return kind;
  char* line = nullptr;
  size_t room = 0;
  while (kind.empty() && getline(&line, &room, file) > 0) {
    if (strtol(line, nullptr, 10) != mount) continue;
    const std::string_view text(line);
    if (const size_t at = text.find(" - "); at != std::string_view::npos)
      kind = text.substr(at + 3, text.find(' ', at + 3) - at - 3);
  }
  free(line);
  fclose(file);
  return kind;
}

// Returns whether a user's program serves the file system. If the root's file system is one
// (containers), all of it is accepted.
bool is_on_a_users(int place) {
  const long mount = mount_of(place);
  if (mount == kUntold) return false;
  const Fd root(open("/", O_PATH | O_CLOEXEC));
  if (mount != kUnknown && root && mount == mount_of(root.get())) return false;
  const std::string kind = kind_of(mount);  // "" if it has been unmounted
  return kind.empty() || kind.starts_with("fuse");
}

bool is_in_memory(int folder) {
  struct statfs fs {};
  return fstatfs(folder, &fs) == 0 && fs.f_type == TMPFS_MAGIC;
}

// Opens a name from the kernel's caches, which hold all of a folder in memory. Returns false with
// errno set if they do not have it.
bool open_known(int folder, const char* name, uint64_t resolve, Fd* out) {
  open_how how{};
  how.flags = kPlace;
  how.resolve = resolve | RESOLVE_CACHED;
  for (int i = 0; i < kTries; ++i) {
    *out = Fd(static_cast<int>(syscall(SYS_openat2, folder, name, &how, sizeof how)));
    if (*out || errno != EAGAIN) break;
  }
  if (!*out && errno == EAGAIN && is_in_memory(folder)) errno = ENOENT;
  return static_cast<bool>(*out);
}

// Returns whether openat2 could not answer: it is missing, not permitted (a container's filter), or
// too old.
bool is_no_answer(int err) {
  return err == EAGAIN || err == ENOSYS || err == EPERM || err == EINVAL;
}

}  // namespace

Path::Path(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  const size_t slash = path.rfind('/');
  folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  name = slash == std::string::npos ? path : path.substr(slash + 1);
  if (name.empty()) name = ".";
}

Status open_folder_place(const std::string& path, Fd* out) {
  Fd fd(open(path.c_str(), O_PATH | O_CLOEXEC));
  if (!fd) return system_error(errno, "cannot open %s", path.c_str());
  if (is_on_a_users(fd.get()))
    return error(EXDEV, "%s is on a file system that a user's program serves (FUSE)", path.c_str());
  *out = std::move(fd);
  return {};
}

Status open_folder_place(int folder, const std::string& name, Fd* out) {
  Fd fd;
  if (!open_known(folder, name.c_str(), 0, &fd) && is_no_answer(errno)) fd = Fd(openat(folder, name.c_str(), kPlace));
  if (!fd) return system_error(errno, "cannot open %s", name.c_str());
  if (is_on_a_users(fd.get()))
    return error(EXDEV, "%s is on a file system that a user's program serves (FUSE)", name.c_str());
  *out = std::move(fd);
  return {};
}

Status open_entry_place(int folder, const std::string& name, Fd* out) {
  Fd fd;
  if (!open_known(folder, name.c_str(), RESOLVE_NO_XDEV, &fd) && is_no_answer(errno)) {
    fd = Fd(openat(folder, name.c_str(), kPlace));
    if (fd) {
      const long mount = mount_of(fd.get());
      if (mount == kUnknown || mount != mount_of(folder))
        return error(EXDEV, "something is mounted on %s", name.c_str());
    }
  }
  if (!fd) return system_error(errno, "cannot open %s", name.c_str());
  *out = std::move(fd);
  return {};
}

}  // namespace vmem::publish
