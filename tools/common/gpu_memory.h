// Memory and streams of a gpuapp::App with the lifetime of an object, and the copy rate between
// them.
#pragma once

#include <sys/mman.h>

#include <cstring>

#include "common/gpu_app.h"

namespace gpuapp {

// Host memory on huge pages, pinned for the device; aligned to 2 MiB.
class Pinned {
 public:
  Pinned(App& app, size_t bytes) : app_(app) {
    constexpr size_t kHuge = 2 << 20;
    size_ = (bytes + kHuge - 1) / kHuge * kHuge;
    map_ = mmap(nullptr, size_ + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map_ == MAP_FAILED) throw std::runtime_error("no host memory for a pinned buffer");
    data_ = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(map_) + kHuge - 1) / kHuge * kHuge);
    madvise(data_, size_, MADV_HUGEPAGE);
    memset(data_, 0x5a, size_);
    try {
      app_.pin(data_, size_);
    } catch (...) {
      munmap(map_, size_ + kHuge);
      throw;
    }
  }
  ~Pinned() {
    app_.unpin(data_);
    munmap(map_, size_ + (2 << 20));
  }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
  char* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  App& app_;
  void* map_;
  char* data_;
  size_t size_;
};

// Plain device memory.
class Plain {
 public:
  Plain(App& app, size_t bytes) : app_(app), data_(static_cast<char*>(app.allocate(bytes))), size_(bytes) {}
  ~Plain() { app_.release(data_); }
  Plain(const Plain&) = delete;
  Plain& operator=(const Plain&) = delete;
  char* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  App& app_;
  char* data_;
  size_t size_;
};

// A stream for the life of the object.
class Stream {
 public:
  explicit Stream(App& app) : app_(app), stream_(app.stream()) {}
  ~Stream() { app_.destroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  void* get() const { return stream_; }
  void synchronize() const { app_.synchronize(stream_); }

 private:
  App& app_;
  void* stream_;
};

// Measures copies between pinned and plain memory in pieces, in GB/s, as a limit to compare figures
// with. in: to the device.
inline double copy_rate(App& app, Pinned& host, Plain& device, size_t piece, uint64_t total, bool in) {
  Stream a(app), b(app);
  const size_t span = std::min(host.size(), device.size()) / piece * piece;
  const double start = rawdisk::now();
  uint64_t done = 0;
  for (size_t i = 0; done < total; ++i, done += piece) {
    char* const h = host.data() + i * piece % span;
    char* const d = device.data() + i * piece % span;
    void* const s = (i % 2 == 0 ? a : b).get();
    in ? app.copy(d, h, piece, s) : app.copy(h, d, piece, s);
  }
  a.synchronize();
  b.synchronize();
  return static_cast<double>(done) / 1e9 / (rawdisk::now() - start);
}

}  // namespace gpuapp
