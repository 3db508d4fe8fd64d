#include "publish/place.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string_view>
#include <utility>

#include "core/process/user.h"
#include "publish/layout.h"
#include "publish/lookup.h"

namespace vmem::publish {

using core::error;
using core::Status;
using core::system_error;

namespace {

constexpr time_t kUnfinished = 60;  // seconds after which a file without its final name is removed

bool owned_folder(const std::string& path, uid_t owner) {
  Fd place;
  struct stat s {};
  return open_folder_place(path, &place).ok() && fstat(place.get(), &s) == 0 && S_ISDIR(s.st_mode) && s.st_uid == owner;
}

constexpr std::string_view kNew = ".new-", kSocket = ".sock";

// Lists the names of the folder's first kMaxEntries entries.
Status entries(int folder, std::vector<std::string>* names) {
  names->clear();
  // Uses a descriptor of its own: reading moves the position.
  const int again = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR* dir = again >= 0 ? fdopendir(again) : nullptr;
  if (dir == nullptr) {
    const int err = errno;
    if (again >= 0) close(again);
    return system_error(err, "cannot read the folder of publications");
  }
  for (const dirent* entry; names->size() < kMaxEntries && (entry = readdir(dir)) != nullptr;)
    names->emplace_back(entry->d_name);
  closedir(dir);
  return {};
}

// Returns whether a publisher made the file: it begins like a publication, or holds the zeros from
// before the first write.
bool is_publication(int file) {
  struct stat s {};
  if (fstat(file, &s) != 0 || s.st_nlink != 1 || (s.st_mode & 077) != 0) return false;
  char first[sizeof kMagic] = {}, none[sizeof kMagic] = {};
  const ssize_t n = pread(file, first, sizeof first, 0);
  if (n == sizeof first && memcmp(first, kMagic, sizeof first) == 0) return true;
  return n >= 0 && (s.st_size == 0 || s.st_size == sizeof(Header)) && memcmp(first, none, sizeof first) == 0;
}

bool is_dead_publication(int folder, const std::string& name, uid_t owner) {
  Fd file;
  return open_file(folder, name, owner, &file).ok() && !is_alive(file.get()) && is_publication(file.get());
}

bool is_socket_of(int folder, const std::string& name, uid_t owner, bool old) {
  struct stat s {};
  return fstatat(folder, name.c_str(), &s, AT_SYMLINK_NOFOLLOW) == 0 && S_ISSOCK(s.st_mode) && s.st_uid == owner &&
         (!old || s.st_mtime + kUnfinished < time(nullptr));
}

}  // namespace

std::vector<std::string> folders(uid_t user, const char* runtime_dir) {
  std::vector<std::string> out;
  if (runtime_dir != nullptr && runtime_dir[0] == '/' && owned_folder(runtime_dir, user))
    out.push_back(std::string(runtime_dir) + "/vmem");
  // The user's number as seen by the system that makes these folders.
  const std::string number = std::to_string(core::uid_outside(user)), run = "/run/user/" + number;
  if (owned_folder(run, user) && (out.empty() || out[0] != run + "/vmem")) out.push_back(run + "/vmem");
  out.push_back("/dev/shm/vmem-" + number);
  return out;
}

Status open_folder(const std::string& path, uid_t owner, bool make, Fd* out) {
  if (!core::is_one_user(owner)) {
    return error(EACCES, "user %u stands for users that have no number in this user namespace: %s is not used", owner,
                 path.c_str());
  }
  const Path parts(path);
  Fd parent, place;
  if (Status status = open_folder_place(parts.folder, &parent); !status.ok()) return status;
  if (make && mkdirat(parent.get(), parts.name.c_str(), 0700) != 0 && errno != EEXIST)
    return system_error(errno, "cannot make %s", path.c_str());
  if (Status status = open_folder_place(parent.get(), parts.name, &place); !status.ok())
    return error(-status.code(), "%s: %s", path.c_str(), std::string(status.text()).c_str());
  struct stat s {};
  if (fstat(place.get(), &s) != 0) return system_error(errno, "cannot look at %s", path.c_str());
  if (!S_ISDIR(s.st_mode)) return error(EACCES, "%s is a symbolic link, or no folder: it is not used", path.c_str());
  if (s.st_uid != owner) {
    return error(EACCES, "%s belongs to user %u, not to user %u: it is not used", path.c_str(), s.st_uid, owner);
  }
  Fd fd(openat(place.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) return system_error(errno, "cannot open %s", path.c_str());
  if (make && (s.st_mode & 077) != 0 && fchmod(fd.get(), 0700) != 0)
    return system_error(errno, "%s is open to others and cannot be closed", path.c_str());
  *out = std::move(fd);
  return {};
}

bool is_name(const std::string& name) {
  const size_t dash = name.find('-');
  if (dash == std::string::npos || dash == 0 || name.size() != dash + 17) return false;
  for (size_t i = 0; i < name.size(); ++i) {
    const auto c = static_cast<unsigned char>(name[i]);
    if (i != dash && (i < dash ? std::isdigit(c) : std::isxdigit(c)) == 0) return false;
  }
  return true;
}

std::string socket_name(const std::string& name) {
  return name + std::string(kSocket);
}

Status list(int folder, std::vector<std::string>* names) {
  Status s = entries(folder, names);
  std::erase_if(*names, [](const std::string& name) { return !is_name(name); });
  return s;
}

Status open_file(int folder, const std::string& name, uid_t owner, Fd* out) {
  Fd place;
  if (Status status = open_entry_place(folder, name, &place); !status.ok()) return status;
  struct stat s {};
  if (fstat(place.get(), &s) != 0) return system_error(errno, "cannot look at publication %s", name.c_str());
  if (!S_ISREG(s.st_mode) || s.st_uid != owner)
    return error(EACCES, "publication %s is no file of user %u: it is not read", name.c_str(), owner);
  Fd fd(open(("/proc/thread-self/fd/" + std::to_string(place.get())).c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  if (!fd) return system_error(errno, "cannot open publication %s", name.c_str());
  *out = std::move(fd);
  return {};
}

bool mark_alive(int file) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  return fcntl(file, F_OFD_SETLK, &lock) == 0;
}

bool is_alive(int file) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  return fcntl(file, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

Status open_socket(int folder, const std::string& name, uid_t owner, Fd* out) {
  Fd fd;
  if (Status status = open_entry_place(folder, socket_name(name), &fd); !status.ok()) return status;
  struct stat s {};
  if (fstat(fd.get(), &s) != 0) return system_error(errno, "cannot look at the socket of publication %s", name.c_str());
  if (!S_ISSOCK(s.st_mode) || s.st_uid != owner)
    return error(EACCES, "%s is no socket of user %u", socket_name(name).c_str(), owner);
  *out = std::move(fd);
  return {};
}

std::string socket_path(const Fd& socket) {
  return "/proc/thread-self/fd/" + std::to_string(socket.get());
}

size_t sweep(int folder, uid_t owner) {
  struct stat s {};
  if (fstat(folder, &s) != 0 || s.st_uid != owner || (s.st_mode & 077) != 0) return 0;
  std::vector<std::string> names;
  if (!entries(folder, &names).ok()) return 0;
  size_t removed = 0;
  for (const std::string& name : names) {
    if (is_name(name)) {
      if (!is_dead_publication(folder, name, owner)) continue;
      if (is_socket_of(folder, socket_name(name), owner, false)) unlinkat(folder, socket_name(name).c_str(), 0);
      unlinkat(folder, name.c_str(), 0);
      ++removed;
    } else if (name.starts_with(kNew) && is_name(name.substr(kNew.size()))) {
      if (fstatat(folder, name.c_str(), &s, AT_SYMLINK_NOFOLLOW) == 0 && s.st_mtime + kUnfinished < time(nullptr) &&
          is_dead_publication(folder, name, owner))
        unlinkat(folder, name.c_str(), 0);
    } else if (name.ends_with(kSocket)) {  // its file was removed by another program
      const std::string file = name.substr(0, name.size() - kSocket.size());
      if (is_name(file) && faccessat(folder, file.c_str(), F_OK, AT_SYMLINK_NOFOLLOW) != 0 &&
          is_socket_of(folder, name, owner, true))
        unlinkat(folder, name.c_str(), 0);
    }
  }
  return removed;
}

uint64_t pid_namespace() {
  struct stat s {};
  return stat("/proc/thread-self/ns/pid", &s) == 0 ? s.st_ino : 0;
}

uint64_t start_ticks(pid_t pid) {
  FILE* f = fopen(("/proc/" + (pid != 0 ? std::to_string(pid) : "self") + "/stat").c_str(), "re");
  if (f == nullptr) return 0;
  char text[1024];
  const size_t n = fread(text, 1, sizeof text - 1, f);
  fclose(f);
  text[n] = '\0';
  // The command, in parentheses, may hold any text; after its last parenthesis comes field 3.
  const char* at = strrchr(text, ')');
  for (int field = 2; at != nullptr && field < 22; ++field) at = strchr(at + 1, ' ');
  return at != nullptr ? strtoull(at + 1, nullptr, 10) : 0;
}

std::string short_path(int folder, const std::string& name) {
  return "/proc/thread-self/fd/" + std::to_string(folder) + "/" + name;
}

}  // namespace vmem::publish
