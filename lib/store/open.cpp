#include "store/open.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <linux/stat.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>

#include "core/break.h"
#include "core/log.h"
#include "core/process/descriptor.h"
#include "core/signals.h"
#include "core/step.h"
#include "core/types.h"

namespace vmem::store {

namespace {

struct FreePage {
  void operator()(void* page) const { free(page); }
};
using Page = std::unique_ptr<void, FreePage>;

Page aligned_page() {
  Page page(aligned_alloc(core::kPage, core::kPage));
  if (page) memset(page.get(), 0, core::kPage);
  return page;
}

bool set_direct(int fd, bool on) {
  const int flags = fcntl(fd, F_GETFL);
  return flags >= 0 && fcntl(fd, F_SETFL, on ? flags | O_DIRECT : flags & ~O_DIRECT) == 0;
}

void say_buffered(const std::string& path, long file_system, int error) {
  // With more types than this, a type may be logged again.
  static constinit std::array<std::atomic<long>, 16> said{};
  for (auto& one : said) {
    long free = 0;
    if (one.compare_exchange_strong(free, file_system)) break;
    if (free == file_system) return;
  }
  core::log(
      core::Level::warning,
      "The file system of %s (type 0x%lx) refuses direct I/O: %s (errno %d). Its files go through the page cache, "
      "which is slower and uses memory beyond the budget.",
      path.c_str(), file_system, strerror(error), error);
}

// Returns 0, or the errno with which the transfer of the first page failed.
int try_first_page(int fd, bool scratch) {
  const Page page = aligned_page();
  if (!page) return ENOMEM;
  if (scratch && !within_size_limit(core::kPage)) return EFBIG;
  int error = 0;
  if (scratch && pwrite(fd, page.get(), core::kPage, 0) != static_cast<ssize_t>(core::kPage)) error = errno;
  if (error == 0 && pread(fd, page.get(), core::kPage, 0) < 0) error = errno;
  if (scratch && ftruncate(fd, 0) != 0 && error == 0) error = errno;
  return error;
}

}  // namespace

core::Status probe_direct(const std::string& path, bool direct, bool scratch, OpenedFile* file) {
  struct stat st;
  struct statfs fs;
  if (fstat(file->fd, &st) != 0 || fstatfs(file->fd, &fs) != 0) {
    return core::system_error(errno, "cannot examine %s", path.c_str());
  }
  file->block_device = S_ISBLK(st.st_mode);
  file->size = static_cast<uint64_t>(st.st_size);
  file->device = st.st_dev;
  file->inode = st.st_ino;
  if (file->block_device && ioctl(file->fd, BLKGETSIZE64, &file->size) != 0) {
    return core::system_error(errno, "cannot tell the size of block device %s", path.c_str());
  }
  file->direct = false;
  file->memory_align = file->offset_align = 1;
  const bool in_memory =
      !file->block_device && (fs.f_type == TMPFS_MAGIC || fs.f_type == RAMFS_MAGIC || fs.f_type == HUGETLBFS_MAGIC);
  if (!direct || in_memory) return {};

  int error = EINVAL;
  if (set_direct(file->fd, true)) {
    error = try_first_page(file->fd, scratch);
    if (error == 0) {
      file->direct = true;
      file->memory_align = file->offset_align = core::kPage;
#if defined(STATX_DIOALIGN)
      struct statx sx;
      if (statx(file->fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &sx) == 0 && (sx.stx_mask & STATX_DIOALIGN) != 0 &&
          sx.stx_dio_offset_align != 0) {
        file->memory_align = sx.stx_dio_mem_align;
        file->offset_align = sx.stx_dio_offset_align;
      }
#endif
      if (file->offset_align <= core::kPage && file->memory_align <= core::kPage) return {};
      file->direct = false;
      file->memory_align = file->offset_align = 1;
    }
    if (!set_direct(file->fd, false))
      return core::system_error(errno, "cannot turn direct I/O off for %s", path.c_str());
  }
  // Only a refusal of direct I/O itself may lead to buffered I/O.
  if (error != EINVAL && error != EOPNOTSUPP) {
    return core::system_error(error, "the first page of %s cannot be %s", path.c_str(), scratch ? "written" : "read");
  }
  say_buffered(path, static_cast<long>(fs.f_type), error);
  return {};
}

bool within_size_limit(uint64_t bytes) {
  rlimit limit{};
  return getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || bytes <= limit.rlim_cur;
}

core::Status make_blocking(const std::string& path, int fd) {
  const int flags = fcntl(fd, F_GETFL);
  if (flags >= 0 && fcntl(fd, F_SETFL, flags & ~O_NONBLOCK) == 0) return {};
  return core::system_error(errno, "cannot change the flags of %s", path.c_str());
}

core::Status lock_once(const std::string& path, int fd) {
  if (core::broken("file_lock")) return {};
  int rc;
  do {
    rc = flock(fd, LOCK_EX | LOCK_NB);
  } while (rc != 0 && errno == EINTR);
  if (rc == 0) return {};
  if (errno != EWOULDBLOCK) return core::system_error(errno, "cannot lock %s", path.c_str());
  return core::error(EBUSY, "%s is in use: another process, or a store, holds its lock. Give each its own file.",
                     path.c_str());
}

core::Status lock_exclusively(const std::string& path, int fd) {
  for (int tries = 0;; ++tries) {
    core::Status status = lock_once(path, fd);
    if (status.code() != -EBUSY || tries == kBusyTries) return status;
    pause_while_busy();
  }
}

void pause_while_busy() {
  core::step("store.busy");
  const timespec pause{0, 2000000};
  nanosleep(&pause, nullptr);
  if (core::signals_have_come()) core::let_signals_in();
}

int open_claimed(const std::string& path, int flags) {
  for (int tries = 0;; ++tries) {
    const int fd = core::above_standard(open(path.c_str(), flags));
    if (fd >= 0 || errno != EBUSY || tries == kBusyTries) return fd;
    pause_while_busy();
  }
}

}  // namespace vmem::store
