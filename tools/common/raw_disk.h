// Measures what io_uring with O_DIRECT and huge-page buffers gets from the same file system in the
// same run: the limit shown beside every figure. Used by the examples and benchmarks; not part of
// the library.
#pragma once

#include <fcntl.h>
#include <liburing.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

namespace rawdisk {

struct Result {
  double seconds = 0, read_gbs = 0, write_gbs = 0, operations = 0;  // GB = 1e9 bytes; operations a second
  double p50_us = 0, p99_us = 0;                                    // of one operation
  std::string error;
};

struct Plan {
  uint64_t span = 0;       // bytes of the file that take part
  uint64_t total = 0;      // bytes to read (and, with write_back, to write)
  size_t block = 2 << 20;  // bytes an operation
  unsigned depth = 16;
  // Buffers used in turn; 0: depth. A cache holds many buffers, and transfers to many can cost more.
  unsigned buffers = 0;
  bool random = false;
  bool write = false;       // write instead of read
  bool write_back = false;  // mixed: read each block and write it back
  bool direct = true;
  uint64_t seed = 1;
};

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// CPU time of all threads of the process.
inline double cpu_seconds() {
  rusage u;
  getrusage(RUSAGE_SELF, &u);
  return static_cast<double>(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
         static_cast<double>(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
}

// Runs the plan on an existing file of at least plan.span bytes.
inline Result run(const std::string& path, const Plan& plan) {
  Result result;
  const int fd = open(path.c_str(), (plan.write || plan.write_back ? O_RDWR : O_RDONLY) | (plan.direct ? O_DIRECT : 0));
  if (fd < 0) {
    result.error = "open " + path + ": " + strerror(errno);
    return result;
  }
  io_uring ring;
  if (const int rc = io_uring_queue_init(2 * plan.depth, &ring, 0); rc != 0) {
    result.error = std::string("io_uring: ") + strerror(-rc);
    close(fd);
    return result;
  }
  const size_t huge = 2 << 20;
  const uint64_t count_buffers = std::max(plan.buffers, plan.depth);
  const size_t bytes = (plan.block * count_buffers + huge - 1) / huge * huge + huge;
  char* map = static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  char* buffers = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(map) + huge - 1) / huge * huge);
  madvise(buffers, bytes - huge, MADV_HUGEPAGE);
  memset(buffers, 0x5a, bytes - huge);

  struct Slot {
    uint64_t offset;
    uint64_t buffer;
    double start;
    bool writing;
  };
  std::vector<Slot> slots(plan.depth);
  std::vector<float> times;
  const uint64_t blocks = plan.span / plan.block, count = plan.total / plan.block;
  uint64_t issued = 0, done = 0, state = plan.seed * 0x9e3779b97f4a7c15u + 1;
  const auto queue = [&](unsigned slot, uint64_t offset, uint64_t which, bool write) {
    slots[slot] = {offset, which, now(), write};
    io_uring_sqe* sqe = io_uring_get_sqe(&ring);
    char* buffer = buffers + which * plan.block;
    if (write) {
      io_uring_prep_write(sqe, fd, buffer, static_cast<unsigned>(plan.block), offset);
    } else {
      io_uring_prep_read(sqe, fd, buffer, static_cast<unsigned>(plan.block), offset);
    }
    sqe->user_data = slot;
  };
  const auto next = [&](unsigned slot) {
    uint64_t index = issued % blocks;
    if (plan.random) {
      state ^= state << 13, state ^= state >> 7, state ^= state << 17;
      index = state % blocks;
    }
    const uint64_t which = plan.buffers == 0 ? slot : issued % count_buffers;
    ++issued;
    queue(slot, index * plan.block, which, plan.write);
  };
  const double start = now();
  for (unsigned i = 0; i < plan.depth && issued < count; ++i) next(i);
  while (done < count) {
    io_uring_submit_and_wait(&ring, 1);
    io_uring_cqe* cqe;
    while (io_uring_peek_cqe(&ring, &cqe) == 0) {
      const unsigned slot = static_cast<unsigned>(cqe->user_data);
      if (cqe->res != static_cast<int>(plan.block)) {
        result.error = cqe->res < 0 ? strerror(-cqe->res) : "short transfer";
      }
      io_uring_cqe_seen(&ring, cqe);
      if (!result.error.empty()) goto out;
      if (plan.write_back && !slots[slot].writing) {
        queue(slot, slots[slot].offset, slots[slot].buffer, true);
        continue;
      }
      times.push_back(static_cast<float>((now() - slots[slot].start) * 1e6));
      ++done;
      if (issued < count) next(slot);
    }
  }
  result.seconds = now() - start;
  {
    const double gb = static_cast<double>(count) * static_cast<double>(plan.block) / 1e9;
    result.read_gbs = plan.write ? 0 : gb / result.seconds;
    result.write_gbs = plan.write || plan.write_back ? gb / result.seconds : 0;
    result.operations = static_cast<double>(count) / result.seconds;
    std::sort(times.begin(), times.end());
    if (!times.empty()) {
      result.p50_us = times[times.size() / 2];
      result.p99_us = times[times.size() * 99 / 100];
    }
  }
out:
  io_uring_queue_exit(&ring);
  munmap(map, bytes);
  close(fd);
  return result;
}

// Fills a file with incompressible bytes, through O_DIRECT where possible. `path` is a new file or
// the caller's own, opened under no other name. Returns "" or what failed.
inline std::string fill(const std::string& path, uint64_t bytes, uint64_t seed,
                        const std::function<void(uint64_t)>& wrote = {}) {
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
  if (fd < 0) return "open " + path + ": " + strerror(errno);
  struct stat s {};
  if (fstat(fd, &s) != 0 || !S_ISREG(s.st_mode) || s.st_uid != geteuid() || s.st_nlink != 1 || ftruncate(fd, 0) != 0) {
    close(fd);
    return path + " exists and is not ours alone: it is left as it is";
  }
  const int direct = open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_RDWR | O_DIRECT | O_CLOEXEC);
  const int use = direct >= 0 ? direct : fd;
  const size_t step = 4 << 20;
  char* buffer = static_cast<char*>(aligned_alloc(2 << 20, step));
  madvise(buffer, step, MADV_HUGEPAGE);
  uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
  std::string error;
  for (uint64_t at = 0; at < bytes && error.empty(); at += step) {
    for (size_t i = 0; i < step / 8; ++i) {
      state += 0x9e3779b97f4a7c15u;
      uint64_t z = state;
      z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
      z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
      reinterpret_cast<uint64_t*>(buffer)[i] = z ^ (z >> 31);
    }
    const size_t n = bytes - at < step ? (bytes - at + 4095) / 4096 * 4096 : step;
    if (pwrite(use, buffer, n, static_cast<off_t>(at)) != static_cast<ssize_t>(n))
      error = std::string("write: ") + strerror(errno);
    if (wrote) wrote(n);
  }
  if (error.empty() && ftruncate(fd, static_cast<off_t>(bytes)) != 0) error = strerror(errno);
  fsync(fd);
  ::free(buffer);
  if (direct >= 0) close(direct);
  close(fd);
  return error;
}

}  // namespace rawdisk
