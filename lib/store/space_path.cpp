#include "store/space_path.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>

#include "core/types.h"
#include "store/open.h"

namespace vmem::store {

namespace {

constexpr uint64_t kMaxPages = uint64_t{1} << 40;  // what an Extent's offset can name

// A file nobody else can name, gone with its descriptor however the process ends.
core::Status open_unlinked(const std::string& directory, int* fd) {
  *fd = open(directory.c_str(), O_TMPFILE | O_RDWR | O_EXCL | O_CLOEXEC, 0600);
  if (*fd >= 0) return {};
  // File systems and kernels without O_TMPFILE answer one of these.
  if (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT && errno != EINVAL) {
    return core::system_error(errno, "cannot create a file in directory %s for the SSD store", directory.c_str());
  }
  std::string name = directory + "/.vmem-store-XXXXXX";
  *fd = mkostemp(name.data(), O_CLOEXEC);
  if (*fd < 0) {
    return core::system_error(errno, "cannot create a file in directory %s for the SSD store", directory.c_str());
  }
  if (unlink(name.c_str()) != 0) {
    const int error = errno;
    close(*fd);
    *fd = -1;
    return core::system_error(error, "cannot unlink temporary file %s", name.c_str());
  }
  return {};
}

core::Status open_named(const std::string& name, const struct stat* st, int* fd) {
  int flags = O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;
  if (st == nullptr) flags |= O_CREAT;
  if (st != nullptr && S_ISBLK(st->st_mode)) flags |= O_EXCL;  // claims the device: refused while mounted or claimed
  *fd = (flags & O_CREAT) != 0 ? open(name.c_str(), flags, 0600) : open_claimed(name, flags);
  if (*fd >= 0) return make_blocking(name, *fd);
  if (errno == EBUSY) {
    return core::error(EBUSY, "%s is in use (mounted, swap, or another process has it): it cannot serve as SSD store",
                       name.c_str());
  }
  return core::system_error(errno, "cannot open %s for the SSD store", name.c_str());
}

core::Status prepare_file(SpacePath& path, bool direct, bool ours) {
  struct stat st;
  if (fstat(path.file.fd, &st) != 0) return core::system_error(errno, "cannot examine %s", path.name.c_str());
  if (!S_ISREG(st.st_mode) && !S_ISBLK(st.st_mode)) {
    return core::error(EINVAL, "%s is no regular file, directory or block device: it cannot serve as SSD store",
                       path.name.c_str());
  }
  if (!ours) {
    if (core::Status status = lock_exclusively(path.name, path.file.fd); !status.ok()) return status;
  }
  if (S_ISBLK(st.st_mode)) {
    if (core::Status status = check_block_device_unused(path.name, path.file.fd); !status.ok()) return status;
  }
  const bool scratch = S_ISREG(st.st_mode) && st.st_size == 0;
  return probe_direct(path.name, direct, scratch, &path.file);
}

}  // namespace

SpacePath::~SpacePath() {
  if (engine != nullptr) engine->remove_file(id);
  if (file.fd < 0) return;
  // Blocks of memory have no business on the disk after us. The file may stay larger if this fails; nobody is harmed.
  if (named_file && extents.size_pages() > original_pages) shrink_file(*this, original_pages);
  flock(file.fd, LOCK_UN);
  close(file.fd);
}

core::Status split_paths(const std::string& paths, std::vector<std::string>* out) {
  const std::string& text = paths;
  if (text.empty()) {
    const char* tmpdir = secure_getenv("TMPDIR");
    // One path here: a colon in it does not separate.
    out->assign(1, tmpdir != nullptr && *tmpdir != '\0' ? tmpdir : "/var/tmp");
    return {};
  }
  out->clear();
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(':', at), text.size());
    if (end != at) out->push_back(text.substr(at, end - at));
    at = end + 1;
  }
  if (out->empty()) return core::error(EINVAL, "ssd_path \"%s\" names no path", paths.c_str());
  if (out->size() > core::kMaxStorePaths) {
    return core::error(EINVAL, "ssd_path names %zu paths; at most %u are possible", out->size(), core::kMaxStorePaths);
  }
  return {};
}

core::Status open_space_path(const std::string& name, bool direct, Engine& engine, std::unique_ptr<SpacePath>* out) {
  auto path = std::make_unique<SpacePath>();
  path->name = name;
  struct stat st;
  const bool exists = stat(name.c_str(), &st) == 0;
  if (!exists && errno != ENOENT) return core::system_error(errno, "cannot use %s as SSD store", name.c_str());
  if (!exists && name.back() == '/') {
    return core::error(ENOENT, "directory %s for the SSD store does not exist: create it", name.c_str());
  }
  const bool directory = exists && S_ISDIR(st.st_mode);
  core::Status status =
      directory ? open_unlinked(name, &path->file.fd) : open_named(name, exists ? &st : nullptr, &path->file.fd);
  if (status.ok()) status = prepare_file(*path, direct, directory);
  if (!status.ok()) return status;

  path->limit_pages = path->file.block_device ? std::min(path->file.size / core::kPage, kMaxPages) : kMaxPages;
  if (!path->file.block_device) {
    path->named_file = !directory;
    path->original_pages = core::round_up(path->file.size, core::kPage) / core::kPage;
    struct statfs fs;
    // On tmpfs room ahead of use would be memory.
    path->preallocate = fstatfs(path->file.fd, &fs) != 0 || fs.f_type != TMPFS_MAGIC;
  }
  path->shrinkable = !path->file.block_device;
  path->punch = path->shrinkable && path->original_pages == 0;  // room laid out beforehand stays as it was laid out
  status = engine.add_file(path->file.fd, &path->id);
  if (!status.ok()) return status;
  path->engine = &engine;
  *out = std::move(path);
  return {};
}

int extend_file(SpacePath& path, uint64_t end, uint64_t pages) {
  if (path.file.block_device || end + pages <= path.original_pages) return 0;
  const auto offset = static_cast<off_t>(end * core::kPage);
  const auto length = static_cast<off_t>(pages * core::kPage);
  // Beyond this limit the kernel would also send SIGXFSZ, which kills.
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
      static_cast<uint64_t>(offset + length) > limit.rlim_cur) {
    return EFBIG;
  }
  while (path.preallocate) {
    if (fallocate(path.file.fd, 0, offset, length) == 0) return 0;
    if (errno == EINTR) continue;
    if (errno != EOPNOTSUPP && errno != ENOSYS) return errno;
    path.preallocate = false;
  }
  return ftruncate(path.file.fd, offset + length) == 0 ? 0 : errno;
}

int shrink_file(SpacePath& path, uint64_t pages) {
  return ftruncate(path.file.fd, static_cast<off_t>(pages * core::kPage)) == 0 ? 0 : errno;
}

int punch_hole(SpacePath& path, uint64_t first, uint64_t pages) {
  const int rc = fallocate(path.file.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                           static_cast<off_t>(first * core::kPage), static_cast<off_t>(pages * core::kPage));
  return rc == 0 ? 0 : errno;
}

}  // namespace vmem::store
