#include "store/file_checks.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <linux/stat.h>
#include <sys/ioctl.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <optional>

#include "core/text.h"

namespace vmem::store {

namespace {

using FileSystemType = decltype(statfs::f_type);

// File systems that make a file's bytes as they are read. Some names are newer than the headers.
struct Pseudo {
  FileSystemType type;
  const char* name;
};
constexpr Pseudo kPseudo[] = {
    {SYSFS_MAGIC, "sysfs"},
    {PROC_SUPER_MAGIC, "proc"},
    {CGROUP_SUPER_MAGIC, "cgroup"},
    {CGROUP2_SUPER_MAGIC, "cgroup2"},
    {DEBUGFS_MAGIC, "debugfs"},
    {TRACEFS_MAGIC, "tracefs"},
    {SECURITYFS_MAGIC, "securityfs"},
    {SELINUX_MAGIC, "selinuxfs"},
    {SMACK_MAGIC, "smackfs"},
    {0x5a3c69f0, "apparmorfs"},
    {0x62656570, "configfs"},
    {BPF_FS_MAGIC, "bpf"},
    {PSTOREFS_MAGIC, "pstore"},
    {0xde5e81e4, "efivarfs"},
    {BINFMTFS_MAGIC, "binfmt_misc"},
    {DEVPTS_SUPER_MAGIC, "devpts"},
    {NSFS_MAGIC, "nsfs"},
    {0x50494446, "pidfs"},
    {0x19800202, "mqueue"},
    {0x7655821, "resctrl"},
    {0x6c6f6f70, "binder"},
    {0x65735543, "fusectl"},
    {0x6e667364, "nfsd"},
    {0x67596969, "rpc_pipefs"},
    {0xabba1974, "xenfs"},
    {0x5345434d, "secretmem"},
    {0x474d454d, "guest_memfd"},
    {0x444d4142, "dma-buf"},
    {ANON_INODE_FS_MAGIC, "anon_inodefs"},
};

// File systems that report true sizes.
constexpr FileSystemType kHonest[] = {EXT4_SUPER_MAGIC, XFS_SUPER_MAGIC, BTRFS_SUPER_MAGIC,
                                      TMPFS_MAGIC,      RAMFS_MAGIC,     HUGETLBFS_MAGIC};

#if !defined(F_SEAL_FUTURE_WRITE)
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

unsigned long long number(uint64_t n) {
  return n;
}

core::Status check_seals(const std::string& path, int fd, const struct stat& st, const FileUse& use) {
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0) return {};  // it cannot be sealed
  if (use.write && (seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE)) != 0) {
    return core::error(EPERM,
                       "%s is sealed against writing (%s): changes could not reach it. Map it with VMEM_MAP_READ or "
                       "VMEM_MAP_PRIVATE, or a file without this seal.",
                       path.c_str(), (seals & F_SEAL_WRITE) != 0 ? "F_SEAL_WRITE" : "F_SEAL_FUTURE_WRITE");
  }
  const auto size = static_cast<uint64_t>(st.st_size);
  if ((seals & F_SEAL_GROW) != 0 && use.end > size) {
    return core::error(
        EINVAL,
        "%s has %llu bytes and is sealed against growing (F_SEAL_GROW): it can never have the %llu bytes "
        "that offset + size need. Map no more than it has.",
        path.c_str(), number(size), number(use.end));
  }
  return {};
}

// The size is untrue if a read finds nothing at the last byte, or something behind it, and the size
// has not changed.
core::Status check_size(const std::string& path, int fd, const struct stat& st) {
  char byte = 0;
  const off_t at = st.st_size == 0 ? 0 : st.st_size - 1;
  const ssize_t n = pread(fd, &byte, 1, at);
  if (n < 0 && errno == ESPIPE) {
    return core::error(EINVAL, "%s cannot be read from any place in it (ESPIPE): copy it to a file that can",
                       path.c_str());
  }
  struct stat now {};
  if (n < 0 || (n == 0) == (st.st_size == 0) || fstat(fd, &now) != 0 || now.st_size != st.st_size) return {};
  return core::error(EINVAL,
                     "%s says that it has %llu bytes, and a read at byte %llu returns %zd: it is made as it is read. "
                     "Read it with read(2), or copy it to a file.",
                     path.c_str(), number(static_cast<uint64_t>(st.st_size)), number(static_cast<uint64_t>(at)), n);
}

// An empty write meets the same errors as any other, and changes nothing.
core::Status check_writable(const std::string& path, int fd) {
  if (pwrite(fd, "", 0, 0) == 0 || errno == EINTR || errno == EAGAIN) return {};
  if (errno == ETXTBSY) {
    return core::error(ETXTBSY,
                       "%s is an active swap file: the kernel keeps its pages in it (/proc/swaps). Run swapoff on it "
                       "before, or map another file.",
                       path.c_str());
  }
  return core::system_error(errno, "%s is open for writing, and takes no write", path.c_str());
}

core::Status check_file_system(const std::string& path, const struct stat& st, FileSystemType type, bool write) {
  const auto* const pseudo =
      std::find_if(std::begin(kPseudo), std::end(kPseudo), [&](const Pseudo& p) { return p.type == type; });
  if (pseudo != std::end(kPseudo)) {
    return core::error(EINVAL,
                       "%s is on %s, a file system of the kernel's own that makes a file as it is read: its size, %llu "
                       "bytes, says nothing. Read it with read(2), or copy it to a file.",
                       path.c_str(), pseudo->name, number(static_cast<uint64_t>(st.st_size)));
  }
  if (type == HUGETLBFS_MAGIC && write) {
    return core::error(EINVAL,
                       "%s consists of huge pages (hugetlbfs, or memfd_create with MFD_HUGETLB), which take no "
                       "write(2): changes could not reach it. Map it with VMEM_MAP_READ or VMEM_MAP_PRIVATE.",
                       path.c_str());
  }
  return {};
}

// A lock, such as "FLOCK WRITE", from a line of /proc/locks or of an fdinfo. Empty if the line does
// not parse, as for a lock that waits.
struct LockLine {
  std::string kind, access;
  long pid = 0;
  unsigned major_number = 0, minor_number = 0;
  unsigned long long inode = 0;
};
std::optional<LockLine> parse_lock(const char* line) {
  char kind[16], mode[16], access[16];
  LockLine lock;
  if (sscanf(line, "%*d: %15s %15s %15s %ld %x:%x:%llu", kind, mode, access, &lock.pid, &lock.major_number,
             &lock.minor_number, &lock.inode) != 7)
    return {};
  lock.kind = kind;
  lock.access = access;
  return lock;
}

// Returns the first flock that this process holds on the file through a descriptor of its own.
// POSIX locks do not conflict with a flock.
struct OwnLock {
  int fd;
  LockLine lock;
};
std::optional<OwnLock> find_own_lock(const struct stat& st) {
  struct Close {
    void operator()(DIR* folder) const { closedir(folder); }
  };
  const std::unique_ptr<DIR, Close> folder(opendir("/proc/thread-self/fdinfo"));
  if (folder == nullptr) return {};
  while (const dirent* const entry = readdir(folder.get())) {
    char* rest = nullptr;
    const long fd = strtol(entry->d_name, &rest, 10);
    struct stat its {};
    if (rest == entry->d_name || fstat(static_cast<int>(fd), &its) != 0 || its.st_dev != st.st_dev ||
        its.st_ino != st.st_ino)
      continue;
    std::ifstream info("/proc/thread-self/fdinfo/" + std::string(entry->d_name));
    for (std::string line; std::getline(info, line);) {
      if (line.rfind("lock:", 0) != 0) continue;
      const std::optional<LockLine> lock = parse_lock(line.c_str() + strlen("lock:"));
      if (lock && lock->kind == "FLOCK") return OwnLock{static_cast<int>(fd), *lock};
    }
  }
  return {};
}

template <typename F>
std::optional<LockLine> find_lock(const F& wanted) {
  std::ifstream locks("/proc/locks");
  for (std::string line; std::getline(locks, line);) {
    std::optional<LockLine> lock = parse_lock(line.c_str());
    if (lock && wanted(*lock)) return lock;
  }
  return {};
}

// Returns why the file system lets no process change the file, or null if it gives no reason.
const char* unchangeable(const std::string& path) {
  struct statx sx {};
  if (statx(AT_FDCWD, path.c_str(), 0, STATX_BASIC_STATS, &sx) != 0) return nullptr;
  if ((sx.stx_attributes & STATX_ATTR_IMMUTABLE) != 0) return "immutable (chattr -i makes it an ordinary one)";
  if ((sx.stx_attributes & STATX_ATTR_APPEND) != 0) return "append-only (chattr -a makes it an ordinary one)";
#if defined(STATX_ATTR_VERITY)
  if ((sx.stx_attributes & STATX_ATTR_VERITY) != 0) return "under fs-verity";
#endif
  return nullptr;
}

}  // namespace

core::Status check_mappable(const std::string& path, int fd, const struct stat& st, const FileUse& use) {
  struct statfs fs {};
  if (fstatfs(fd, &fs) != 0) return core::system_error(errno, "cannot examine %s", path.c_str());
  if (!S_ISBLK(st.st_mode)) {
    if (core::Status s = check_file_system(path, st, fs.f_type, use.write); !s.ok()) return s;
    if (core::Status s = check_seals(path, fd, st, use); !s.ok()) return s;
    if (std::find(std::begin(kHonest), std::end(kHonest), fs.f_type) == std::end(kHonest)) {
      if (core::Status s = check_size(path, fd, st); !s.ok()) return s;
    }
  }
  return use.write ? check_writable(path, fd) : core::Status();
}

core::Status cannot_open(const std::string& path, const struct stat& st, bool write, int error) {
  const char* const name = path.c_str();
  if (error == EBUSY && S_ISBLK(st.st_mode)) return core::error(EBUSY, "block device %s is mounted or in use", name);
  if (error == EAGAIN) {
    return core::error(
        EBUSY,
        "%s cannot be opened: a process holds a lease of it (fcntl with F_SETLEASE, a line with LEASE in "
        "/proc/locks) and has not given it up when it was asked to. Try again, or end that lease.",
        name);
  }
  if (const char* const why = error == EPERM && write ? unchangeable(path) : nullptr; why != nullptr) {
    return core::error(
        EPERM,
        "%s is %s: changes could not reach it. Map it with VMEM_MAP_READ or VMEM_MAP_PRIVATE, or another "
        "file.",
        name, why);
  }
  const char* const hint = !write             ? ""
                           : error == EROFS   ? ", its file system is mounted read-only"
                           : error == ETXTBSY ? ", a process runs it as a program"
                           : (error == EACCES || error == EPERM) && S_ISBLK(st.st_mode)
                               ? " (is the device read-only? blockdev --getro)"
                               : "";
  return core::system_error(error, "cannot open %s for %s%s", name, write ? "reading and writing" : "reading", hint);
}

core::Status lock_refused(const std::string& path, const struct stat& st) {
  if (const std::optional<OwnLock> own = find_own_lock(st)) {
    return core::error(EBUSY,
                       "%s is locked by this process itself: %s %s through descriptor %d. End that lock before, or say "
                       "by VMEM_NO_LOCK that the region needs none of its own.",
                       path.c_str(), own->lock.kind.c_str(), own->lock.access.c_str(), own->fd);
  }
  const std::optional<LockLine> other = find_lock([&](const LockLine& lock) {
    return lock.kind == "FLOCK" && lock.inode == st.st_ino && lock.major_number == major(st.st_dev) &&
           lock.minor_number == minor(st.st_dev);
  });
  if (!other || other->pid <= 0) {
    return core::error(EBUSY, "%s is in use: another process, or a store, holds its lock. Give each its own file.",
                       path.c_str());
  }
  std::string name;
  std::ifstream comm("/proc/" + std::to_string(other->pid) + "/comm");
  std::getline(comm, name);
  return core::error(EBUSY, "%s is in use: process %ld%s%s%s holds its lock (%s %s). Give each its own file.",
                     path.c_str(), other->pid, name.empty() ? "" : " (", core::printable(name).c_str(),
                     name.empty() ? "" : ")", other->kind.c_str(), other->access.c_str());
}

bool has_own_posix_lock(int fd, const struct stat& st) {
  // An OFD lock conflicts with POSIX locks of its own process too. Usually there are none.
  struct flock first = {};
  first.l_type = F_WRLCK;
  first.l_whence = SEEK_SET;
  const long own = getpid();
  if (fcntl(fd, F_OFD_GETLK, &first) == 0) {
    if (first.l_type == F_UNLCK) return false;
    if (first.l_pid == own) return true;
  }
  // The first conflict is another process's, and ours may follow. Match inodes only: device numbers
  // here are not always those of stat(2).
  std::ifstream locks("/proc/locks");
  if (!locks) return true;
  for (std::string line; std::getline(locks, line);) {
    const std::optional<LockLine> lock = parse_lock(line.c_str());
    if (lock && lock->kind == "POSIX" && lock->pid == own && lock->inode == st.st_ino) return true;
  }
  return locks.bad();
}

bool may_be_sealed(int fd) {
  const int seals = fcntl(fd, F_GET_SEALS);
  return seals >= 0 && (seals & F_SEAL_SEAL) == 0;
}

}  // namespace vmem::store
