#include "store/file.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

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

core::Status open_checked(const std::string& path, int flags, int* fd) {
  // The type is looked at first because opening some devices has effects, and again behind the descriptor because the
  // name may mean something else by then.
  struct stat st;
  if (stat(path.c_str(), &st) != 0) return core::system_error(errno, "cannot map %s", path.c_str());
  if (core::Status status = check_type(path, st); !status.ok()) return status;
  const bool write = (flags & O_ACCMODE) == O_RDWR;
  if (S_ISBLK(st.st_mode) && write) flags |= O_EXCL;  // refused while mounted or claimed
  *fd = open_claimed(path, flags | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (*fd < 0) {
    if (errno == EBUSY) return core::error(EBUSY, "block device %s is mounted or in use", path.c_str());
    return core::system_error(errno, "cannot open %s for %s", path.c_str(), write ? "reading and writing" : "reading");
  }
  if (fstat(*fd, &st) != 0) return core::system_error(errno, "cannot examine %s", path.c_str());
  if (core::Status status = check_type(path, st); !status.ok()) return status;
  return make_blocking(path, *fd);
}

core::Status open_parts(const std::string& path, bool write, bool direct, MappedFile* out) {
  const int access = write ? O_RDWR : O_RDONLY;
  if (core::Status status = open_checked(path, access, &out->file.fd); !status.ok()) return status;
  if (write) {
    if (core::Status status = lock_exclusively(path, out->file.fd); !status.ok()) return status;
  }
  return probe_direct(path, direct, false, &out->file);
}

}  // namespace

core::Status open_mapped(const std::string& path, bool write, bool direct, MappedFile* out) {
  MappedFile file;
  file.path = path;
  core::Status status = open_parts(path, write, direct, &file);
  if (!status.ok()) {
    close_mapped(&file);
    return status;
  }
  *out = std::move(file);
  return {};
}

void close_mapped(MappedFile* file) {
  if (file->file.fd >= 0) {
    // The kernel may hold the open file a moment longer for I/O that just ended; the lock must not wait for that.
    flock(file->file.fd, LOCK_UN);
    close(file->file.fd);
  }
  file->file.fd = -1;
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
