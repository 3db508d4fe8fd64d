#include "store/file.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>
#include <utility>
#include <vector>

#include "core/break.h"
#include "core/descriptor.h"
#include "core/fork.h"
#include "core/mutex.h"
#include "core/on_exit.h"
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

core::Status cannot_open(const std::string& path, bool write) {
  return core::system_error(errno, "cannot open %s for %s", path.c_str(), write ? "reading and writing" : "reading");
}

// The type is looked at first because opening some devices has effects, and again behind the descriptor because the
// name may mean something else by then.
core::Status open_checked(const std::string& path, bool write, struct stat* st, int* fd) {
  int flags = (write ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;
  if (S_ISBLK(st->st_mode) && write) flags |= O_EXCL;  // refused while mounted or claimed
  *fd = core::above_standard(open(path.c_str(), flags));
  if (*fd < 0) {
    if (errno == EBUSY) return core::error(EBUSY, "block device %s is mounted or in use", path.c_str());
    return cannot_open(path, write);
  }
  if (fstat(*fd, st) != 0) return core::system_error(errno, "cannot examine %s", path.c_str());
  if (core::Status status = check_type(path, *st); !status.ok()) return status;
  core::close_in_children(*fd);  // before it is locked
  return make_blocking(path, *fd);
}

void close_file(int fd) {
  core::forget_in_children(fd);
  close(fd);
}

// A file that this process has open for writing, for some ranges of its bytes.
struct Shared {
  bool device;
  dev_t dev;
  ino_t ino;
  OpenedFile file;
  std::vector<std::pair<uint64_t, uint64_t>> ranges;  // offset, length
};

struct Registry {
  core::Mutex mutex;
  std::vector<Shared> files VMEM_GUARDED_BY(mutex);
};

// Never destroyed: regions may outlive static objects, and a child leaves its parent's.
constinit std::atomic<Registry*> of_process{nullptr};

Registry& registry() {
  Registry* all = of_process.load();
  if (all != nullptr) return *all;
  auto made = std::make_unique<Registry>();
  return of_process.compare_exchange_strong(all, made.get()) ? *made.release() : *all;
}

Shared* find(Registry& all, const struct stat& st) VMEM_REQUIRES(all.mutex) {
  const bool device = S_ISBLK(st.st_mode);
  for (Shared& s : all.files) {
    if (s.device == device && (device ? s.dev == st.st_rdev : s.dev == st.st_dev && s.ino == st.st_ino)) return &s;
  }
  return nullptr;
}

// Joins those who have the file open already; *joined: there were some.
core::Status join(const struct stat& st, MappedFile* out, bool* joined) {
  Registry& all = registry();
  const core::MutexLock lock(all.mutex);
  Shared* const file = core::broken("file_lock") ? nullptr : find(all, st);
  *joined = file != nullptr;
  if (file == nullptr) return {};
  // As open(2) would ask: the user may have changed since.
  if (faccessat(AT_FDCWD, out->path.c_str(), R_OK | W_OK, AT_EACCESS) != 0) return cannot_open(out->path, true);
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

core::Status open_shared(bool direct, MappedFile* out) {
  for (int tries = 0;; ++tries) {
    struct stat st;
    bool joined = false;
    // However this ends but well, also for want of memory.
    core::OnExit close([&] {
      if (out->file.fd >= 0) close_file(std::exchange(out->file.fd, -1));
    });
    if (core::Status status = examine(out->path, &st); !status.ok()) return status;
    core::Status status = join(st, out, &joined);
    if (joined) close.dismiss();
    if (joined || !status.ok()) return status;
    status = open_checked(out->path, true, &st, &out->file.fd);
    if (status.ok()) status = lock_once(out->path, out->file.fd);
    if (status.ok()) status = probe_direct(out->path, direct, false, &out->file);
    if (status.ok()) {
      Registry& all = registry();
      const core::MutexLock lock(all.mutex);
      const bool device = S_ISBLK(st.st_mode);
      all.files.push_back(
          {device, device ? st.st_rdev : st.st_dev, st.st_ino, out->file, {{out->offset, out->length}}});
      out->shared = true;
      close.dismiss();
      return {};
    }
    if (out->file.fd >= 0) close_file(std::exchange(out->file.fd, -1));
    if (status.code() != -EBUSY || tries == kBusyTries) return status;
    pause_while_busy();  // or another thread of this process is about to have it
  }
}

}  // namespace

void leave_parents_files() {
  of_process.store(nullptr);
}

core::Status open_mapped(const std::string& path, bool write, bool direct, MappedFile* out, uint64_t offset,
                         uint64_t length) {
  MappedFile file;
  file.path = path;
  file.offset = offset;
  file.length = length;
  core::Status status;
  if (write) {
    status = open_shared(direct, &file);
  } else {
    struct stat st;
    core::OnExit close([&] { close_mapped(&file); });
    status = examine(path, &st);
    if (status.ok()) status = open_checked(path, false, &st, &file.file.fd);
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
      // The kernel may hold the open file a moment longer for I/O that just ended; the lock must not wait for that.
      flock(file->file.fd, LOCK_UN);
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
    return *data >= offset + size;  // data lie beyond, so does the file's end
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
