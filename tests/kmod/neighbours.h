// Other uses that a process makes of the module's memory: io_uring, userfaultfd, memory cgroups,
// pipes, remote accesses. For the tests that run everything at once: each function takes a place in
// a region and one in a pool, and a random number.
#pragma once

#include <liburing.h>
#include <linux/userfaultfd.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#include "kmod/context.h"

namespace kmod_test {

// Mapped addresses: a page or more of a region, and as much of a pool.
struct Places {
  char* of(uint32_t random) const { return random % 2 ? block : frame; }
  char* block;
  char* frame;
  size_t size;
};

// Puts one byte into a pipe without a copy, and usually reads it again.
inline void references_in_a_pipe(const Places& at, uint32_t random) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) return;
  iovec v{at.of(random), 1};
  if (vmsplice(ends[1], &v, 1, SPLICE_F_NONBLOCK) == 1 && random % 4 != 0) {
    char byte = 0;
    const ssize_t n = read(ends[0], &byte, 1);
    (void)n;
  }
  close(ends[0]);
  close(ends[1]);
}

// Returns a file to read from, with direct I/O if the file system has it; -1 if there is no space
// for one.
inline constexpr size_t kFileBytes = 64 << 10;
inline int file_to_read() {
  static const int fd = [] {
    const char* folder = getenv("TMPDIR");
    int made = open(folder != nullptr ? folder : "/var/tmp", O_TMPFILE | O_RDWR | O_CLOEXEC | O_DIRECT, 0600);
    if (made < 0) made = open(folder != nullptr ? folder : "/var/tmp", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (made >= 0 && ftruncate(made, kFileBytes) != 0) made = -1;
    return made;
  }();
  return fd;
}

// Reads into a block or a frame, by address or as a registered buffer, and sometimes leaves before
// the read is complete.
inline void io_uring_reads(const Places& at, uint32_t random) {
  io_uring ring;
  if (file_to_read() < 0 || io_uring_queue_init(4, &ring, 0) != 0) return;
  const iovec v{at.of(random), std::min(at.size, kFileBytes)};
  const bool fixed = random / 4 % 2 && io_uring_register_buffers(&ring, &v, 1) == 0;
  for (int i = 0; i < 2; ++i) {
    io_uring_sqe* const sqe = io_uring_get_sqe(&ring);
    if (fixed) {
      io_uring_prep_read_fixed(sqe, file_to_read(), v.iov_base, static_cast<unsigned>(v.iov_len), 0, 0);
    } else {
      io_uring_prep_read(sqe, file_to_read(), v.iov_base, static_cast<unsigned>(v.iov_len), 0);
    }
  }
  if (io_uring_submit(&ring) > 0 && random / 8 % 4 != 0) {
    io_uring_cqe* cqe = nullptr;
    io_uring_wait_cqe(&ring, &cqe);
  }
  io_uring_queue_exit(&ring);
}

// Blocks cannot be registered or moved; they can be the source of a copy.
inline void a_userfaultfd(const Places& at, uint32_t random) {
  const int fd = static_cast<int>(syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK));
  if (fd < 0) return;
  uffdio_api api{};
  api.api = UFFD_API;
  void* const page = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  uffdio_register ours{}, theirs{};
  ours.range = {reinterpret_cast<uintptr_t>(page), kPage};
  theirs.range = {reinterpret_cast<uintptr_t>(at.of(random)), at.size};
  ours.mode = UFFDIO_REGISTER_MODE_MISSING;
  theirs.mode = random / 2 % 2 ? UFFDIO_REGISTER_MODE_MISSING : UFFDIO_REGISTER_MODE_WP;
  if (page != MAP_FAILED && call(fd, UFFDIO_API, &api) == 0 && call(fd, UFFDIO_REGISTER, &ours) == 0) {
    EXPECT_NE(call(fd, UFFDIO_REGISTER, &theirs), 0) << "a mapping of the module's has another trap";
    struct {
      uint64_t to, from, size, mode;
      int64_t done;
    } move{ours.range.start, theirs.range.start, kPage, 0, 0};
    EXPECT_NE(call(fd, _IOWR(UFFDIO, 0x05, move), &move), 0) << "a frame's page was moved away";
    uffdio_copy copy{};
    copy.dst = ours.range.start;
    copy.src = theirs.range.start;
    copy.len = kPage;
    call(fd, UFFDIO_COPY, &copy);
  }
  if (page != MAP_FAILED) munmap(page, kPage);
  close(fd);
}

// Two groups to move between; the second has a limit of `limit` bytes, unless that is 0.
class MemoryCgroups {
 public:
  explicit MemoryCgroups(uint64_t limit = 0) {
    put(kGroups + "cgroup.subtree_control", "+memory");
    for (const char* which : {"a", "b"}) mkdir((kGroup + which).c_str(), 0755);
    if (limit != 0) put(kGroup + "b/memory.max", std::to_string(limit));
  }
  ~MemoryCgroups() {
    put(kGroups + "cgroup.procs", "0");
    for (const char* which : {"a", "b"}) rmdir((kGroup + which).c_str());
  }
  MemoryCgroups(const MemoryCgroups&) = delete;
  MemoryCgroups& operator=(const MemoryCgroups&) = delete;

  // Moves the caller's process to one of the groups, which is charged for its next frames, or
  // reclaims memory of one.
  static void use(uint32_t random) {
    const std::string group = kGroup + (random % 2 ? "a" : "b");
    if (random / 2 % 2) {
      put(group + "/cgroup.procs", "0");
    } else {
      put(group + "/memory.reclaim", "256K");
    }
  }

 private:
  static inline const std::string kGroups = "/sys/fs/cgroup/", kGroup = kGroups + "vmem-race-";
};

// Does what a debugger does, to its own process.
inline void remote_reads(const Places& at, uint32_t random) {
  uint64_t value = 0;
  iovec here{&value, 8}, there{at.of(random), 8};
  ssize_t n = process_vm_readv(getpid(), &here, 1, &there, 1, 0);
  const int fd = open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
  n = pread(fd, &value, 8, static_cast<off_t>(reinterpret_cast<uintptr_t>(at.of(random))));
  (void)n;
  close(fd);
}

}  // namespace kmod_test
