#include "core/process/guarded_read.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "core/break.h"
#include "core/fault_server.h"
#include "core/process/fork.h"
#include "core/process/page_map.h"
#include "core/types.h"

namespace vmem::core {

namespace {

// /proc/self is that of the main thread, and shows no memory once that thread has ended. A policy of
// the system may permit only /proc/self.
int open_of_process(const char* name) {
  char path[64];
  for (const char* of : {"thread-self", "self"}) {
    snprintf(path, sizeof path, "/proc/%s/%s", of, name);
    if (const int fd = open(path, O_RDONLY | O_CLOEXEC); fd >= 0) return fd;
  }
  return -1;
}

// Files of /proc that show this process's memory, whatever its rights, and its page map; -1: cannot
// be opened.
struct ProcessFiles {
  int memory, pagemap;
};

// Reads a page or a part of it that the page map cannot judge, without /proc/self/mem. The kernel
// could wait for the trap on an absent page, so the page must be present.
bool read_present(void* to, size_t size, uintptr_t from) {
  unsigned char present = 0;
  const iovec here{to, size}, there{reinterpret_cast<void*>(from), size};
  return mincore(reinterpret_cast<void*>(round_down(from, kPage)), kPage, &present) == 0 && (present & 1) != 0 &&
         process_vm_readv(gettid(), &here, 1, &there, 1, 0) == static_cast<ssize_t>(size);
}

// True if a load can only find zeros in the page.
bool known_empty(int pagemap, uintptr_t page, Absent absent, Guards guards) {
  if (absent != Absent::zeros && !broken("absent_pages")) return false;
  uint64_t state = 0;
  if (pread(pagemap, &state, sizeof state, static_cast<off_t>(page / kPage * sizeof state)) != sizeof state)
    return false;
  return (state & kPageExists) == 0 || (guards == Guards::are_zeros && (state & kPageGuard) != 0);
}

// Reads page by page and skips absent pages: this may be the thread that would have to supply them.
int read_at_once(const ProcessFiles& files, void* out, const void* in, size_t size, Absent absent, Guards guards) {
  auto* to = static_cast<std::byte*>(out);
  auto from = reinterpret_cast<uintptr_t>(in);
  while (size != 0) {
    const size_t piece = std::min(size, kPage - from % kPage);
    const auto empty = [&] { return known_empty(files.pagemap, round_down(from, kPage), absent, guards); };
    const auto read = [&] {
      if (files.memory < 0) return read_present(to, piece, from);
      return pread(files.memory, to, piece, static_cast<off_t>(from)) == static_cast<ssize_t>(piece);
    };
    const bool done = !empty() && read();
    if (!done && !empty()) return -EFAULT;  // tested again: the page may have been dropped since
    if (!done) memset(to, 0, piece);
    to += piece, from += piece, size -= piece;
  }
  return 0;
}

}  // namespace

// Opens the files only for the call: it is seldom needed, and any holder of the first can read the
// whole process.
int read_guarded_at_once(void* to, const void* from, size_t size, Absent absent, Guards guards) {
  const ProcessFiles files{open_of_process("mem"), open_of_process("pagemap")};
  const int error = read_at_once(files, to, from, size, absent, guards);
  if (files.memory >= 0) close(files.memory);
  if (files.pagemap >= 0) close(files.pagemap);
  return error;
}

GuardedReader::GuardedReader()
    : memory_(keep_from_children(open_of_process("mem"))), pagemap_(keep_from_children(open_of_process("pagemap"))) {
  struct stat its = {};
  if (memory_ >= 0 && pagemap_ >= 0 && fstat(memory_, &its) == 0) {
    inode_ = its.st_ino;
    file_system_ = its.st_dev;
  }
}

GuardedReader::~GuardedReader() {
  close_and_forget(memory_);
  close_and_forget(pagemap_);
}

int GuardedReader::read_at_once(void* to, const void* from, size_t size, Absent absent) const {
  struct stat now = {};
  if (inode_ == 0 || fstat(memory_, &now) != 0 || now.st_ino != inode_ || now.st_dev != file_system_)
    return read_guarded_at_once(to, from, size, absent);
  return core::read_at_once({memory_, pagemap_}, to, from, size, absent, Guards::are_zeros);
}

namespace {

struct QueryArgs {  // struct procmap_query of linux/fs.h, Linux 6.11
  uint64_t size, query_flags, query_address;
  uint64_t start, end, flags, page_size, offset, inode;
  uint32_t device_major, device_minor, name_size, build_id_size;
  uint64_t name_address, build_id_address;
};
constexpr unsigned long kIoctlQuery = _IOWR('f', 17, QueryArgs);  // PROCMAP_QUERY
constexpr uint64_t kReadable = 1, kWritable = 2, kExecutable = 4;
constexpr uint64_t kThisOrNext = 0x10;  // PROCMAP_QUERY_COVERING_OR_NEXT_VMA

}  // namespace

MappingQuery::MappingQuery()
    : fd_(keep_from_children(open_of_process("maps"))), pagemap_(keep_from_children(open_of_process("pagemap"))) {}

MappingQuery::~MappingQuery() {
  close_and_forget(fd_);
  close_and_forget(pagemap_);
}

MappingQuery::Marks MappingQuery::marks(const void* at, size_t size) const {
  for (const uint64_t categories : {kScanSwapped | kScanGuard, kScanSwapped}) {
    ScannedRange found{};
    ScanArgs args{};
    args.size = sizeof args;
    args.start = reinterpret_cast<uintptr_t>(at);
    args.end = args.start + size;
    args.out = reinterpret_cast<uintptr_t>(&found);
    args.out_len = args.max_pages = 1;
    args.category_anyof_mask = args.return_mask = categories;
    const int rc = ioctl(pagemap_, kIoctlScan, &args);
    if (rc == 0) return Marks::none;
    if (rc > 0) return (found.categories & kScanGuard) != 0 ? Marks::guards : Marks::some;
    if (errno != EINVAL) return Marks::guards;  // this process may not read the page map: assume the worst
  }
  return Marks::some;
}

bool MappingQuery::plain(const void* at, size_t size) const {
  QueryArgs query{};
  query.size = sizeof query;
  query.query_address = reinterpret_cast<uintptr_t>(at);
  if (fd_ < 0 || ioctl(fd_, kIoctlQuery, &query) != 0) return false;
  return query.end >= query.query_address + size && (query.flags & kReadable) != 0 && (query.flags & kWritable) != 0;
}

// No call tells it. But mprotect() fails on a sealed mapping, even with the rights that it has.
bool MappingQuery::sealed(const void* at, size_t size) const {
  // A filter of system calls refuses mprotect().
  if (mprotect(const_cast<void*>(at), 0, PROT_NONE) != 0) return false;
  const uintptr_t end = reinterpret_cast<uintptr_t>(at) + size;
  for (uintptr_t from = reinterpret_cast<uintptr_t>(at); from < end;) {
    QueryArgs query{};
    query.size = sizeof query;
    query.query_flags = kThisOrNext;
    query.query_address = from;
    if (fd_ < 0 || ioctl(fd_, kIoctlQuery, &query) != 0 || query.start >= end) return false;
    from = std::max(from, static_cast<uintptr_t>(query.start));
    const uintptr_t last = std::min(end, static_cast<uintptr_t>(query.end));
    const int rights = ((query.flags & kReadable) != 0 ? PROT_READ : 0) |
                       ((query.flags & kWritable) != 0 ? PROT_WRITE : 0) |
                       ((query.flags & kExecutable) != 0 ? PROT_EXEC : 0);
    if (mprotect(reinterpret_cast<void*>(from), last - from, rights) != 0 && errno == EPERM) return true;
    from = last;
  }
  return false;
}

namespace {

int read_for_anybody(void* to, const void* from, size_t size, Absent absent, Guards guards) {
  auto* out = static_cast<std::byte*>(to);
  auto* in = static_cast<const std::byte*>(from);
  const pid_t self = gettid();  // the main thread may have ended
  while (size != 0) {
    const iovec here{out, size}, there{const_cast<std::byte*>(in), size};
    const ssize_t n = process_vm_readv(self, &here, 1, &there, 1, 0);
    if (n <= 0) break;
    out += n, in += n, size -= static_cast<size_t>(n);
  }
  if (size == 0) return 0;
  const int refused = errno;
  if (read_guarded_at_once(out, in, size, absent, guards) == 0) return 0;
  // A filter of system calls refuses both ways: read by ordinary loads.
  if (refused != ENOSYS && refused != EPERM) return -EFAULT;
  memcpy(out, in, size);
  return 0;
}

}  // namespace

int read_guarded(void* to, const void* from, size_t size, Absent absent, Guards guards) {
  may_wait_for_a_fault("memory of a region is read");
  return read_for_anybody(to, from, size, absent, guards);
}

int read_guarded_untrapped(void* to, const void* from, size_t size, Guards guards) {
  return read_for_anybody(to, from, size, Absent::zeros, guards);
}

}  // namespace vmem::core
