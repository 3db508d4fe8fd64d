// Shared by the rows of tier_bench: settings, files with stamps in every word, leases.
#pragma once

#include <time.h>

#include <random>

#include "bench_kernels.h"
#include "bench_table.h"
#include "common/gpu_memory.h"
#include "vmem/vmem.hpp"

namespace gpubench {

inline constexpr uint64_t kMiB = 1 << 20;
inline constexpr size_t kBlock = 2 * kMiB;

struct Settings {
  std::string device = "auto", json, only, fast = "/dev/shm";
  std::string folder = getenv("TMPDIR") != nullptr ? getenv("TMPDIR") : "/var/tmp";
  uint64_t bytes = 0, budget = 0, host_budget = 0, part = 0, span = 0, block = kBlock;
  int rounds = 3;
};

inline double thread_cpu() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) / 1e9;
}

class Rows {
 public:
  Rows(gpuapp::App& app, const Settings& s)
      : s_(s),
        app_(app),
        kernels_(app),
        stream_(app),
        table_(s.rounds, s.only),
        file_(s.folder + "/vmem-tier." + std::to_string(getpid())),
        fast_(s.fast + "/vmem-tier." + std::to_string(getpid())),
        span_(std::min<uint64_t>(s.span != 0 ? s.span : 256 * kMiB, s.budget / 2)) {}
  ~Rows() {
    unlink(file_.c_str());
    unlink(fast_.c_str());
  }
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;

 protected:
  void need_file(const std::string& path) {
    if (access(path.c_str(), R_OK) == 0) return;
    const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) throw std::system_error(errno, std::generic_category(), path);
    std::vector<uint64_t> part(4 * kMiB / 8);
    bool good = true;
    for (uint64_t at = 0; at < s_.bytes && good; at += part.size() * 8) {
      for (size_t i = 0; i < part.size(); ++i) part[i] = stamp(at / 8 + i, 1);
      const uint64_t n = std::min<uint64_t>(part.size() * 8, s_.bytes - at);
      good = pwrite(fd, part.data(), n, static_cast<off_t>(at)) == static_cast<ssize_t>(n);
    }
    const int why = errno;
    fsync(fd);
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    close(fd);
    if (!good) throw std::system_error(why, std::generic_category(), path);
  }
  rawdisk::Plan plan() const {
    rawdisk::Plan p;
    p.span = p.total = s_.bytes;
    return p;
  }
  Sample raw(const std::string& path, const rawdisk::Plan& p, bool flush = false) const {
    Meter m;
    const auto r = rawdisk::run(path, p);
    m.stop();
    if (!r.error.empty()) return {0, 0, 0, r.error};
    Sample s = m.rate(p.total);
    double seconds = r.seconds;
    if (flush) {
      const double start = rawdisk::now();
      if (const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC); fd >= 0) {
        fdatasync(fd);
        close(fd);
      }
      seconds += rawdisk::now() - start;
    }
    s.value = static_cast<double>(p.total) / 1e9 / seconds;  // without the time to make the buffers
    return s;
  }
  void acquire(const void* p, size_t n, unsigned access) const {
    vmem::check(vmem_acquire(p, n, access, 0, stream_.get()));
  }
  void release(const void* p, size_t n) const { vmem::check(vmem_release(p, n, stream_.get())); }
  static char* at(const vmem::region& r, uint64_t offset) { return static_cast<char*>(r.data()) + offset; }
  // Calls fn(offset, bytes) for the parts of [0, bytes).
  template <typename Fn>
  static void parts(uint64_t bytes, uint64_t step, Fn fn) {
    for (uint64_t offset = 0; offset < bytes; offset += step) fn(offset, std::min(step, bytes - offset));
  }

  const Settings s_;
  gpuapp::App& app_;
  Kernels kernels_;
  gpuapp::Stream stream_;
  Table table_;
  const std::string file_, fast_;
  const uint64_t span_;  // bytes that move between host frames and the device
  std::mt19937_64 random_{1};
};

}  // namespace gpubench
