// The kernels of the benchmark, for both backends of gpuapp::App. Each word is stamped with its
// place, so that lost, stale and misplaced blocks all show.
#pragma once

#include <atomic>

#include "common/gpu_app.h"
#include "kernels.h"

namespace gpubench {

// The same stamp as in kernels.cu and tests/system/support.h.
inline uint64_t stamp(uint64_t index, uint64_t round) {
  uint64_t z = index * 0x9e3779b97f4a7c15u + round * 0xbf58476d1ce4e5b9u + 1;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  return z ^ (z >> 31);
}

class Kernels {
 public:
  explicit Kernels(gpuapp::App& app) : sim_(app.simulated()) {
    if (sim_) {
      counter_ = &sim_counter_;
      return;
    }
    void* page = nullptr;
    gpuapp::must(cudaHostAlloc(&page, 4096, cudaHostAllocPortable), "cudaHostAlloc");
    memset(page, 0, 4096);
    counter_ = static_cast<unsigned long long*>(page);
    vmem::gpu::load_all();
  }
  ~Kernels() {
    if (!sim_) cudaFreeHost(counter_);
  }
  Kernels(const Kernels&) = delete;
  Kernels& operator=(const Kernels&) = delete;

  // Stamps the words of [p, p + bytes) as the data at `offset`. plain: the memory is no region of
  // libvmem.
  void set(void* stream, void* p, size_t bytes, uint64_t offset, uint64_t round, bool plain) {
    if (!sim_) {
      vmem::gpu::set_stamps(stream, static_cast<uint64_t*>(p), bytes / 8, offset / 8, round, 1);
      return launched();
    }
    pieces(stream, p, bytes, true, plain, [=](uint64_t* w, size_t n, size_t at) {
      for (size_t i = 0; i < n; ++i) w[i] = stamp(offset / 8 + at + i, round);
    });
  }
  // Counts words with a wrong stamp.
  void check(void* stream, const void* p, size_t bytes, uint64_t offset, uint64_t round, bool plain) {
    if (!sim_) {
      vmem::gpu::check_stamps(stream, static_cast<const uint64_t*>(p), bytes / 8, offset / 8, round, 1, counter_);
      return launched();
    }
    pieces(stream, p, bytes, false, plain, [=, this](const uint64_t* w, size_t n, size_t at) {
      unsigned long long bad = 0;
      for (size_t i = 0; i < n; ++i) bad += w[i] != stamp(offset / 8 + at + i, round);
      std::atomic_ref<unsigned long long>(*counter_).fetch_add(bad);
    });
  }
  void read(void* stream, const void* p, size_t bytes, bool plain) {
    if (!sim_) {
      vmem::gpu::read_all(stream, static_cast<const uint64_t*>(p), bytes / 8, nullptr);
      return launched();
    }
    pieces(stream, p, bytes, false, plain, [](const uint64_t* w, size_t n, size_t) {
      uint64_t sum = 0;
      for (size_t i = 0; i < n; ++i) sum ^= w[i];
      static std::atomic<uint64_t> sink;
      sink = sum;
    });
  }
  // The total of all checks whose streams have been synchronised.
  unsigned long long wrong() const { return *static_cast<volatile unsigned long long*>(counter_); }

 private:
  static void launched() { gpuapp::must(cudaGetLastError(), "kernel launch"); }
  template <typename Body>
  static void pieces(void* stream, const void* p, size_t bytes, bool store, bool plain, Body body) {
    gpuapp::SimApp::launch(stream, [=](gpuapp::SimApp::Kernel& kernel) {
      constexpr size_t kPiece = 256 << 10;
      auto* const from = static_cast<std::byte*>(const_cast<void*>(p));
      for (size_t at = 0; at < bytes; at += kPiece) {
        const size_t n = std::min(kPiece, bytes - at);
        auto* w = plain ? from + at : kernel.at(from + at, n, store);
        if (w == nullptr) return;
        body(reinterpret_cast<uint64_t*>(w), n / 8, at / 8);
      }
    });
  }

  const bool sim_;
  unsigned long long* counter_ = nullptr;
  unsigned long long sim_counter_ = 0;
};

}  // namespace gpubench
