// A stream that the application blocks, on a GPU: 1,500 pairs of acquire and release are queued
// behind it, and 100 to 1,100 launches, more than its launch queue holds. A thread that overfills
// the queue waits in the driver; faults of an unrelated thread keep their normal duration. Every
// wait has a deadline, after which the stream is released.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "kernels.h"
#include "vmem/vmem.hpp"

namespace {

constexpr size_t kMiB = 1 << 20;
constexpr double kSlowest = 1.0;   // s: a longer fault waits for something
constexpr double kPatience = 5.0;  // s that a stream is blocked at most

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

#define VMEM_DO(call) ASSERT_EQ((call), 0) << vmem_last_error()
#define CUDA_DO(call) ASSERT_EQ((call), cudaSuccess)

class HeldQueue : public ::testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no GPU";
    VMEM_DO(vmem_set("device", "auto"));
    VMEM_DO(vmem_set("host_budget", "512MiB"));
    VMEM_DO(vmem_set("device_budget", "256MiB"));
    CUDA_DO(cudaHostAlloc(reinterpret_cast<void**>(&gate_), 64, cudaHostAllocPortable));
    std::memset(gate_, 0, 64);
    CUDA_DO(cudaMalloc(reinterpret_cast<void**>(&word_), 64));
    // Load all kernels now: loading a kernel waits for every stream, also for a blocked one.
    vmem::gpu::load_all();
    let_go();
    vmem::gpu::stand_still(nullptr, gate_);
    vmem::gpu::add(nullptr, word_, 1, 1);
    CUDA_DO(cudaDeviceSynchronize());
    VMEM_DO(vmem_alloc(&leased_, 64 * kMiB, 0));
    VMEM_DO(vmem_alloc(&host_, kHost, VMEM_HOST_ONLY));
    std::memset(host_, 1, kHost);
    alone_ = bystander([end = now() + 1.0] { return now() > end; });
    ASSERT_GT(alone_, 0);
  }
  void TearDown() override {
    if (gate_ == nullptr) return;
    let_go();
    cudaDeviceSynchronize();
    vmem_shutdown();
    cudaFree(word_);
    cudaFreeHost(gate_);
  }
  void hold(cudaStream_t s) {
    __atomic_store_n(gate_, 0, __ATOMIC_RELEASE);
    vmem::gpu::stand_still(s, gate_);
  }
  void let_go() { __atomic_store_n(gate_, 1, __ATOMIC_RELEASE); }
  // Returns the seconds of the slowest fault of this thread until `done` returns true.
  double bystander(const std::function<bool()>& done) {
    double worst = 0;
    while (!done()) {
      const double start = now();
      (void)*(static_cast<const volatile char*>(host_) + at_ % kHost);
      worst = std::max(worst, now() - start);
      at_ += 14 * kMiB;  // skips what was read ahead
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return worst;
  }
  // Runs `work` behind the blocked stream on its own thread, and a bystander beside it for
  // `seconds`. Releases the stream when both have ended, or when the bystander has been stuck for
  // kPatience.
  void beside(const char* what, double seconds, const std::function<void()>& work) {
    std::atomic<bool> worked{false}, looked{false};
    double worst = 0;
    std::thread worker([&] {
      work();
      worked = true;
    });
    std::thread looker([&] {
      worst = bystander([end = now() + seconds] { return now() > end; });
      looked = true;
    });
    const double end = now() + seconds + kPatience;
    while (!looked && now() < end) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    const bool stuck = !looked;
    const bool waited = !worked;
    let_go();
    looker.join();
    worker.join();
    std::printf("%s: slowest fault %.1f ms, alone %.1f ms%s\n", what, worst * 1e3, alone_ * 1e3,
                waited ? " (the work waited for the stream)" : "");
    EXPECT_FALSE(stuck) << what << ": a fault waited for the stream";
    EXPECT_LT(worst, std::max(kSlowest, 10 * alone_)) << what;
  }

  static constexpr size_t kHost = size_t{2} << 30;
  uint32_t* gate_ = nullptr;
  uint64_t* word_ = nullptr;
  void *leased_ = nullptr, *host_ = nullptr;
  std::atomic<size_t> at_{0};
  double alone_ = 0;
};

TEST_F(HeldQueue, ManyPairsOfAcquireAndRelease) {
  cudaStream_t s = nullptr;
  CUDA_DO(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  VMEM_DO(vmem_acquire(leased_, 64 * kMiB, VMEM_READ, 0, s));
  hold(s);
  std::atomic<int> pairs{0};
  beside("1500 pairs", 2.0, [&] {
    for (; pairs < 1500; ++pairs) {
      ASSERT_EQ(vmem_acquire(leased_, 2 * kMiB, VMEM_READ, 0, s), 0) << vmem_last_error();
      ASSERT_EQ(vmem_release(leased_, 2 * kMiB, s), 0) << vmem_last_error();
    }
  });
  EXPECT_EQ(pairs, 1500);
  VMEM_DO(vmem_release(leased_, 64 * kMiB, s));
  CUDA_DO(cudaStreamSynchronize(s));
  CUDA_DO(cudaStreamDestroy(s));
}

TEST_F(HeldQueue, ManyLaunches) {
  for (const int launches : {100, 500, 900, 1000, 1020, 1022, 1023, 1024, 1100}) {
    cudaStream_t s = nullptr;
    CUDA_DO(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    VMEM_DO(vmem_acquire(leased_, 64 * kMiB, VMEM_READ, 0, s));
    hold(s);
    beside((std::to_string(launches) + " launches").c_str(), 1.0, [&] {
      for (int i = 0; i < launches; ++i) vmem::gpu::add(s, word_, 1, 1);
      EXPECT_EQ(vmem_release(leased_, 64 * kMiB, s), 0) << vmem_last_error();
    });
    CUDA_DO(cudaStreamSynchronize(s));
    CUDA_DO(cudaStreamDestroy(s));
  }
}

}  // namespace
