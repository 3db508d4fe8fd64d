// Rows of tier_bench between two devices. Skipped with one device, and on the simulated device.
#pragma once

#include "tier_host.h"

namespace gpubench {

class PeerRows : public HostRows {
 public:
  using HostRows::HostRows;

 protected:
  // Calls fn with the device as the current one.
  template <typename Fn>
  static void on(int device, Fn fn) {
    int before = 0;
    cudaGetDevice(&before);
    cudaSetDevice(device);
    fn();
    cudaSetDevice(before);
  }
  class StreamOf {
   public:
    explicit StreamOf(int device) {
      on(device, [&] { gpuapp::must(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "a stream"); });
    }
    ~StreamOf() { cudaStreamDestroy(stream_); }
    StreamOf(const StreamOf&) = delete;
    StreamOf& operator=(const StreamOf&) = delete;
    cudaStream_t get() const { return stream_; }
    void synchronize() const { gpuapp::must(cudaStreamSynchronize(stream_), "a stream"); }

   private:
    cudaStream_t stream_ = nullptr;
  };

  void between_devices() {
    int count = 0;
    if (!table_.wanted("peer", true) || app_.simulated() || cudaGetDeviceCount(&count) != cudaSuccess || count < 2)
      return;
    const StreamOf streams[2] = {StreamOf(0), StreamOf(1)};
    for (const uint64_t step : {2 * kMiB, 32 * kMiB, span_}) {
      if (step > span_) continue;
      table_.row("peer-" + std::to_string(step / kMiB),
                 "between two GPUs, there and back, " + std::to_string(step / kMiB) +
                     " MiB a call (other: managed memory, prefetched)",
                 "GB/s",
                 {{"raw", [&] { return peer_copy(streams[0], step); }},
                  {"other", [&] { return driver_moves(streams, step); }},
                  {"vmem", [&] { return moves(streams, step); }}});
    }
  }

 private:
  Sample moves(const StreamOf (&streams)[2], uint64_t step) {
    const vmem::region r = on_device(span_);
    verify(r);  // no lease for writing is left
    const auto pass = [&](int to) {
      parts(span_, step,
            [&](uint64_t offset, uint64_t n) { vmem::check(vmem_prefetch(at(r, offset), n, to, nullptr)); });
      vmem::check(vmem_acquire(r.data(), span_, VMEM_READ, to, streams[to].get()));  // every block has moved
      vmem::check(vmem_release(r.data(), span_, streams[to].get()));
      streams[to].synchronize();
    };
    pass(1), pass(0);  // peer access is enabled now
    Meter m;
    for (int i = 0; i < kTimes; ++i) pass(1), pass(0);
    m.stop();
    verify(r);
    return m.rate(2 * kTimes * span_);
  }
  Sample driver_moves(const StreamOf (&streams)[2], uint64_t step) {
    const Managed managed(span_);
    memset(managed.data(), 1, span_);
    const auto pass = [&](int to) {
      parts(span_, step, [&](uint64_t offset, uint64_t n) { managed.prefetch_to(to, offset, n, streams[to].get()); });
      streams[to].synchronize();
    };
    pass(0), pass(1), pass(0);
    Meter m;
    for (int i = 0; i < kTimes; ++i) pass(1), pass(0);
    m.stop();
    return m.rate(2 * kTimes * span_);
  }
  Sample peer_copy(const StreamOf& stream, uint64_t step) {
    char* memory[2] = {};
    for (int d = 0; d < 2; ++d) {
      on(d, [&] {
        gpuapp::must(cudaMalloc(reinterpret_cast<void**>(&memory[d]), span_), "cudaMalloc");
        if (const cudaError_t e = cudaDeviceEnablePeerAccess(1 - d, 0); e != cudaSuccess)
          cudaGetLastError();  // already enabled, or unavailable
      });
    }
    const auto pass = [&](int to) {
      parts(span_, step, [&](uint64_t offset, uint64_t n) {
        gpuapp::must(cudaMemcpyPeerAsync(memory[to] + offset, to, memory[1 - to] + offset, 1 - to, n, stream.get()),
                     "cudaMemcpyPeerAsync");
      });
    };
    pass(1);
    stream.synchronize();
    Meter m;
    for (int i = 0; i < kTimes; ++i) pass(1), pass(0);
    stream.synchronize();
    m.stop();
    for (char* p : memory) cudaFree(p);
    return m.rate(2 * kTimes * span_);
  }
};

}  // namespace gpubench
