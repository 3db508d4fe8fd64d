// The system calls for userfaultfd, one function each: arguments in, 0 or a negative errno out.
// Constants newer than the oldest headers we build with are defined here (values of
// include/uapi/linux/userfaultfd.h and include/uapi/asm-generic/mman-common.h of Linux 6.14). mmap,
// madvise and mprotect go through libc, so that sanitizers see them.
#pragma once

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>

#include "core/process/page_map.h"

namespace vmem::trap::os {

using core::kPageExists;
using core::kPageGuard;
using core::kScanGuard;
using core::kScanHuge;
using core::kScanPresent;
using core::kScanSwapped;
using core::kScanWritten;

inline constexpr unsigned kUserModeOnly = 1;                    // UFFD_USER_MODE_ONLY, Linux 5.11
inline constexpr uint64_t kFeatureWp = uint64_t{1} << 0;        // 5.7
inline constexpr uint64_t kFeatureSigbus = uint64_t{1} << 7;    // 4.14
inline constexpr uint64_t kFeatureThreadId = uint64_t{1} << 8;  // 4.14
inline constexpr uint64_t kFeaturePoison = uint64_t{1} << 14;   // 6.6
inline constexpr uint64_t kFeatureMove = uint64_t{1} << 16;     // 6.8
inline constexpr uint64_t kRegisterMissing = uint64_t{1} << 0;
inline constexpr uint64_t kRegisterWp = uint64_t{1} << 1;
inline constexpr uint64_t kMoveAllowHoles = uint64_t{1} << 1;
inline constexpr int kMadvPopulateWrite = 23;  // 5.14
inline constexpr int kMadvGuardInstall = 102;  // 6.13
inline constexpr int kMremapDontUnmap = 4;     // 5.7

struct MoveArgs {  // struct uffdio_move
  uint64_t dst, src, len, mode;
  int64_t moved;
};
struct PoisonArgs {  // struct uffdio_poison
  uint64_t start, len, mode;
  int64_t updated;
};
inline constexpr unsigned long kIoctlMove = _IOWR(UFFDIO, 0x05, MoveArgs);
inline constexpr unsigned long kIoctlPoison = _IOWR(UFFDIO, 0x08, PoisonArgs);
inline constexpr unsigned long kIoctlNew = _IO(UFFDIO, 0x00);  // USERFAULTFD_IOC_NEW, on /dev/userfaultfd, 6.1

// The DONTWAKE bit (bit 0) of every transfer's mode. With it a transfer wakes no thread, and its
// caller wakes the range when all is in place. It is 0 once the kernel has refused UFFDIO_WAKE, for
// example by the program's filter of system calls.
inline constinit std::atomic<uint64_t> dont_wake{1};
inline uint64_t quietly() {
  return dont_wake.load(std::memory_order_relaxed);
}

inline int result(long rc) {
  return rc < 0 ? -errno : 0;
}

// Opens a userfaultfd, close-on-exec and non-blocking. flags: 0 or kUserModeOnly.
inline int open_by_syscall(unsigned flags) {
  const long fd = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | flags);
  return fd < 0 ? -errno : static_cast<int>(fd);
}

inline int open_by_device() {
  const int device = open("/dev/userfaultfd", O_RDWR | O_CLOEXEC);
  if (device < 0) return -errno;
  const int fd = ioctl(device, kIoctlNew, O_CLOEXEC | O_NONBLOCK);
  const int error = errno;
  close(device);
  return fd < 0 ? -error : fd;
}

// The API handshake, once for each descriptor. *offered: all features of this kernel.
inline int handshake(int fd, uint64_t features, uint64_t* offered) {
  uffdio_api args{};
  args.api = UFFD_API;
  args.features = features;
  const int rc = result(ioctl(fd, UFFDIO_API, &args));
  *offered = args.features;
  return rc;
}

inline int enroll(int fd, uintptr_t start, size_t size, uint64_t mode) {
  uffdio_register args{};
  args.range = {start, size};
  args.mode = mode;
  return result(ioctl(fd, UFFDIO_REGISTER, &args));
}

// Unregisters the range: wakes its waiters and removes write protection. Absent pages read as zeros
// from now on.
inline int dismiss(int fd, uintptr_t start, size_t size) {
  uffdio_range args{start, size};
  return result(ioctl(fd, UFFDIO_UNREGISTER, &args));
}

// Works on any address, mapped or not.
inline int wake(int fd, uintptr_t start, size_t size) {
  uffdio_range args{start, size};
  return result(ioctl(fd, UFFDIO_WAKE, &args));
}

// The next four calls do as much as they can and stop at the first error. `done` counts the bytes
// done, even if an error is returned. They wake no thread while quietly() is set.
inline int progress(long rc, int64_t counted, size_t* done) {
  const int error = result(rc);
  // If nothing was done, the kernel puts a negative errno in the same field.
  *done = counted > 0 ? static_cast<size_t>(counted) : 0;
  return error;
}

inline int move(int fd, uintptr_t dst, uintptr_t src, size_t size, uint64_t mode, size_t* done) {
  MoveArgs args{dst, src, size, mode | quietly(), 0};
  long rc = ioctl(fd, kIoctlMove, &args);
  // The kernel moves nothing between memory that mlockall() has locked and other memory.
  if (rc < 0 && errno == EINVAL && args.moved <= 0 && munlock(reinterpret_cast<void*>(dst), size) == 0 &&
      munlock(reinterpret_cast<void*>(src), size) == 0) {
    args = {dst, src, size, mode | quietly(), 0};
    rc = ioctl(fd, kIoctlMove, &args);
  }
  return progress(rc, args.moved, done);
}

inline int copy(int fd, uintptr_t dst, uintptr_t src, size_t size, bool protect, size_t* done) {
  uffdio_copy args{};
  args.dst = dst;
  args.src = src;
  args.len = size;
  args.mode = quietly() | (protect ? UFFDIO_COPY_MODE_WP : 0);
  const long rc = ioctl(fd, UFFDIO_COPY, &args);
  return progress(rc, args.copy, done);
}

inline int zero(int fd, uintptr_t dst, size_t size, size_t* done) {
  uffdio_zeropage args{};
  args.range = {dst, size};
  args.mode = quietly();
  const long rc = ioctl(fd, UFFDIO_ZEROPAGE, &args);
  return progress(rc, args.zeropage, done);
}

inline int poison(int fd, uintptr_t dst, size_t size, size_t* done) {
  PoisonArgs args{dst, size, quietly(), 0};
  const long rc = ioctl(fd, kIoctlPoison, &args);
  return progress(rc, args.updated, done);
}

// on: stores park once this returns. off: also wakes the range.
inline int write_protect(int fd, uintptr_t start, size_t size, bool on) {
  uffdio_writeprotect args{};
  args.range = {start, size};
  args.mode = on ? UFFDIO_WRITEPROTECT_MODE_WP : 0;
  return result(ioctl(fd, UFFDIO_WRITEPROTECT, &args));
}

// Reads one word for each page, in the format of /proc/self/pagemap. Returns false if they cannot
// be read.
inline bool page_states(int pagemap, uintptr_t start, size_t pages, uint64_t* out) {
  const size_t bytes = pages * sizeof(uint64_t);
  return pread(pagemap, out, bytes, static_cast<off_t>(start / 4096 * sizeof(uint64_t))) == static_cast<ssize_t>(bytes);
}

// pagemap: /proc/self/pagemap. Returns 1 if a page of the range is in one of `categories` and not
// in `except`, 0 if none is, or a negative errno. *first: the first such page.
inline int any_page(int pagemap, uintptr_t start, size_t size, uint64_t categories, uint64_t except = 0,
                    uintptr_t* first = nullptr) {
  core::ScannedRange found{};
  core::ScanArgs args{};
  args.size = sizeof args;
  args.start = start;
  args.end = start + size;
  args.out = reinterpret_cast<uintptr_t>(&found);
  args.out_len = 1;
  args.max_pages = 1;
  args.category_inverted = args.category_mask = except;
  args.category_anyof_mask = categories;
  args.return_mask = categories;
  const int rc = ioctl(pagemap, core::kIoctlScan, &args);
  if (rc > 0 && first != nullptr) *first = found.start;
  return rc < 0 ? -errno : rc > 0;
}

// Returns the bytes of the range before its first guard page: all, if there is none or the kernel
// does not tell.
inline size_t before_guard(int pagemap, uintptr_t start, size_t size) {
  uintptr_t first = 0;
  return any_page(pagemap, start, size, kScanGuard, 0, &first) > 0 ? first - start : size;
}

inline int advise(uintptr_t start, size_t size, int advice) {
  return result(madvise(reinterpret_cast<void*>(start), size, advice));
}

// Returns true if the page's mapping is sealed (mseal, Linux 6.10) and not writable. The kernel
// drops no page of such a mapping, and no thread can change one. It also refuses MADV_DONTFORK
// there; elsewhere the call changes nothing, since our mappings have it already.
inline bool keeps_its_pages(uintptr_t page) {
  return advise(page, 4096, MADV_DONTFORK) == -EPERM;
}

// Set once a page of such a mapping has stayed while the rest of its block was dropped. The next
// fill of the block finds it present.
inline constinit std::atomic<bool> some_pages_stayed{false};

inline constexpr int kDropLocked = 24;  // MADV_DONTNEED_LOCKED, Linux 5.18

// Drops pages, even those locked by mlockall(), for which MADV_DONTNEED returns -EINVAL. Before
// 5.18 they are unlocked.
inline int drop(uintptr_t start, size_t size) {
  const int error = advise(start, size, MADV_DONTNEED);
  if (error == -ENOMEM) return 0;  // a part is unmapped; the pages of the rest are gone
  if (error != -EINVAL || advise(start, size, kDropLocked) == 0) return error == -EINVAL ? 0 : error;
  if (munlock(reinterpret_cast<void*>(start), size) != 0) return error;
  return advise(start, size, MADV_DONTNEED);
}

// Gives one piece of advice for several ranges of this process. Returns the bytes advised or a
// negative errno. The kernel accepts MADV_DONTNEED here since 6.13, and only for the caller's own
// memory.
inline long advise_many(int pidfd, const iovec* ranges, size_t count, int advice) {
  const long rc = syscall(SYS_process_madvise, pidfd, ranges, count, advice, 0);
  return rc < 0 ? -errno : rc;
}

inline int open_self() {
  const long fd = syscall(SYS_pidfd_open, getpid(), 0);
  return fd < 0 ? -errno : static_cast<int>(fd);
}

// Moves the pages of [from, from + size) to `to`, replacing the mapping there. `from` stays mapped,
// registered and empty.
inline int remap(uintptr_t from, size_t size, uintptr_t to) {
  void* at = mremap(reinterpret_cast<void*>(from), size, size, MREMAP_MAYMOVE | MREMAP_FIXED | kMremapDontUnmap,
                    reinterpret_cast<void*>(to));
  return at == MAP_FAILED ? -errno : 0;
}

// Same, to free address space that the kernel picks. On error nothing has changed.
inline int remap_elsewhere(uintptr_t from, size_t size, uintptr_t* to) {
  void* at = mremap(reinterpret_cast<void*>(from), size, size, MREMAP_MAYMOVE | kMremapDontUnmap, nullptr);
  if (at == MAP_FAILED) return -errno;
  *to = reinterpret_cast<uintptr_t>(at);
  return 0;
}

// Reserves the destination of a failed remap(), which may have been unmapped, before another
// mapping takes it.
inline void keep_room(uintptr_t start, size_t size) {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
  void* const at = mmap(reinterpret_cast<void*>(start), size, PROT_NONE, kFlags, -1, 0);
  static_cast<void>(at);  // on failure, it is still mapped
}

// Makes our memory accessible: remapped pages keep the rights and the protection key of the
// program's mapping.
inline int open_up(uintptr_t start, size_t size) {
  auto* const at = reinterpret_cast<void*>(start);
  if (pkey_mprotect(at, size, PROT_READ | PROT_WRITE, 0) == 0) return 0;
  return result(mprotect(at, size, PROT_READ | PROT_WRITE));
}

}  // namespace vmem::trap::os
