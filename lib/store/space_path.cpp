#include "store/space_path.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <iterator>

#include "core/log.h"
#include "core/options.h"
#include "core/process/descriptor.h"
#include "core/process/fork.h"
#include "core/process/user.h"
#include "core/step.h"
#include "core/types.h"
#include "store/open.h"

namespace vmem::store {

namespace {

constexpr uint64_t kMaxPages = core::Extent::kMostOffsetPages;

// Makes a file without a name, which disappears with its descriptor however the process ends.
core::Status open_unlinked(const std::string& directory, int* fd) {
  *fd = core::above_standard(open(directory.c_str(), O_TMPFILE | O_RDWR | O_EXCL | O_CLOEXEC, 0600));
  if (*fd >= 0) return {};
  // File systems and kernels without O_TMPFILE return one of these.
  if (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT && errno != EINVAL) {
    return core::system_error(errno, "cannot create a file in directory %s for the SSD store", directory.c_str());
  }
  const int error = errno;
  // A program with more rights gets no file that has a name even for a moment. The program's author
  // chose the directory, but the user who started the program could open the file; under
  // set-group-ID it belongs to that user.
  if (core::has_more_rights()) {
    return core::system_error(error, "cannot create a file without a name in directory %s for the SSD store",
                              directory.c_str());
  }
  return open_and_unlink(directory, fd);
}

core::Status refuse_link(const std::string& name) {
  return core::error(ELOOP, "%s is a symbolic link: give the SSD store the name of a file itself, or a folder",
                     name.c_str());
}

// Opens the file that `name` means; creates it if it does not exist.
core::Status open_named(const std::string& name, bool device, SpacePath* path) {
  // Under set-group-ID or with file capabilities, the file would belong to the user who started the
  // program, who could open it by name.
  if (!device && core::has_more_rights() && geteuid() == getuid() && getuid() != 0) {
    return core::error(EPERM,
                       "%s cannot serve as SSD store: it would belong to the user who started this program, which runs "
                       "with more rights than that user has. Give a folder.",
                       name.c_str());
  }
  int flags = O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY | O_NOFOLLOW;
  if (device) flags |= O_EXCL;  // claims it: refused while mounted or claimed
  int& fd = path->file.fd;
  do {
    fd = open_claimed(name, flags);
    if (fd >= 0 || errno != ENOENT || device) break;
    fd = core::above_standard(open(name.c_str(), flags | O_CREAT | O_EXCL, 0600));
  } while (fd < 0 && errno == EEXIST);  // another process made it between the two calls
  if (fd >= 0) {
    core::step("store.opened");
    return make_blocking(name, fd);
  }
  if (errno == EBUSY) {
    return core::error(EBUSY, "%s is in use (mounted, swap, or another process has it): it cannot serve as SSD store",
                       name.c_str());
  }
  if (errno == ELOOP) return refuse_link(name);
  return core::system_error(errno, "cannot open %s for the SSD store", name.c_str());
}

// Other users who can reach a store can read and change the program's memory.
core::Status check_private(const std::string& name, const struct stat& st) {
  const char* why = nullptr;
  if (S_ISBLK(st.st_mode)) {
    if (st.st_uid != 0 && st.st_uid != geteuid()) why = "it belongs to another user";
    if ((st.st_mode & S_IRWXO) != 0) why = "every user may open it";
  } else if (st.st_uid != geteuid()) {
    why = "it belongs to another user";
  } else if (!core::is_one_user(st.st_uid)) {
    why = "its owner and the caller have no numbers in this user namespace, so that they may be two users";
  } else if ((st.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
    // Do not suggest chmod for a file with contents: it may be named by mistake.
    why = st.st_size == 0 ? "others may open it (chmod 600 makes it yours alone)" : "others may open it";
  } else if (st.st_nlink > 1) {
    why = "it has a second name, by a hard link";
  }
  if (why == nullptr) return {};
  return core::error(EPERM, "%s cannot serve as SSD store: %s. Give a folder, or a file or device of your own.",
                     name.c_str(), why);
}

// The start of a file or device that serves as store, before the first block. It tells a later
// process that the rest is no data.
struct Head {
  char signature[64];
  uint64_t original_pages;  // of a preallocated file
};
constexpr Head kHead = {"libvmem store, format 1. Blocks of memory that died: no data.\n", 0};
// Align blocks with partitions, and with the chunks in which the allocator returns space. In a file
// only one page of it is real.
constexpr uint64_t kDeviceHeadPages = 256;
constexpr uint64_t kFileHeadPages = ExtentAllocator::kChunkPages;

core::Status read_head(const SpacePath& path, Head* out) {
  const ssize_t n = pread(path.file.fd, out, sizeof *out, 0);
  if (n < 0) return core::system_error(errno, "cannot read the start of %s", path.name.c_str());
  if (static_cast<size_t>(n) < sizeof *out) *out = {};
  return {};
}

bool is_ours(const Head& head) {
  return memcmp(head.signature, kHead.signature, sizeof head.signature) == 0;
}

// Tells if the file is one page that a store began with: its owner was killed before the signature
// was complete, or while it tested direct I/O. The page has zeros, or the start of a signature and
// zeros. No user's data look like that.
core::Status is_beginning(const SpacePath& path, uint64_t size, bool* out) {
  constexpr size_t kLeast = 16;  // bytes of the signature: too many to be a user's text by chance
  *out = false;
  if (size > core::kPage) return {};
  alignas(core::kPage) char page[core::kPage] = {};
  const ssize_t n = pread(path.file.fd, page, sizeof page, 0);
  if (n < 0) return core::system_error(errno, "cannot read the start of %s", path.name.c_str());
  size_t same = 0;
  while (same < sizeof kHead.signature && page[same] == kHead.signature[same]) ++same;
  const auto zeros_from = [&](size_t at) {
    return std::all_of(page + at, std::end(page), [](char c) { return c == 0; });
  };
  *out = zeros_from(0) || (same >= kLeast && same < sizeof kHead.signature && zeros_from(same));
  return {};
}

core::Status write_head(const SpacePath& path) {
  alignas(core::kPage) std::byte page[core::kPage] = {};
  Head head = kHead;
  head.original_pages = path.original_pages;
  memcpy(page, &head, sizeof head);
  if (!path.file.block_device && !within_size_limit(sizeof page))
    return core::system_error(EFBIG, "cannot write to %s, which is to be the SSD store", path.name.c_str());
  const ssize_t n = pwrite(path.file.fd, page, sizeof page, 0);
  if (n == static_cast<ssize_t>(sizeof page)) {
    // Before the first block: after a power loss, the signature must exist if any block does.
    if (fdatasync(path.file.fd) == 0) return {};
    return core::system_error(errno, "cannot write to %s, which is to be the SSD store", path.name.c_str());
  }
  return core::system_error(n < 0 ? errno : ENOSPC, "cannot write to %s, which is to be the SSD store",
                            path.name.c_str());
}

// Accepts a named file if it is empty, preallocated and never written, or left by a store that was
// killed. The last is truncated to its original size. Any other file holds a user's data.
core::Status empty_file(SpacePath* path, uint64_t size) {
  if (size != 0 && (lseek(path->file.fd, 0, SEEK_DATA) >= 0 || errno != ENXIO)) {
    Head head{};
    bool beginning = false;
    if (core::Status status = read_head(*path, &head); !status.ok()) return status;
    if (core::Status status = is_beginning(*path, size, &beginning); !status.ok()) return status;
    if (beginning) head.original_pages = 0;
    if (!is_ours(head) && !beginning) {
      return core::error(EEXIST,
                         "%s is not empty and is no store of libvmem: using it would destroy its contents. Give a "
                         "folder or another name, or remove it if it is not needed.",
                         path->name.c_str());
    }
    size = std::min(size, head.original_pages * core::kPage);
    if (ftruncate(path->file.fd, static_cast<off_t>(size)) != 0) {
      return core::system_error(errno, "cannot empty %s, which an earlier store left behind", path->name.c_str());
    }
  }
  path->original_pages = core::round_up(size, core::kPage) / core::kPage;
  return {};
}

core::Status empty_device(SpacePath* path) {
  Head head{};
  if (core::Status status = read_head(*path, &head); !status.ok()) return status;
  return check_block_device_unused(path->name, path->file.fd, is_ours(head) ? sizeof head : 0);
}

core::Status prepare_file(SpacePath& path, bool direct, bool directory) {
  struct stat st;
  if (fstat(path.file.fd, &st) != 0) return core::system_error(errno, "cannot examine %s", path.name.c_str());
  if (!S_ISREG(st.st_mode) && !S_ISBLK(st.st_mode)) {
    return core::error(EINVAL, "%s is no regular file, directory or block device: it cannot serve as SSD store",
                       path.name.c_str());
  }
  if (directory) return probe_direct(path.name, direct, true, &path.file);
  if (core::Status status = check_private(path.name, st); !status.ok()) return status;
  if (core::Status status = lock_exclusively(path.name, path.file.fd); !status.ok()) return status;
  // Its owner may have emptied it before we got the lock.
  if (fstat(path.file.fd, &st) != 0) return core::system_error(errno, "cannot examine %s", path.name.c_str());
  const bool device = S_ISBLK(st.st_mode);
  core::Status status = device ? empty_device(&path) : empty_file(&path, static_cast<uint64_t>(st.st_size));
  path.named_file = !device && status.ok();
  const bool scratch = path.named_file && path.original_pages == 0;
  if (status.ok()) status = probe_direct(path.name, direct, scratch, &path.file);
  if (status.ok()) status = write_head(path);
  if (status.ok()) path.head_pages = device ? kDeviceHeadPages : kFileHeadPages;
  return status;
}

// A link to a directory is as good as the directory: no file gets a name there. A link to a block
// device is followed if root made it (/dev/mapper, /dev/disk/by-id). Any other link could lead to a
// file of another user's choice.
core::Status find_path(std::string* name, bool* directory, bool* device) {
  struct stat link, st;
  *directory = *device = false;
  if (lstat(name->c_str(), &link) != 0) {
    if (errno != ENOENT) return core::system_error(errno, "cannot use %s as SSD store", name->c_str());
    if (name->back() != '/') return {};
    return core::error(ENOENT, "directory %s for the SSD store does not exist: create it", name->c_str());
  }
  st = link;
  if (S_ISLNK(link.st_mode)) {
    if (stat(name->c_str(), &st) != 0) return core::system_error(errno, "cannot use %s as SSD store", name->c_str());
    if (S_ISBLK(st.st_mode) && link.st_uid == 0) {
      char* const real = realpath(name->c_str(), nullptr);
      if (real == nullptr) return core::system_error(errno, "cannot use %s as SSD store", name->c_str());
      *name = real;
      free(real);
    } else if (!S_ISDIR(st.st_mode)) {
      return refuse_link(*name);
    }
  }
  *directory = S_ISDIR(st.st_mode);
  *device = S_ISBLK(st.st_mode);
  if (*directory || *device || S_ISREG(st.st_mode)) return {};
  return core::error(EINVAL, "%s is no regular file, directory or block device: it cannot serve as SSD store",
                     name->c_str());
}

}  // namespace

core::Status open_and_unlink(const std::string& directory, int* fd) {
  std::string name = directory + "/.vmem-store-XXXXXX";
  *fd = core::above_standard(mkostemp(name.data(), O_CLOEXEC));
  if (*fd < 0) {
    return core::system_error(errno, "cannot create a file in directory %s for the SSD store", directory.c_str());
  }
  core::step("store.named");
  struct stat st {};
  core::Status status;
  if (unlink(name.c_str()) != 0 || fstat(*fd, &st) != 0) {
    status = core::system_error(errno, "cannot unlink temporary file %s", name.c_str());
  } else if (st.st_nlink != 0) {
    status = core::error(EPERM,
                         "another program gave a file for the SSD store in directory %s a second name before it was "
                         "unlinked: give a folder that only this user may write to",
                         directory.c_str());
  }
  if (status.ok()) return {};
  close(*fd);
  *fd = -1;
  return status;
}

SpacePath::~SpacePath() {
  if (engine != nullptr) engine->remove_file(id);
  if (file.fd < 0) return;
  // Blocks of memory must not stay on the disk. If this fails, the file only stays larger.
  if (named_file && extents.size_pages() > original_pages) shrink_file(*this, original_pages);
  flock(file.fd, LOCK_UN);
  core::forget_in_children(file.fd);
  close(file.fd);
}

core::Status split_paths(const std::string& paths, std::vector<std::string>* out) {
  const std::string& text = paths;
  if (text.empty()) {
    const char* tmpdir = secure_getenv("TMPDIR");
    // TMPDIR is one path: a colon in it does not separate. It names a directory; a missing one must
    // not become a file.
    out->assign(1, tmpdir != nullptr && *tmpdir != '\0' ? tmpdir : "/var/tmp");
    if (out->front().back() != '/') out->front() += '/';
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
  bool directory = false, device = false;
  core::Status status = find_path(&path->name, &directory, &device);
  if (status.ok()) {
    status = directory ? open_unlinked(name, &path->file.fd) : open_named(path->name, device, path.get());
  }
  if (path->file.fd >= 0) core::close_in_children(path->file.fd);  // before it is locked
  if (status.ok()) status = prepare_file(*path, direct, directory);
  if (!status.ok()) return status;

  path->limit_pages = path->file.block_device ? std::min(path->file.size / core::kPage, kMaxPages) : kMaxPages;
  if (path->limit_pages < path->head_pages) {
    return core::error(EINVAL, "block device %s is too small for the SSD store", path->name.c_str());
  }
  if (!path->file.block_device) {
    struct statfs fs;
    // On tmpfs, preallocated space would be memory.
    const core::MutexLock lock(path->resize_mutex);
    const bool known = fstatfs(path->file.fd, &fs) == 0;
    path->preallocate = !known || fs.f_type != TMPFS_MAGIC;
    if (known && (fs.f_type == TMPFS_MAGIC || fs.f_type == RAMFS_MAGIC)) {
      VMEM_LOG_ONCE(core::Level::warning,
                    "The SSD store %s lies on %s, which is memory: blocks written to it stay in memory, outside "
                    "host_budget, and both count against the limit of a container. Give a folder on a disk in "
                    "ssd_path, or keep this one if that is intended.",
                    path->name.c_str(), fs.f_type == TMPFS_MAGIC ? "tmpfs" : "ramfs");
    }
  }
  if (path->head_pages != 0) {  // never handed out, never given back
    uint64_t first = 0;
    path->extents.grow(path->head_pages);
    path->extents.allocate(path->head_pages, &first);
  }
  path->shrinkable = !path->file.block_device;
  path->punch = path->shrinkable && path->original_pages == 0;  // preallocated space stays allocated
  status = engine.add_store(path->file.fd, &path->id);
  if (!status.ok()) return status;
  path->engine = &engine;
  *out = std::move(path);
  return {};
}

int extend_file(SpacePath& path, uint64_t end, uint64_t pages) {
  if (path.file.block_device || end + pages <= path.original_pages) return 0;
  const auto offset = static_cast<off_t>(end * core::kPage);
  const auto length = static_cast<off_t>(pages * core::kPage);
  if (!within_size_limit(static_cast<uint64_t>(offset + length))) return EFBIG;
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
