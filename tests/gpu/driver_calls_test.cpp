// CUDA's own calls and its libraries on addresses of a region on physical handles: the rows of the
// table "What a program may do with blocks on a device" in docs/device-tier.md. Calls that may end
// with a lost device run in a child process.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "../system/child.h"
#include "../system/support.h"
#include "gpu_libraries.h"
#include "kernels.h"

namespace {

using systest::stamp;

constexpr size_t kBlock = 2 << 20;
constexpr size_t kWords = kBlock / 8;

#define VMEM_DO(call) ASSERT_EQ((call), 0) << vmem_last_error()
#define CUDA_DO(call)                                             \
  do {                                                            \
    const cudaError_t result_ = (call);                           \
    ASSERT_EQ(result_, cudaSuccess) << cudaGetErrorName(result_); \
  } while (false)

class DriverCalls : public systest::SystemTest {
 protected:
  void SetUp() override {
    SystemTest::SetUp();
    start(kBlock);
  }
  void TearDown() override {
    if (wrong_ != nullptr) {
      cudaStreamSynchronize(stream_);
      vmem_shutdown();
      cudaStreamDestroy(stream_);
      cudaFreeHost(wrong_);
      cudaGetLastError();
    }
    SystemTest::TearDown();
    vmem_set("device", "auto");
    vmem_set("device_block_size", "auto");
  }
  void start(size_t block) {
    configure({{"device", "handles"},
               {"device_block_size", std::to_string(block)},
               {"host_budget", "256MiB"},
               {"device_budget", "64MiB"}});
    if (wrong_ != nullptr) return;
    vmem::gpu::load_all();
    CUDA_DO(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    CUDA_DO(cudaHostAlloc(reinterpret_cast<void**>(&wrong_), 64, cudaHostAllocPortable));
    *wrong_ = 0;
  }
  static uint64_t* words(vmem::region& r) { return static_cast<uint64_t*>(r.data()); }
  static void set(uint64_t* w, size_t count, size_t first, uint64_t round) {
    for (size_t i = 0; i < count; ++i) w[i] = stamp(first + i, round);
  }
  static size_t wrong(const uint64_t* w, size_t count, size_t first, uint64_t round) {
    size_t bad = 0;
    for (size_t i = 0; i < count; ++i) bad += w[i] != stamp(first + i, round);
    return bad;
  }
  static std::vector<uint64_t> stamps(size_t count, size_t first, uint64_t round) {
    std::vector<uint64_t> v(count);
    set(v.data(), count, first, round);
    return v;
  }
  // Brings the blocks to the device and leaves them unleased.
  void bring(const void* at, size_t size, unsigned access = VMEM_READ) {
    VMEM_DO(vmem_acquire(at, size, access, 0, stream_));
    VMEM_DO(vmem_release(at, size, stream_));
    CUDA_DO(cudaStreamSynchronize(stream_));
    EXPECT_EQ(on_device(at, size), size);
  }
  static uint64_t on_device(const void* at, size_t size) {
    struct vmem_residency where = {};
    where.size = sizeof where;
    EXPECT_EQ(vmem_query(at, size, &where), 0) << vmem_last_error();
    return where.device_bytes;
  }
  size_t wrong_on_device(const uint64_t* w, size_t count, size_t first, uint64_t round) {
    *wrong_ = 0;
    // A copy from pageable memory may return before it is complete.
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    vmem::gpu::check_stamps(stream_, w, count, first, round, 1, wrong_);
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    return *wrong_;
  }

  cudaStream_t stream_ = nullptr;
  unsigned long long* wrong_ = nullptr;  // pinned
};

// One copy covers one block, or several blocks that are all in host memory or on the SSD.
TEST_F(DriverCalls, ACopyFromABlockThatNobodyLeasesIsRightWhereverItRests) {
  vmem::region r(5 * kBlock, 0);
  uint64_t* const w = words(r);
  set(w, 5 * kWords, 0, 1);
  bring(w, kBlock);
  uint64_t* device = nullptr;
  CUDA_DO(cudaMalloc(reinterpret_cast<void**>(&device), 3 * kBlock));
  std::vector<uint64_t> host(3 * kWords);
  struct Part {
    const char* where;
    size_t block, blocks;
  };
  for (const Part& part : {Part{"device", 0, 1}, Part{"host", 1, 1}, Part{"ssd", 2, 1}, Part{"host and ssd", 1, 3}}) {
    SCOPED_TRACE(part.where);
    const size_t first = part.block * kWords, count = part.blocks * kWords;
    VMEM_DO(vmem_evict(w + 2 * kWords, 3 * kBlock, VMEM_SSD));
    std::fill(host.begin(), host.end(), 0);
    CUDA_DO(cudaMemcpy(host.data(), w + first, count * 8, cudaMemcpyDefault));
    EXPECT_EQ(wrong(host.data(), count, first, 1), 0u);
    VMEM_DO(vmem_evict(w + 2 * kWords, 3 * kBlock, VMEM_SSD));
    CUDA_DO(cudaMemcpy(device, w + first, count * 8, cudaMemcpyDefault));
    EXPECT_EQ(wrong_on_device(device, count, first, 1), 0u);
    std::fill(host.begin(), host.end(), 0);
    CUDA_DO(cudaMemcpyAsync(host.data(), w + first, count * 8, cudaMemcpyDefault, stream_));
    CUDA_DO(cudaStreamSynchronize(stream_));
    EXPECT_EQ(wrong(host.data(), count, first, 1), 0u);
  }
  EXPECT_EQ(on_device(w, kBlock), kBlock) << "a copy moves nothing";
  CUDA_DO(cudaFree(device));
}

// A copy that names its direction works only if the blocks are where it says.
TEST_F(DriverCalls, AKindOfCopyThatNamesThePlaceHoldsWhereItIsTrue) {
  vmem::region r(2 * kBlock, 0);
  uint64_t* const w = words(r);
  set(w, 2 * kWords, 0, 1);
  bring(w, kBlock);
  std::vector<uint64_t> host(kWords);
  CUDA_DO(cudaMemcpy(host.data(), w, kBlock, cudaMemcpyDeviceToHost));
  EXPECT_EQ(wrong(host.data(), kWords, 0, 1), 0u);
  uint64_t* device = nullptr;
  CUDA_DO(cudaMalloc(reinterpret_cast<void**>(&device), kBlock));
  CUDA_DO(cudaMemcpy(device, w + kWords, kBlock, cudaMemcpyHostToDevice));
  EXPECT_EQ(wrong_on_device(device, kWords, kWords, 1), 0u);
  const cudaError_t refused = cudaMemcpy(host.data(), w + kWords, kBlock, cudaMemcpyDeviceToHost);
  std::printf("from the device, of a block that is not there: %s\n", cudaGetErrorName(refused));
  EXPECT_EQ(refused, cudaErrorInvalidValue);
  cudaGetLastError();
  bring(w + kWords, kBlock);  // nothing is lost
  CUDA_DO(cudaFree(device));
}

TEST_F(DriverCalls, WhatACopyWithoutALeaseWritesIsKeptInHostMemoryAndInChangedBlocks) {
  vmem::region r(3 * kBlock, 0);
  uint64_t* const w = words(r);
  set(w, 3 * kWords, 0, 1);
  VMEM_DO(vmem_evict(w + 2 * kWords, kBlock, VMEM_SSD));
  bring(w, kBlock, VMEM_READ | VMEM_WRITE);
  const auto next = stamps(3 * kWords, 0, 2);
  for (size_t b = 0; b < 3; ++b) {
    CUDA_DO(cudaMemcpy(w + b * kWords, next.data() + b * kWords, kBlock, cudaMemcpyDefault));
    CUDA_DO(cudaDeviceSynchronize());
  }
  EXPECT_EQ(on_device(w, 3 * kBlock), kBlock);
  EXPECT_EQ(wrong_on_device(w, kWords, 0, 2), 0u);
  VMEM_DO(vmem_evict(w, r.size(), VMEM_SSD));
  EXPECT_EQ(wrong(w, 3 * kWords, 0, 2), 0u);
}

// The library does not know of the store: when the block leaves the device, its old contents are
// used.
TEST_F(DriverCalls, WhatACopyWithoutALeaseWritesToAnUnchangedBlockIsThereUntilItLeaves) {
  vmem::region r(kBlock, 0);
  uint64_t* const w = words(r);
  set(w, kWords, 0, 1);
  VMEM_DO(vmem_evict(w, kBlock, VMEM_SSD));
  bring(w, kBlock);
  const auto next = stamps(kWords, 0, 2);
  CUDA_DO(cudaMemcpy(w, next.data(), kBlock, cudaMemcpyDefault));
  EXPECT_EQ(wrong_on_device(w, kWords, 0, 2), 0u);
  VMEM_DO(vmem_evict(w, kBlock, VMEM_SSD));
  const size_t lost = wrong(w, kWords, 0, 2), old = wrong(w, kWords, 0, 1);
  std::printf("an unchanged block that was copied to: %s\n", lost == 0 ? "kept" : old == 0 ? "as it came" : "torn");
  EXPECT_TRUE(lost == 0 || old == 0);
}

TEST_F(DriverCalls, MemsetWithoutALeaseSetsABlockOnTheDeviceAndIsRefusedElsewhere) {
  vmem::region r(3 * kBlock, 0);
  uint64_t* const w = words(r);
  set(w, 3 * kWords, 0, 1);
  VMEM_DO(vmem_evict(w + 2 * kWords, kBlock, VMEM_SSD));
  bring(w, kBlock, VMEM_READ | VMEM_WRITE);
  for (size_t b = 1; b < 3; ++b) {
    const cudaError_t refused = cudaMemset(w + b * kWords, 7, kBlock);
    std::printf("cudaMemset of a block that is not on the device: %s\n", cudaGetErrorName(refused));
    EXPECT_EQ(refused, cudaErrorInvalidValue);
    cudaGetLastError();
  }
  CUDA_DO(cudaMemset(w, 7, kBlock));
  CUDA_DO(cudaDeviceSynchronize());
  VMEM_DO(vmem_evict(w, kBlock, VMEM_SSD));
  EXPECT_EQ(static_cast<size_t>(std::count(w, w + kWords, 0x0707070707070707u)), kWords);
  EXPECT_EQ(wrong(w + kWords, 2 * kWords, kWords, 1), 0u) << "nothing was changed";
}

class DriverCallsChild : public DriverCalls {};

// Runs one call over a block on the device and one elsewhere, in a process of its own.
constexpr const char* kCalls[] = {"copy from", "copy to", "memset", "memset, absent first"};

TEST_F(DriverCallsChild, DISABLED_OneCallOverAPresentAndAnAbsentBlock) {
  const char* const name = getenv("VMEM_TEST_CALL");
  ASSERT_NE(name, nullptr);
  const std::string call(name);
  const bool absent_first = call.find("absent first") != std::string::npos;
  vmem::region r(2 * kBlock, 0);
  uint64_t* const w = words(r);
  set(w, 2 * kWords, 0, 1);
  bring(absent_first ? w + kWords : w, kBlock, VMEM_READ | VMEM_WRITE);
  auto host = stamps(2 * kWords, 0, 2);
  cudaError_t e = cudaSuccess;
  if (call.starts_with("copy from"))
    e = cudaMemcpy(host.data(), w, 2 * kBlock, cudaMemcpyDefault);
  else if (call.starts_with("copy to"))
    e = cudaMemcpy(w, host.data(), 2 * kBlock, cudaMemcpyDefault);
  else
    e = cudaMemset(w, 7, 2 * kBlock);
  const cudaError_t after = cudaDeviceSynchronize();
  if (e == cudaSuccess) e = after;
  if (after != cudaSuccess) {
    std::printf("%s: %s, and the device is lost\n", name, cudaGetErrorName(e));
    std::fflush(stdout);
    // The data in host memory is intact, an acquire says why it fails, and the process ends.
    EXPECT_EQ(wrong(absent_first ? w : w + kWords, kWords, absent_first ? 0 : kWords, 1), 0u);
    EXPECT_EQ(vmem_acquire(w, kBlock, VMEM_READ, 0, stream_), -EIO);
    return;
  }
  cudaGetLastError();
  VMEM_DO(vmem_evict(w, r.size(), VMEM_SSD));
  size_t old = wrong(w, 2 * kWords, 0, 1), now = wrong(w, 2 * kWords, 0, 2);
  const auto sevens = static_cast<size_t>(std::count(w, w + 2 * kWords, 0x0707070707070707u));
  const size_t read = wrong(host.data(), 2 * kWords, 0, 1);
  std::printf("%s: %s, %zu words old, %zu new, %zu set, %zu read wrong\n", name, cudaGetErrorName(e), 2 * kWords - old,
              2 * kWords - now, sevens, read);
  if (call.starts_with("copy from")) {
    EXPECT_EQ(old, 0u);
    EXPECT_TRUE(e != cudaSuccess || read == 0) << read;
  } else if (e == cudaSuccess) {
    EXPECT_EQ(call.starts_with("memset") ? 2 * kWords - sevens : now, 0u) << "it said that it was done";
  } else {
    EXPECT_EQ(old, 0u) << "it was refused";
  }
}

TEST_F(DriverCalls, OneCallOverAPresentAndAnAbsentBlockIsRightOrRefusedOrLosesTheDevice) {
  vmem_shutdown();
  for (const char* const call : kCalls) {
    std::fflush(stdout);
    const pid_t child = systest::start_child("DriverCallsChild.DISABLED_OneCallOverAPresentAndAnAbsentBlock",
                                             {{"VMEM_TEST_CALL", call}, {"VMEM_TEST_MUST_PASS", "1"}});
    EXPECT_EQ(systest::wait_for_child(child, 20), 0) << call;
  }
}

TEST_F(DriverCalls, OneCallOverManyLeasedBlocksIsRight) {
  for (const size_t block : {kBlock, 4 * kBlock}) {
    vmem_shutdown();
    start(block);
    vmem::region r(8 * kBlock, 0);
    uint64_t* const w = words(r);
    const size_t n = 8 * kWords, half = n / 2, odd = kWords / 2 + 3;
    set(w, n, 0, 1);
    r.evict();
    auto host = stamps(n, 0, 2);
    VMEM_DO(vmem_acquire(w, r.size(), VMEM_READ | VMEM_WRITE, 0, stream_));
    std::vector<uint64_t> seen(n);
    CUDA_DO(cudaMemcpyAsync(seen.data(), w, n * 8, cudaMemcpyDefault, stream_));
    CUDA_DO(cudaStreamSynchronize(stream_));
    EXPECT_EQ(wrong(seen.data(), n, 0, 1), 0u);
    // At unaligned offsets, across borders of blocks.
    CUDA_DO(cudaMemcpyAsync(w + odd, host.data() + odd, (n - 2 * odd) * 8, cudaMemcpyHostToDevice, stream_));
    CUDA_DO(cudaMemcpyAsync(seen.data(), w, n * 8, cudaMemcpyDeviceToHost, stream_));
    CUDA_DO(cudaStreamSynchronize(stream_));
    EXPECT_EQ(wrong(seen.data(), odd, 0, 1) + wrong(seen.data() + odd, n - 2 * odd, odd, 2) +
                  wrong(seen.data() + n - odd, odd, n - odd, 1),
              0u);
    CUDA_DO(cudaMemsetAsync(w + odd, 7, (half - odd) * 8, stream_));
    CUDA_DO(cudaMemcpyAsync(w + half + odd, w + odd, (half - odd) * 8, cudaMemcpyDeviceToDevice, stream_));
    // A pitched copy across borders of blocks: every second row of 24,000 bytes.
    CUDA_DO(cudaMemcpy2DAsync(w, 48000, host.data(), 24000, 24000, 100, cudaMemcpyDefault, stream_));
    VMEM_DO(vmem_release(w, r.size(), stream_));
    CUDA_DO(cudaStreamSynchronize(stream_));
    r.evict();
    size_t bad = 0;
    for (size_t row = 0; row < 100; ++row) bad += wrong(w + row * 6000, 3000, row * 3000, 2);
    EXPECT_EQ(bad, 0u);
    EXPECT_EQ(static_cast<size_t>(std::count(w + 600000, w + half, 0x0707070707070707u)), half - 600000);
    EXPECT_EQ(static_cast<size_t>(std::count(w + half + odd, w + n, 0x0707070707070707u)), half - odd);
  }
}

// Under the lease no block moves, so no block has to come from a device while the driver holds its
// locks.
TEST_F(DriverCalls, ACopyUnderAHostLeaseIsRightWhereverTheBlocksWere) {
  vmem::region r(6 * kBlock, 0);
  uint64_t* const w = words(r);
  for (uint64_t round = 1; round <= 4; ++round) {
    set(w, 6 * kWords, 0, round);
    VMEM_DO(vmem_evict(w + 4 * kWords, 2 * kBlock, VMEM_SSD));
    bring(w + kWords, 2 * kBlock, round % 2 == 0 ? VMEM_READ : VMEM_READ | VMEM_WRITE);
    VMEM_DO(vmem_acquire(w, r.size(), VMEM_READ | VMEM_WRITE, VMEM_HOST, nullptr));
    std::vector<uint64_t> seen(6 * kWords);
    CUDA_DO(cudaMemcpy(seen.data(), w, r.size(), cudaMemcpyDefault));
    EXPECT_EQ(wrong(seen.data(), 6 * kWords, 0, round), 0u);
    const auto next = stamps(6 * kWords, 0, round + 10);
    CUDA_DO(cudaMemcpy(w, next.data(), r.size(), cudaMemcpyDefault));
    CUDA_DO(cudaDeviceSynchronize());
    VMEM_DO(vmem_release(w, r.size(), nullptr));
    VMEM_DO(vmem_evict(w, r.size(), VMEM_SSD));
    EXPECT_EQ(wrong(w, 6 * kWords, 0, round + 10), 0u);
  }
}

TEST_F(DriverCalls, AttributesSayDeviceMemoryWhereTheBlockIsOnTheDevice) {
  vmem::region r(2 * kBlock, 0);
  uint64_t* const w = words(r);
  set(w, 2 * kWords, 0, 1);
  const auto type_of = [](const void* p) {
    cudaPointerAttributes a = {};
    EXPECT_EQ(cudaPointerGetAttributes(&a, p), cudaSuccess);
    if (a.type == cudaMemoryTypeDevice) {
      EXPECT_EQ(a.device, 0);
      EXPECT_EQ(a.devicePointer, p);
      EXPECT_EQ(a.hostPointer, nullptr);
    }
    return a.type;
  };
  EXPECT_EQ(type_of(w), cudaMemoryTypeUnregistered);
  bring(w, kBlock);
  EXPECT_EQ(type_of(w), cudaMemoryTypeDevice);
  EXPECT_EQ(type_of(w + kWords - 1), cudaMemoryTypeDevice);
  EXPECT_EQ(type_of(w + kWords), cudaMemoryTypeUnregistered);
  VMEM_DO(vmem_acquire(w, 2 * kBlock, VMEM_READ, 0, stream_));
  EXPECT_EQ(type_of(w + kWords), cudaMemoryTypeDevice);
  VMEM_DO(vmem_release(w, 2 * kBlock, stream_));
  r.evict();
  EXPECT_EQ(type_of(w), cudaMemoryTypeUnregistered);
}

TEST_F(DriverCalls, TheFirstIpcHandleIsRefused) {
  vmem::region r(kBlock, 0);
  bring(r.data(), kBlock, VMEM_WRITE);
  cudaIpcMemHandle_t handle = {};
  const cudaError_t refused = cudaIpcGetMemHandle(&handle, r.data());
  std::printf("cudaIpcGetMemHandle: %s\n", cudaGetErrorName(refused));
  EXPECT_NE(refused, cudaSuccess);
  cudaGetLastError();
}

// The graph is captured and instantiated once, under a lease, and replayed under other leases,
// after its blocks have been moved elsewhere.
TEST_F(DriverCalls, AGraphIsReplayedOverBlocksThatLeftAndCameBack) {
  vmem::region r(6 * kBlock, 0), other(32 * kBlock, 0);
  uint64_t* const w = words(r);
  set(w, 6 * kWords, 0, 1);
  cudaStream_t capturing = nullptr;
  CUDA_DO(cudaStreamCreateWithFlags(&capturing, cudaStreamNonBlocking));
  VMEM_DO(vmem_acquire(w, r.size(), VMEM_READ | VMEM_WRITE, 0, stream_));
  CUDA_DO(cudaStreamBeginCapture(capturing, cudaStreamCaptureModeGlobal));
  vmem::gpu::add(capturing, w, 2 * kWords, 1);                                            // blocks 0 and 1
  CUDA_DO(cudaMemcpyAsync(w + 2 * kWords, w, 2 * kBlock, cudaMemcpyDefault, capturing));  // to blocks 2 and 3
  CUDA_DO(cudaMemsetAsync(w + 4 * kWords, 7, kBlock + kBlock / 2, capturing));            // block 4 and half of block 5
  vmem::gpu::add(capturing, w + 4 * kWords, 2 * kWords, 5);
  cudaGraph_t graph = nullptr;
  CUDA_DO(cudaStreamEndCapture(capturing, &graph));
  cudaGraphExec_t replay = nullptr;
  CUDA_DO(cudaGraphInstantiate(&replay, graph, 0));
  VMEM_DO(vmem_release(w, r.size(), stream_));
  constexpr uint64_t kRounds = 24;
  for (uint64_t round = 1; round <= kRounds; ++round) {
    VMEM_DO(vmem_acquire(w, r.size(), VMEM_READ | VMEM_WRITE, 0, stream_));
    CUDA_DO(cudaGraphLaunch(replay, stream_));
    VMEM_DO(vmem_release(w, r.size(), stream_));
    if (round % 3 == 0) {  // other blocks take the memory they were in
      bring(other.data(), other.size());
      EXPECT_LT(on_device(w, r.size()), r.size());
    } else {
      VMEM_DO(vmem_evict(w, r.size(), round % 2 == 0 ? VMEM_SSD : VMEM_HOST));
      EXPECT_EQ(on_device(w, r.size()), 0u);
    }
    if (round % 5 != 0) continue;
    size_t bad = 0;
    for (size_t i = 0; i < 2 * kWords; ++i) {
      bad += w[i] != stamp(i, 1) + round || w[2 * kWords + i] != stamp(i, 1) + round;
      const uint64_t was = i < kWords + kWords / 2 ? 0x0707070707070707u + 5 : stamp(4 * kWords + i, 1) + 5 * round;
      bad += w[4 * kWords + i] != was;
    }
    ASSERT_EQ(bad, 0u) << round;
  }
  CUDA_DO(cudaGraphExecDestroy(replay));
  CUDA_DO(cudaGraphDestroy(graph));
  CUDA_DO(cudaStreamDestroy(capturing));
}

// Multiplies matrices of 4 MiB, two blocks each. All blocks come from the SSD before each
// multiplication.
TEST_F(DriverCalls, CublasMultipliesMatricesInARegion) {
  vmem::gpu::Library cublas("libcublas.so");
  if (!cublas) GTEST_SKIP() << "no libcublas";
  using Handle = void*;
  const auto create = cublas.get<int (*)(Handle*)>("cublasCreate_v2");
  const auto set_stream = cublas.get<int (*)(Handle, cudaStream_t)>("cublasSetStream_v2");
  const auto sgemm = cublas.get<int (*)(Handle, int, int, int, int, int, const float*, const float*, int, const float*,
                                        int, const float*, float*, int)>("cublasSgemm_v2");
  const auto destroy = cublas.get<int (*)(Handle)>("cublasDestroy_v2");
  ASSERT_TRUE(create != nullptr && set_stream != nullptr && sgemm != nullptr && destroy != nullptr);
  Handle handle = nullptr;
  ASSERT_EQ(create(&handle), 0);
  ASSERT_EQ(set_stream(handle, stream_), 0);
  constexpr int kN = 1024;
  constexpr size_t kSize = size_t{kN} * kN;
  vmem::region r(3 * kSize * sizeof(float), 0);
  auto* const a = static_cast<float*>(r.data());
  float *const b = a + kSize, *const c = b + kSize;
  for (int round = 1; round <= 4; ++round) {
    for (size_t i = 0; i < kSize; ++i) {
      a[i] = i / kN == i % kN ? static_cast<float>(round + static_cast<int>(i % kN)) : 0;  // diagonal
      b[i] = static_cast<float>(i % 251);
    }
    r.evict();
    const std::vector<vmem_range> ranges{{a, 2 * kSize * 4, VMEM_READ, 0}, {c, kSize * 4, VMEM_READ | VMEM_WRITE, 0}};
    VMEM_DO(vmem_acquire_ranges(ranges.data(), ranges.size(), 0, stream_));
    const float one = 1, none = 0;
    ASSERT_EQ(sgemm(handle, 0, 0, kN, kN, kN, &one, a, kN, b, kN, &none, c, kN), 0);
    VMEM_DO(vmem_release_ranges(ranges.data(), ranges.size(), stream_));
    CUDA_DO(cudaStreamSynchronize(stream_));
    size_t bad = 0;
    for (size_t i = 0; i < kSize; ++i)
      bad += c[i] != static_cast<float>(round + static_cast<int>(i % kN)) * static_cast<float>(i % 251);
    ASSERT_EQ(bad, 0u) << round;
  }
  EXPECT_EQ(destroy(handle), 0);
}

// Doubles each number by a convolution of one point; the result is cut off at 0.
TEST_F(DriverCalls, CudnnConvolvesWhatIsInARegion) {
  vmem::gpu::Library cudnn("libcudnn.so");
  if (!cudnn) GTEST_SKIP() << "no libcudnn";
  using Ref = void*;
  const auto create = cudnn.get<int (*)(Ref*)>("cudnnCreate");
  const auto set_stream = cudnn.get<int (*)(Ref, cudaStream_t)>("cudnnSetStream");
  const auto make_tensor = cudnn.get<int (*)(Ref*)>("cudnnCreateTensorDescriptor");
  const auto set_tensor = cudnn.get<int (*)(Ref, int, int, int, int, int, int)>("cudnnSetTensor4dDescriptor");
  const auto make_filter = cudnn.get<int (*)(Ref*)>("cudnnCreateFilterDescriptor");
  const auto set_filter = cudnn.get<int (*)(Ref, int, int, int, int, int, int)>("cudnnSetFilter4dDescriptor");
  const auto make_convolution = cudnn.get<int (*)(Ref*)>("cudnnCreateConvolutionDescriptor");
  const auto set_convolution =
      cudnn.get<int (*)(Ref, int, int, int, int, int, int, int, int)>("cudnnSetConvolution2dDescriptor");
  const auto convolve = cudnn.get<int (*)(Ref, const void*, Ref, const void*, Ref, const void*, Ref, int, void*, size_t,
                                          const void*, Ref, void*)>("cudnnConvolutionForward");
  const auto make_activation = cudnn.get<int (*)(Ref*)>("cudnnCreateActivationDescriptor");
  const auto set_activation = cudnn.get<int (*)(Ref, int, int, double)>("cudnnSetActivationDescriptor");
  const auto activate =
      cudnn.get<int (*)(Ref, Ref, const void*, Ref, const void*, const void*, Ref, void*)>("cudnnActivationForward");
  const auto destroy = cudnn.get<int (*)(Ref)>("cudnnDestroy");
  ASSERT_TRUE(create != nullptr && set_stream != nullptr && make_tensor != nullptr && set_tensor != nullptr &&
              make_filter != nullptr && set_filter != nullptr && make_convolution != nullptr &&
              set_convolution != nullptr && convolve != nullptr && make_activation != nullptr &&
              set_activation != nullptr && activate != nullptr && destroy != nullptr);
  Ref handle = nullptr, tensor = nullptr, filter = nullptr, convolution = nullptr, relu = nullptr;
  ASSERT_EQ(create(&handle), 0);
  ASSERT_EQ(set_stream(handle, stream_), 0);
  constexpr int kChannels = 4, kSide = 512;
  constexpr size_t kPlane = size_t{kSide} * kSide, kCount = kChannels * kPlane;  // 4 MiB of floats: two blocks
  ASSERT_EQ(make_tensor(&tensor) + set_tensor(tensor, 0, 0, 1, kChannels, kSide, kSide), 0);
  ASSERT_EQ(make_filter(&filter) + set_filter(filter, 0, 0, kChannels, kChannels, 1, 1), 0);
  ASSERT_EQ(make_convolution(&convolution) + set_convolution(convolution, 0, 0, 1, 1, 1, 1, 1, 0), 0);
  ASSERT_EQ(make_activation(&relu) + set_activation(relu, 1, 0, 0), 0);
  vmem::region r(3 * kCount * sizeof(float), 0);
  auto* const x = static_cast<float*>(r.data());
  float *const y = x + kCount, *const weights = y + kCount;
  for (int round = 1; round <= 3; ++round) {
    for (size_t i = 0; i < kCount; ++i) x[i] = static_cast<float>(static_cast<int>((i + round) % 1000) - 500);
    for (int i = 0; i < kChannels * kChannels; ++i) weights[i] = i % (kChannels + 1) == 0 ? 2 : 0;
    r.evict();
    VMEM_DO(vmem_acquire(x, r.size(), VMEM_READ | VMEM_WRITE, 0, stream_));
    const float one = 1, none = 0;
    ASSERT_EQ(convolve(handle, &one, tensor, x, filter, weights, convolution, 0, nullptr, 0, &none, tensor, y), 0);
    ASSERT_EQ(activate(handle, relu, &one, tensor, y, &none, tensor, y), 0);
    VMEM_DO(vmem_release(x, r.size(), stream_));
    CUDA_DO(cudaStreamSynchronize(stream_));
    size_t bad = 0;
    for (size_t i = 0; i < kCount; ++i)
      bad += y[i] != static_cast<float>(2 * std::max(static_cast<int>((i + round) % 1000) - 500, 0));
    ASSERT_EQ(bad, 0u) << round;
  }
  EXPECT_EQ(destroy(handle), 0);
}

// Sums over all devices, each with its own region. With one device NCCL only copies.
TEST_F(DriverCalls, NcclSumsWhatIsInRegions) {
  vmem::gpu::Library nccl("libnccl.so");
  if (!nccl) GTEST_SKIP() << "no libnccl";
  using Comm = void*;
  const auto init = nccl.get<int (*)(Comm*, int, const int*)>("ncclCommInitAll");
  const auto all_reduce = nccl.get<int (*)(const void*, void*, size_t, int, int, Comm, cudaStream_t)>("ncclAllReduce");
  const auto group_start = nccl.get<int (*)()>("ncclGroupStart");
  const auto group_end = nccl.get<int (*)()>("ncclGroupEnd");
  const auto destroy = nccl.get<int (*)(Comm)>("ncclCommDestroy");
  ASSERT_TRUE(init != nullptr && all_reduce != nullptr && group_start != nullptr && group_end != nullptr &&
              destroy != nullptr);
  int count = 0;
  CUDA_DO(cudaGetDeviceCount(&count));
  const auto devices = static_cast<size_t>(count);
  std::printf("%d devices\n", count);
  std::vector<Comm> comms(devices);
  ASSERT_EQ(init(comms.data(), count, nullptr), 0);
  constexpr size_t kCount = 4 * kWords;
  std::vector<std::unique_ptr<vmem::region>> from, to;
  std::vector<cudaStream_t> streams(devices);
  for (size_t d = 0; d < devices; ++d) {
    CUDA_DO(cudaSetDevice(static_cast<int>(d)));
    CUDA_DO(cudaStreamCreateWithFlags(&streams[d], cudaStreamNonBlocking));
    from.push_back(std::make_unique<vmem::region>(kCount * 8, 0));
    to.push_back(std::make_unique<vmem::region>(kCount * 8, 0));
  }
  for (uint64_t round = 1; round <= 3; ++round) {
    for (size_t d = 0; d < devices; ++d) {
      set(words(*from[d]), kCount, d, round);
      from[d]->evict();
      VMEM_DO(vmem_acquire(from[d]->data(), kCount * 8, VMEM_READ, static_cast<int>(d), streams[d]));
      VMEM_DO(vmem_acquire(to[d]->data(), kCount * 8, VMEM_READ | VMEM_WRITE, static_cast<int>(d), streams[d]));
    }
    constexpr int kUint64 = 5, kSum = 0;
    ASSERT_EQ(group_start(), 0);
    for (size_t d = 0; d < devices; ++d)
      ASSERT_EQ(all_reduce(from[d]->data(), to[d]->data(), kCount, kUint64, kSum, comms[d], streams[d]), 0);
    ASSERT_EQ(group_end(), 0);
    for (size_t d = 0; d < devices; ++d) {
      VMEM_DO(vmem_release(from[d]->data(), kCount * 8, streams[d]));
      VMEM_DO(vmem_release(to[d]->data(), kCount * 8, streams[d]));
      CUDA_DO(cudaStreamSynchronize(streams[d]));
    }
    for (size_t d = 0; d < devices; ++d) {
      size_t bad = 0;
      for (size_t i = 0; i < kCount; ++i) {
        uint64_t sum = 0;
        for (size_t k = 0; k < devices; ++k) sum += stamp(k + i, round);
        bad += words(*to[d])[i] != sum;
      }
      ASSERT_EQ(bad, 0u) << d;
    }
  }
  from.clear();
  to.clear();
  for (size_t d = 0; d < devices; ++d) {
    destroy(comms[d]);
    cudaStreamDestroy(streams[d]);
  }
  CUDA_DO(cudaSetDevice(0));
}

}  // namespace
