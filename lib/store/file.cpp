#include "store/file.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "core/break.h"
#include "core/mutex.h"
#include "core/process/descriptor.h"
#include "core/process/fork.h"
#include "core/scope_guard.h"
#include "core/types.h"
#include "store/file_checks.h"
#include "store/open.h"

namespace vmem::store {

namespace {

core::Status check_type(const std::string& path, const struct stat& st) {
  if (S_ISREG(st.st_mode) || S_ISBLK(st.st_mode)) return {};
  if (S_ISDIR(st.st_mode)) {
    return core::error(EISDIR, "%s is a directory: only a regular file or a block device can be mapped", path.c_str());
  }
  const char* const what = S_ISFIFO(st.st_mode)   ? "a FIFO"
                           : S_ISSOCK(st.st_mode) ? "a socket"
                           : S_ISCHR(st.st_mode)  ? "a character device"
                                                  : "of an unknown type";
  return core::error(EINVAL, "%s is %s: only a regular file or a block device can be mapped", path.c_str(), what);
}

core::Status examine(const std::string& path, struct stat* st) {
  if (stat(path.c_str(), st) != 0) return core::system_error(errno, "cannot map %s", path.c_str());
  return check_type(path, *st);
}

// Returns the process's only T. Never destroyed: regions may outlive static objects, and a child
// abandons its parent's.
template <typename T>
T& of_this_process(std::atomic<T*>& at) {
  T* there = at.load();
  if (there != nullptr) return *there;
  auto made = std::make_unique<T>();
  return at.compare_exchange_strong(there, made.get()) ? *made.release() : *there;
}

// Unused descriptors that stay open. Closing one would drop every POSIX lock of this process on its
// file (fcntl(2)), even those taken through the program's own descriptors. A program that closes
// all descriptors may have its own files at these numbers, which are left alone.
struct ParkedFile {
  int fd;
  dev_t device;
  ino_t inode;
  bool is_there() const {
    struct stat st {};
    return fstat(fd, &st) == 0 && st.st_dev == device && st.st_ino == inode;
  }
};
struct Parked {
  core::Mutex mutex;
  std::vector<ParkedFile> files VMEM_GUARDED_BY(mutex);
};
constinit std::atomic<Parked*> parked_here{nullptr};

bool must_stay_open(int fd) try {
  struct stat st {};
  return fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && has_own_posix_lock(fd, st);
} catch (const std::bad_alloc&) {
  return true;
}

void close_file(int fd) {
  Parked& parked = of_this_process(parked_here);
  const core::MutexLock lock(parked.mutex);
  std::erase_if(parked.files, [](const ParkedFile& old) {
    const bool is_there = old.is_there();
    if (is_there && must_stay_open(old.fd)) return false;
    core::forget_in_children(old.fd);
    if (is_there) close(old.fd);
    return true;
  });
  if (must_stay_open(fd)) {
    struct stat st {};
    fstat(fd, &st);
    try {
      parked.files.push_back({fd, st.st_dev, st.st_ino});
    } catch (const std::bad_alloc&) {  // it stays open anyway
    }
    return;
  }
  core::forget_in_children(fd);
  close(fd);
}

// Reuses a parked descriptor of the file, so that a program which maps it repeatedly under a lock
// does not collect them. Returns -1 if there is none, or if open(2) would refuse the file now and
// give the reason.
int take_parked(const std::string& path, const struct stat& st, bool write) {
  Parked& parked = of_this_process(parked_here);
  const core::MutexLock lock(parked.mutex);
  for (auto it = parked.files.begin(); it != parked.files.end(); ++it) {
    const int fd = it->fd, flags = fcntl(fd, F_GETFL);
    if (flags < 0 || (flags & O_ACCMODE) != (write ? O_RDWR : O_RDONLY) || !it->is_there() || it->device != st.st_dev ||
        it->inode != st.st_ino)
      continue;
    if (faccessat(AT_FDCWD, path.c_str(), write ? R_OK | W_OK : R_OK, AT_EACCESS) != 0 ||
        fcntl(fd, F_SETFL, flags & ~O_DIRECT) != 0)
      return -1;
    parked.files.erase(it);
    return fd;
  }
  return -1;
}

// Checks the type before open(), since opening some devices has effects, and again on the
// descriptor, since the name may mean another file by then.
core::Status open_checked(const std::string& path, bool write, struct stat* st, int* fd) {
  int flags = (write ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;
  if (S_ISBLK(st->st_mode) && write) flags |= O_EXCL;  // refused while mounted or claimed
  *fd = take_parked(path, *st, write);
  const bool parked = *fd >= 0;
  for (int tries = 0; !parked; ++tries) {
    *fd = core::above_standard(open(path.c_str(), flags));
    if (*fd >= 0 || errno != EAGAIN || write || tries == kBusyTries) break;
    pause_while_busy();  // another process holds a lease and was asked to give it up; a writer retries later
  }
  if (*fd < 0) return cannot_open(path, *st, write, errno);
  if (fstat(*fd, st) != 0) return core::system_error(errno, "cannot examine %s", path.c_str());
  if (core::Status status = check_type(path, *st); !status.ok()) return status;
  if (!parked) core::close_in_children(*fd);  // before it is locked
  return make_blocking(path, *fd);
}

// Makes fcntl(F_ADD_SEALS) with F_SEAL_WRITE fail with EBUSY, as for any file with a writable
// mapping. Returns null if the file cannot be sealed, or if there is no mapping left.
void* keep_unsealed(int fd) {
  if (!may_be_sealed(fd)) return nullptr;
  void* const page = mmap(nullptr, core::kPage, PROT_NONE, MAP_SHARED, fd, 0);
  if (page == MAP_FAILED) return nullptr;
  madvise(page, core::kPage, MADV_DONTFORK);
  return page;
}

FileUse use_of(const MappedFile& file, bool write) {
  return {write, file.length == UINT64_MAX ? 0 : file.offset + file.length};
}

// A file that this process has open for writing, with the ranges in use.
struct Shared {
  bool device;
  dev_t dev;
  ino_t ino;
  OpenedFile file;
  bool locked;
  void* unsealed;                                     // a mapping that prevents seals, or null
  std::vector<std::pair<uint64_t, uint64_t>> ranges;  // offset, length
};

struct Registry {
  core::Mutex mutex;
  std::vector<Shared> files VMEM_GUARDED_BY(mutex);
};

constinit std::atomic<Registry*> registry_here{nullptr};

Registry& registry() {
  return of_this_process(registry_here);
}

Shared* find(Registry& all, const struct stat& st) VMEM_REQUIRES(all.mutex) {
  const bool device = S_ISBLK(st.st_mode);
  for (Shared& s : all.files) {
    if (s.device == device && (device ? s.dev == st.st_rdev : s.dev == st.st_dev && s.ino == st.st_ino)) return &s;
  }
  return nullptr;
}

// Shares the file with its other users in this process; sets *joined if there are any.
core::Status join(const struct stat& st, bool lock_it, MappedFile* out, bool* joined) {
  Registry& all = registry();
  const core::MutexLock lock(all.mutex);
  Shared* const file = core::broken("file_lock") ? nullptr : find(all, st);
  *joined = file != nullptr;
  if (file == nullptr) return {};
  // Checks permissions as open(2) would: the user may have changed since.
  if (faccessat(AT_FDCWD, out->path.c_str(), R_OK | W_OK, AT_EACCESS) != 0)
    return cannot_open(out->path, st, true, errno);
  if (core::Status status = check_mappable(out->path, file->file.fd, st, use_of(*out, true)); !status.ok())
    return status;
  for (const auto& [offset, length] : file->ranges) {
    if (out->offset >= offset + std::min(length, UINT64_MAX - offset) ||
        offset >= out->offset + std::min(out->length, UINT64_MAX - out->offset)) {
      continue;
    }
    const auto number = [](uint64_t n) { return static_cast<unsigned long long>(n); };
    return core::error(EBUSY,
                       "%s: bytes %llu to %llu are wanted, but a SHARED region has bytes %llu to %llu. Regions of one "
                       "file must not overlap.",
                       out->path.c_str(), number(out->offset), number(out->offset + out->length), number(offset),
                       number(offset + length));
  }
  if (lock_it && !file->locked) {
    if (core::Status status = lock_once(out->path, file->file.fd); !status.ok())
      return status.code() == -EBUSY ? lock_refused(out->path, st) : status;
    file->locked = true;
  }
  file->ranges.emplace_back(out->offset, out->length);
  out->file = file->file;
  out->shared = true;
  if (core::Status status = current_size(*out, &out->file.size); !status.ok()) {
    file->ranges.pop_back();
    out->file.fd = -1;
    return status;
  }
  return {};
}

core::Status open_shared(bool direct, bool lock_it, MappedFile* out) {
  for (int tries = 0;; ++tries) {
    struct stat st;
    bool joined = false, locked = true;
    // Close the file on every failure, including bad_alloc.
    core::ScopeGuard close([&] {
      if (out->file.fd >= 0) close_file(std::exchange(out->file.fd, -1));
    });
    if (core::Status status = examine(out->path, &st); !status.ok()) return status;
    core::Status status = join(st, lock_it, out, &joined);
    if (joined) close.dismiss();
    if (joined || !status.ok()) return status;
    status = open_checked(out->path, true, &st, &out->file.fd);
    if (status.ok()) status = check_mappable(out->path, out->file.fd, st, use_of(*out, true));
    if (status.ok() && lock_it) {
      status = lock_once(out->path, out->file.fd);
      locked = status.ok();
    }
    if (status.ok()) status = probe_direct(out->path, direct, false, &out->file);
    if (status.ok()) {
      Registry& all = registry();
      const core::MutexLock lock(all.mutex);
      const bool device = S_ISBLK(st.st_mode);
      all.files.push_back({device,
                           device ? st.st_rdev : st.st_dev,
                           st.st_ino,
                           out->file,
                           lock_it,
                           nullptr,
                           {{out->offset, out->length}}});
      all.files.back().unsealed = keep_unsealed(out->file.fd);
      out->shared = true;
      close.dismiss();
      return {};
    }
    const bool again = status.code() == -EBUSY && tries != kBusyTries;
    if (!again && !locked && status.code() == -EBUSY) status = lock_refused(out->path, st);
    if (out->file.fd >= 0) close_file(std::exchange(out->file.fd, -1));
    if (!again) return status;
    pause_while_busy();  // also while another thread of this process is opening the file
  }
}

}  // namespace

void leave_parents_files() {
  registry_here.store(nullptr);
  parked_here.store(nullptr);
}

core::Status open_mapped(const std::string& path, bool write, bool direct, MappedFile* out, uint64_t offset,
                         uint64_t length, bool lock) {
  MappedFile file;
  file.path = path;
  file.offset = offset;
  file.length = length;
  core::Status status;
  if (write) {
    status = open_shared(direct, lock, &file);
  } else {
    struct stat st;
    core::ScopeGuard close([&] { close_mapped(&file); });
    status = examine(path, &st);
    if (status.ok()) status = open_checked(path, false, &st, &file.file.fd);
    if (status.ok()) status = check_mappable(path, file.file.fd, st, use_of(file, false));
    if (status.ok()) status = probe_direct(path, direct, false, &file.file);
    if (status.ok()) close.dismiss();
  }
  if (status.ok()) *out = std::move(file);
  return status;
}

void close_mapped(MappedFile* file) {
  if (file->file.fd < 0) return;
  if (file->shared) {
    Registry& all = registry();
    const core::MutexLock lock(all.mutex);
    const auto it =
        std::find_if(all.files.begin(), all.files.end(), [&](const Shared& s) { return s.file.fd == file->file.fd; });
    std::erase(it->ranges, std::pair(file->offset, file->length));
    if (it->ranges.empty()) {
      // The kernel may hold the open file a moment longer for I/O that has just ended. Release the
      // lock now.
      if (it->locked) flock(file->file.fd, LOCK_UN);
      if (it->unsealed != nullptr) munmap(it->unsealed, core::kPage);
      close_file(file->file.fd);
      all.files.erase(it);
    }
  } else {
    close_file(file->file.fd);
  }
  file->file.fd = -1;
}

bool may_have_holes(const MappedFile& file) {
  struct stat st;
  struct statfs fs;
  if (file.file.block_device || fstat(file.file.fd, &st) != 0 || fstatfs(file.file.fd, &fs) != 0) return false;
  if (fs.f_type != EXT4_SUPER_MAGIC && fs.f_type != XFS_SUPER_MAGIC && fs.f_type != TMPFS_MAGIC) return false;
  return st.st_blocks < st.st_size / 512;
}

bool find_hole(int fd, uint64_t offset, uint64_t size, uint64_t* data) {
  const off_t at = lseek(fd, static_cast<off_t>(offset), SEEK_DATA);
  if (at >= 0) {
    *data = static_cast<uint64_t>(at);
    return *data >= offset + size;  // data lie beyond, so the end of the file does too
  }
  struct stat st;
  if (errno != ENXIO || fstat(fd, &st) != 0) return false;
  *data = static_cast<uint64_t>(st.st_size);
  return *data >= offset + size;
}

core::Status current_size(const MappedFile& file, uint64_t* size) {
  struct stat st;
  if (fstat(file.file.fd, &st) != 0) return core::system_error(errno, "cannot examine %s", file.path.c_str());
  *size = static_cast<uint64_t>(st.st_size);
  if (S_ISBLK(st.st_mode) && ioctl(file.file.fd, BLKGETSIZE64, size) != 0) {
    return core::system_error(errno, "cannot tell the size of block device %s", file.path.c_str());
  }
  return {};
}

}  // namespace vmem::store
