// Kernels that page data in, on a GPU: a soak that compares every word of every block while blocks
// come and go, and the cost of a fault. Usage: kernel_paging_test [--seconds S] [gtest's
// arguments]. The device's clock ends every wait of a kernel.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "common/hooks.h"
#include "device/cuda/cuda_device.h"
#include "gather_work.h"
#include "paging_work.h"
#include "vmem/detail/paging_protocol.h"
#include "vmem/vmem.h"

namespace {

using vmem::gpu::PagingResult;
using vmem::paging::Answer;

constexpr size_t kMiB = size_t{1} << 20;
constexpr unsigned kBoth = VMEM_READ | VMEM_WRITE;
unsigned seconds = 5;
size_t block_size = 2 * kMiB;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void must(cudaError_t e, const char* what) {
  if (e == cudaSuccess) return;
  std::printf("FAILED: %s: %s\n", what, cudaGetErrorString(e));
  std::fflush(stdout);
  _exit(1);
}
#define MUST(call) must(call, #call)

unsigned* device_words(size_t count) {
  void* words = nullptr;
  MUST(cudaMalloc(&words, 4 * count));
  return static_cast<unsigned*>(words);
}

class KernelPagingCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no GPU";
    vmem::api::test_hooks().make_devices = vmem::device::make_cuda_handles;
    // At the end of each range the log says where the serving thread spent its time.
    vmem_set("log", "info");
    MUST(cudaSetDevice(0));
    MUST(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    void* page = nullptr;
    MUST(cudaHostAlloc(&page, 4096, cudaHostAllocPortable | cudaHostAllocMapped));
    result_ = new (page) PagingResult;
  }
  void TearDown() override {
    if (result_ == nullptr) return;
    vmem_shutdown();
    if (state_ != nullptr) MUST(cudaFree(state_));
    MUST(cudaStreamDestroy(stream_));
    MUST(cudaFreeHost(result_));
    vmem::api::test_hooks().make_devices = nullptr;
  }
  void start(size_t device_mib, size_t range_mib, size_t host_mib) {
    const auto set = [](const char* name, const std::string& value) {
      ASSERT_EQ(vmem_set(name, value.c_str()), 0) << vmem_last_error();
    };
    set("device_budget", std::to_string(device_mib) + "MiB");
    set("device_block_size", std::to_string(block_size));
    set("host_budget", std::to_string(host_mib) + "MiB");
    set("staging_share", "90");
    blocks_ = static_cast<unsigned>(range_mib * kMiB / block_size);
    ASSERT_EQ(vmem_alloc(&at_, blocks_ * block_size, 0), 0) << vmem_last_error();
    state_ = device_words(2 * blocks_);
    MUST(cudaMemset(state_, 0, 8 * blocks_));
    MUST(cudaDeviceSynchronize());
  }
  void open(unsigned access, size_t budget_mib = 0) {
    ASSERT_EQ(vmem_kernel_begin(&kernel_, at_, blocks_ * block_size, access, 0, budget_mib * kMiB, &view_), 0)
        << vmem_last_error();
  }
  void close() {
    ASSERT_EQ(vmem_kernel_end(kernel_, stream_), 0) << vmem_last_error();
    MUST(cudaStreamSynchronize(stream_));
  }
  static struct vmem_device_stats stats(int device = 0) {
    struct vmem_device_stats out = {};
    out.size = sizeof out;
    EXPECT_EQ(vmem_device_stats(device, &out), 0) << vmem_last_error();
    return out;
  }
  // Waits for the kernels. If they do not end, a watchdog on the host reports where they are.
  void finish(const char* what, double limit) {
    for (const double begin = now(); cudaStreamQuery(stream_) == cudaErrorNotReady; usleep(200)) {
      if (now() - begin < limit) continue;
      std::printf("FAILED: %s runs for %.0f s: %llu turns, %llu wrong\n", what, limit, result_->turns, result_->wrong);
      std::fflush(stdout);
      _exit(1);
    }
    MUST(cudaStreamSynchronize(stream_));
  }
  void expect_right(const char* what) {
    EXPECT_EQ(result_->wrong, 0u) << what;
    for (unsigned i = 0; i < 16; ++i) EXPECT_EQ(result_->refused[i], 0u) << what << ": refused with answer " << i;
  }
  void reset() { *result_ = PagingResult{}; }

  // Visits random blocks with that many groups, and prints a line with the cost.
  void timed(const char* name, const std::vector<unsigned>& list, unsigned groups, bool warps, size_t words) {
    unsigned* const device_list = device_words(list.size() + 1);
    MUST(cudaMemcpy(device_list + 1, list.data(), 4 * list.size(), cudaMemcpyHostToDevice));
    MUST(cudaMemset(device_list, 0, 4));
    MUST(cudaDeviceSynchronize());
    reset();
    const auto before = stats();
    const double begin = now();
    vmem::gpu::visit(stream_, view_, state_, device_list + 1, static_cast<unsigned>(list.size()), device_list, groups,
                     warps, words, result_);
    MUST(cudaGetLastError());
    finish(name, 120);
    const double took = now() - begin;
    const auto after = stats();
    const auto in = static_cast<double>(after.in_bytes - before.in_bytes);
    std::printf(
        "%-52s %6zu visits %6.0f blocks in %8.1f ms %6.1f us a visit %6.1f GB/s in, %5.1f out, slowest %.2f ms\n", name,
        list.size(), in / block_size, took * 1e3, took * 1e6 / static_cast<double>(list.size()), in / took / 1e9,
        static_cast<double>(after.out_bytes - before.out_bytes) / took / 1e9,
        static_cast<double>(result_->slowest_ns) / 1e6);
    expect_right(name);
    EXPECT_EQ(result_->turns, list.size());
    MUST(cudaFree(device_list));
  }

  cudaStream_t stream_ = nullptr;
  PagingResult* result_ = nullptr;
  unsigned* state_ = nullptr;  // for each block: version, lock
  unsigned blocks_ = 0;
  void* at_ = nullptr;
  struct vmem_kernel* kernel_ = nullptr;
  vmem_kernel_view view_ = {};
};

TEST_F(KernelPagingCuda, AKernelIsToldWhatItMayNotDo) {
  start(64, 128, 512);
  open(VMEM_READ, 32);
  void* page = nullptr;
  MUST(cudaHostAlloc(&page, 64, cudaHostAllocMapped));
  auto* const answers = static_cast<unsigned*>(page);
  vmem::gpu::ask_wrong(stream_, view_, false, 16, answers);
  finish("asking wrong", 60);
  EXPECT_EQ(answers[0], static_cast<unsigned>(Answer::out_of_range));
  EXPECT_EQ(answers[1], static_cast<unsigned>(Answer::too_many));
  EXPECT_EQ(answers[2], static_cast<unsigned>(Answer::read_only));
  EXPECT_EQ(answers[3], static_cast<unsigned>(Answer::present));
  EXPECT_EQ(answers[4], static_cast<unsigned>(Answer::would_deadlock));
  close();
  MUST(cudaFreeHost(page));
}

TEST_F(KernelPagingCuda, EveryWordIsRightWhileBlocksComeAndGo) {
  start(512, 2048, 4096);
  open(kBoth, 256);
  const double begin = now();
  vmem::gpu::soak(stream_, view_, state_, 264, uint64_t{seconds} * 1000000000, ~0u, 1, true, result_);
  MUST(cudaGetLastError());
  finish("the soak", seconds + 60);
  const auto after = stats();
  std::printf(
      "soak %.1f s: %llu turns, %llu stores, %llu skipped, %llu wrong, slowest acquire %.2f ms, %.1f GB in, "
      "%.1f GB out\n",
      now() - begin, result_->turns, result_->stores, result_->skipped, result_->wrong,
      static_cast<double>(result_->slowest_ns) / 1e6, static_cast<double>(after.in_bytes) / 1e9,
      static_cast<double>(after.out_bytes) / 1e9);
  expect_right("the soak");
  EXPECT_GT(result_->turns, 1000u);
  EXPECT_GT(after.in_bytes, 2 * blocks_ * block_size) << "blocks came again";
  close();
  // Every block, read by later kernels and by the CPU, has what the kernels stored.
  std::vector<unsigned> all(blocks_);
  std::iota(all.begin(), all.end(), 0);
  open(VMEM_READ, 256);
  timed("all blocks once more, every word", all, 132, false, block_size / 4);
  close();
  std::vector<unsigned> state(2 * blocks_);
  MUST(cudaMemcpy(state.data(), state_, 8 * blocks_, cudaMemcpyDeviceToHost));
  size_t wrong = 0, stored = 0;
  const auto* const words = static_cast<const uint32_t*>(at_);
  for (uint32_t b = 0; b < blocks_; ++b) {
    EXPECT_EQ(state[2 * b + 1], 0u) << "somebody has block " << b << " yet";
    stored += state[2 * b] != 0 ? 1 : 0;
    for (uint32_t k = 0; k < block_size / 4; k += 1021) {
      const uint32_t version = state[2 * b];
      const uint32_t want = version == 0 ? 0 : (b * 2654435761u ^ version * 40503u) + k * 2246822519u;
      wrong += words[size_t{b} * (block_size / 4) + k] != want ? 1 : 0;
    }
  }
  EXPECT_EQ(wrong, 0u) << "words that the CPU reads";
  EXPECT_GT(stored, blocks_ / 2);
}

// Each device has a range of its own, and blocks that leave it may spill to the other device. Then
// each reads the other's stores.
TEST_F(KernelPagingCuda, TwoDevicesAskAtOnce) {
  int devices = 0;
  MUST(cudaGetDeviceCount(&devices));
  if (devices < 2) GTEST_SKIP() << "one GPU";
  start(512, 1024, 4096);
  struct Side {
    void* at = nullptr;
    unsigned* state = nullptr;
    cudaStream_t stream = nullptr;
    struct vmem_kernel* kernel = nullptr;
    vmem_kernel_view view = {};
  } sides[2];
  const size_t bytes = blocks_ * block_size;
  for (int d = 0; d < 2; ++d) {
    Side& s = sides[d];
    MUST(cudaSetDevice(d));
    vmem::gpu::load_paging();
    MUST(cudaStreamCreateWithFlags(&s.stream, cudaStreamNonBlocking));
    ASSERT_EQ(vmem_alloc(&s.at, bytes, 0), 0) << vmem_last_error();
    void* state = nullptr;
    MUST(cudaHostAlloc(&state, 8 * blocks_, cudaHostAllocPortable | cudaHostAllocMapped));
    s.state = static_cast<unsigned*>(std::memset(state, 0, 8 * blocks_));
  }
  const auto on_both = [&](const char* what, double limit, auto launch) {
    for (int d = 0; d < 2; ++d) {
      MUST(cudaSetDevice(d));
      launch(d);
      MUST(cudaGetLastError());
    }
    cudaEvent_t ended = nullptr;
    MUST(cudaEventCreateWithFlags(&ended, cudaEventDisableTiming));
    MUST(cudaEventRecord(ended, sides[1].stream));
    MUST(cudaSetDevice(0));
    MUST(cudaStreamWaitEvent(stream_, ended, 0));
    MUST(cudaEventDestroy(ended));
    finish(what, limit);
    for (Side& s : sides) MUST(cudaStreamSynchronize(s.stream));
  };
  for (unsigned round = 0; round < 2; ++round) {
    for (int d = 0; d < 2; ++d) {
      Side& s = sides[d];
      ASSERT_EQ(vmem_kernel_begin(&s.kernel, sides[d ^ round].at, bytes, kBoth, d, 128 * kMiB, &s.view), 0)
          << vmem_last_error();
    }
    on_both("two devices", seconds + 90, [&](int d) {
      vmem::gpu::soak(sides[d].stream, sides[d].view, sides[d ^ round].state, 132, uint64_t{seconds} * 500000000, ~0u,
                      51 + d, true, result_);
    });
    for (int d = 0; d < 2; ++d) {
      MUST(cudaSetDevice(d));
      ASSERT_EQ(vmem_kernel_end(sides[d].kernel, sides[d].stream), 0) << vmem_last_error();
    }
  }
  MUST(cudaSetDevice(0));
  const auto between = stats(0).to_peers + stats(1).to_peers;
  std::printf("two devices: %llu turns, %llu stores, %llu wrong, slowest acquire %.2f ms; %.1f GB went to the other\n",
              result_->turns, result_->stores, result_->wrong, static_cast<double>(result_->slowest_ns) / 1e6,
              static_cast<double>(between) / 1e9);
  expect_right("two devices");
  EXPECT_GT(result_->turns, 1000u);
  size_t wrong = 0;
  for (const Side& s : sides) {
    const auto* const words = static_cast<const uint32_t*>(s.at);
    for (uint32_t b = 0; b < blocks_; ++b) {
      const uint32_t version = s.state[2 * b];
      EXPECT_EQ(s.state[2 * b + 1], 0u) << "somebody has block " << b << " yet";
      for (uint32_t k = 0; k < block_size / 4; k += 1021) {
        const uint32_t want = version == 0 ? 0 : (b * 2654435761u ^ version * 40503u) + k * 2246822519u;
        wrong += words[size_t{b} * (block_size / 4) + k] != want ? 1 : 0;
      }
    }
  }
  EXPECT_EQ(wrong, 0u) << "words that the CPU reads";
  for (Side& s : sides) {
    EXPECT_EQ(vmem_free(s.at), 0) << vmem_last_error();
    MUST(cudaStreamDestroy(s.stream));
    MUST(cudaFreeHost(s.state));
  }
}

// The library must serve a block, zeros included, without a multiprocessor: none is free.
TEST_F(KernelPagingCuda, KernelsThatFillTheDeviceGetTheirBlocks) {
  start(256, 1024, 4096);
  open(kBoth, 64);
  int processors = 0, most = 0;
  MUST(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0));
  MUST(cudaDeviceGetAttribute(&most, cudaDevAttrMaxThreadsPerMultiProcessor, 0));
  const auto groups = static_cast<unsigned>(processors * most / 256);
  vmem::gpu::soak(stream_, view_, state_, 2 * groups, 2000000000, ~0u, 4, true, result_);
  MUST(cudaGetLastError());
  finish("a full device", 90);
  std::printf("%u groups on a full device: %llu turns, slowest acquire %.2f ms\n", 2 * groups, result_->turns,
              static_cast<double>(result_->slowest_ns) / 1e6);
  expect_right("a full device");
  EXPECT_GT(result_->turns, blocks_);
  close();
}

// Allocations that frameworks make at any time. Not cudaFree: it waits for all kernels while it
// holds locks that the library needs to serve them.
TEST_F(KernelPagingCuda, AllocationsBesideThem) {
  vmem::gpu::load_paging();
  start(256, 512, 2048);
  open(kBoth, 64);
  cudaStream_t other = nullptr;
  MUST(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  std::vector<void*> kept;
  vmem::gpu::soak(stream_, view_, state_, 132, uint64_t{seconds} * 300000000, ~0u, 5, true, result_);
  MUST(cudaGetLastError());
  uint64_t pairs = 0;
  double slowest = 0;
  while (cudaStreamQuery(stream_) == cudaErrorNotReady) {
    const double begin = now();
    void* p = nullptr;
    if (kept.size() < 64) {
      MUST(cudaMalloc(&p, 3 * kMiB << pairs % 5));
      kept.push_back(p);
    }
    MUST(cudaMallocAsync(&p, 3 * kMiB << pairs % 5, other));
    MUST(cudaFreeAsync(p, other));
    slowest = std::max(slowest, now() - begin);
    ++pairs;
  }
  finish("the soak beside allocations", 60);
  std::printf("beside %llu allocations (slowest %.0f ms): %llu turns, slowest acquire %.2f ms\n",
              static_cast<unsigned long long>(pairs), slowest * 1e3, result_->turns,
              static_cast<double>(result_->slowest_ns) / 1e6);
  expect_right("the soak beside allocations");
  EXPECT_GT(pairs, 1u);
  EXPECT_GT(result_->turns, 100u);
  close();
  for (void* p : kept) MUST(cudaFree(p));
  MUST(cudaStreamDestroy(other));
}

TEST_F(KernelPagingCuda, EightStreamsAskAtOnce) {
  vmem::gpu::load_paging();
  start(256, 512, 2048);
  open(kBoth, 64);
  cudaStream_t streams[8];
  for (cudaStream_t& s : streams) MUST(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  for (unsigned i = 0; i < 8; ++i) {
    vmem::gpu::soak(streams[i], view_, state_, 33, uint64_t{seconds} * 300000000, ~0u, 11 + i, true, result_);
    MUST(cudaGetLastError());
  }
  cudaEvent_t ended = nullptr;
  MUST(cudaEventCreateWithFlags(&ended, cudaEventDisableTiming));
  for (cudaStream_t s : streams) {
    MUST(cudaEventRecord(ended, s));
    MUST(cudaStreamWaitEvent(stream_, ended, 0));
  }
  finish("eight streams", 60);
  std::printf("eight streams: %llu turns, slowest acquire %.2f ms\n", result_->turns,
              static_cast<double>(result_->slowest_ns) / 1e6);
  expect_right("eight streams");
  EXPECT_GT(result_->turns, 1000u);
  close();
  for (cudaStream_t s : streams) MUST(cudaStreamDestroy(s));
  MUST(cudaEventDestroy(ended));
}

TEST_F(KernelPagingCuda, GraphsOfKernelsThatAskAreLaunchedAgainAndAgain) {
  vmem::gpu::load_paging();
  start(256, 512, 2048);
  open(kBoth, 64);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t made = nullptr;
  MUST(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed));
  for (unsigned i = 0; i < 4; ++i) vmem::gpu::soak(stream_, view_, state_, 66, 10000000000, 10, 31 + i, true, result_);
  MUST(cudaStreamEndCapture(stream_, &graph));
  MUST(cudaGraphInstantiate(&made, graph, 0));
  for (unsigned i = 0; i < 50; ++i) MUST(cudaGraphLaunch(made, stream_));
  finish("graphs", 90);
  std::printf("50 graphs of 4 kernels: %llu turns, slowest acquire %.2f ms\n", result_->turns,
              static_cast<double>(result_->slowest_ns) / 1e6);
  expect_right("graphs");
  EXPECT_GT(result_->turns + result_->skipped, 100000u);
  close();
  MUST(cudaGraphExecDestroy(made));
  MUST(cudaGraphDestroy(graph));
}

// A launch into a full queue waits in the driver and holds locks that every other call needs, so no
// block arrives. The kernels must then end by their time limits and find no wrong words.
TEST_F(KernelPagingCuda, AFullLaunchQueueBehindThemEndsTheirWaits) {
  vmem::gpu::load_paging();
  start(256, 512, 2048);
  open(kBoth, 64);
  vmem::gpu::soak(stream_, view_, state_, 132, 1000000000, ~0u, 41, true, result_);
  const double begin = now();
  for (unsigned i = 0; i < 4000; ++i) vmem::gpu::nothing(stream_);
  MUST(cudaGetLastError());
  const double launched = now() - begin;
  finish("a full queue", 90);
  const auto none = static_cast<unsigned>(Answer::no_progress);
  std::printf("4000 launches behind them took %.2f s: %llu turns, %llu acquires saw no progress\n", launched,
              result_->turns, result_->refused[none]);
  result_->refused[none] = 0;
  expect_right("a full queue");
  close();
}

// The CPU loads and stores, and takes leases, in the other half of the range.
TEST_F(KernelPagingCuda, LeasesAndTheCpuBesideThem) {
  start(512, 1024, 4096);
  void* other = nullptr;
  ASSERT_EQ(vmem_alloc(&other, 512 * kMiB, 0), 0) << vmem_last_error();
  open(kBoth, 128);
  cudaStream_t stream = nullptr;
  MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  vmem::gpu::soak(stream_, view_, state_, 132, uint64_t{seconds} * 500000000, ~0u, 2, true, result_);
  MUST(cudaGetLastError());
  std::minstd_rand random(7);
  auto* const bytes = static_cast<unsigned char*>(other);
  std::vector<unsigned char> last(256);
  uint64_t wrong = 0, leases = 0;
  while (cudaStreamQuery(stream_) == cudaErrorNotReady) {
    const size_t b = random() % 256;
    void* const block = bytes + b * block_size;
    wrong += bytes[b * block_size + 77] != last[b];
    ASSERT_EQ(vmem_acquire(block, block_size, kBoth, 0, stream), 0) << vmem_last_error();
    last[b] = static_cast<unsigned char>(random());
    MUST(cudaMemsetAsync(block, last[b], block_size, stream));
    ASSERT_EQ(vmem_release(block, block_size, stream), 0) << vmem_last_error();
    ++leases;
  }
  finish("the soak beside leases", 60);
  std::printf("beside %llu leases: %llu turns, %llu wrong\n", static_cast<unsigned long long>(leases), result_->turns,
              result_->wrong);
  expect_right("the soak beside leases");
  EXPECT_EQ(wrong, 0u);
  EXPECT_GT(leases, 10u);
  close();
  MUST(cudaStreamSynchronize(stream));
  MUST(cudaStreamDestroy(stream));
}

// An order that is no stream, through more blocks than the device and the host hold. From the
// second time on, the next blocks are read before the kernel requests them.
TEST_F(KernelPagingCuda, WhatIsGoneThroughAgainIsReadAheadFromTheDisk) {
  vmem::gpu::load_paging();
  start(256, 1024, 256);
  auto* const words = static_cast<uint32_t*>(at_);
  // Store something to each page, since zeros are not written to the SSD. The one compared word is
  // left out.
  for (size_t b = 0; b < blocks_; ++b)
    for (size_t w = 1; w < block_size / 4; w += 1024) words[b * (block_size / 4) + w] = static_cast<uint32_t>(b + w);
  ASSERT_EQ(vmem_evict(at_, blocks_ * block_size, VMEM_SSD), 0) << vmem_last_error();
  open(VMEM_READ, 128);
  std::vector<unsigned> list(blocks_);
  std::iota(list.begin(), list.end(), 0);
  std::shuffle(list.begin(), list.end(), std::minstd_rand(3));
  for (const char* name : {"from the disk, one group, one word", ".. again", ".. and again"})
    timed(name, list, 1, false, 1);
  close();
}

// Rows of several sizes, some across block borders; the table is four times the budget.
TEST_F(KernelPagingCuda, GatheredRowsAreRight) {
  vmem::gpu::load_gathering();
  start(128, 256, 1024);
  auto* const words = static_cast<uint32_t*>(at_);
  const size_t all = blocks_ * block_size / 4;
  for (size_t w = 0; w < all; ++w) words[w] = vmem::gpu::row_word(w);
  open(VMEM_READ, 64);
  unsigned* const out = device_words(all);
  unsigned* const list = device_words(all / 64);
  std::mt19937_64 random(3);
  for (const size_t row : {128, 129, 1024, 3001}) {
    std::vector<uint64_t> ids(all / row / 4);
    for (auto& id : ids) id = random() % (all / row);
    const vmem::gpu::RowWork work{reinterpret_cast<uint64_t*>(list), ids.size(), row, out};
    MUST(cudaMemcpy(list, ids.data(), 8 * ids.size(), cudaMemcpyHostToDevice));
    for (const bool warps : {true, false}) {
      reset();
      MUST(cudaMemset(out, 0xff, 4 * ids.size() * row));
      MUST(cudaDeviceSynchronize());
      vmem::gpu::gather_asking(stream_, view_, work, warps ? 2112 : 264, warps, result_);
      vmem::gpu::check_rows(stream_, work, result_);
      MUST(cudaGetLastError());
      finish("gathering", 60);
      expect_right("gathering");
    }
  }
  void* page = nullptr;
  MUST(cudaHostAlloc(&page, 64, cudaHostAllocMapped));
  auto* const answers = static_cast<unsigned*>(page);
  vmem::gpu::gather_wrong(stream_, view_, all / 1024, 1024, out, answers);
  MUST(cudaGetLastError());
  finish("gathering what cannot be", 60);
  EXPECT_EQ(answers[0], static_cast<unsigned>(Answer::out_of_range));
  EXPECT_EQ(answers[1], 40u) << "the first row that is none";
  EXPECT_EQ(answers[2], static_cast<unsigned>(Answer::present)) << "by address";
  EXPECT_EQ(answers[3], static_cast<unsigned>(Answer::present));
  EXPECT_EQ(answers[4], static_cast<unsigned>(Answer::would_deadlock));
  EXPECT_EQ(answers[5], static_cast<unsigned>(Answer::present)) << "no rows at all";
  close();
  std::vector<uint32_t> got(128 * 1024);
  MUST(cudaMemcpy(got.data(), out, 4 * got.size(), cudaMemcpyDeviceToHost));
  for (size_t i = 0; i < 64; ++i) {
    EXPECT_TRUE(i == 40 || i == 50 || got[i * 1024 + 5] == vmem::gpu::row_word(i * 1024 + 5)) << "row " << i;
    EXPECT_EQ(got[(64 + i) * 1024 + 1023], vmem::gpu::row_word(i * 1025 + 1 + 1023)) << "by address, row " << i;
  }
  MUST(cudaFree(out));
  MUST(cudaFree(list));
  MUST(cudaFreeHost(page));
}

// Prints figures; it does not judge speed.
TEST_F(KernelPagingCuda, WhatDemandPagingCosts) {
  constexpr size_t kDevice = 1024;
  start(2 * kDevice, 4 * kDevice, 8192);
  open(kBoth);
  // Store to every block once, so that each has a frame in host memory.
  vmem::gpu::soak(stream_, view_, state_, 264, 3000000000, ~0u, 3, true, result_);
  finish("filling", 60);
  expect_right("filling");
  close();
  open(VMEM_READ, kDevice);
  std::vector<unsigned> list(blocks_);
  std::iota(list.begin(), list.end(), 0);
  std::shuffle(list.begin(), list.end(), std::minstd_rand(1));
  timed("every block, 264 groups, all words", list, 264, false, block_size / 4);
  timed("every block again", list, 264, false, block_size / 4);
  std::minstd_rand random(5);
  std::vector<unsigned> at_random(4 * blocks_);
  for (unsigned& b : at_random) b = static_cast<unsigned>(random() % blocks_);
  timed("at random, 132 groups, all words", at_random, 132, false, block_size / 4);
  timed("at random, 132 groups, 4 KiB of each", at_random, 132, false, 1024);
  timed("at random, 512 warps, 4 KiB of each", at_random, 512, true, 1024);
  timed("at random, 16 groups, 4 KiB of each", at_random, 16, false, 1024);
  list.resize(256);
  timed("one group, one word", list, 1, false, 1);
  reset();
  for (const unsigned groups : {1u, 132u}) {
    const double begin = now();
    vmem::gpu::pin_again(stream_, view_, groups, 10000, result_);
    finish("pins", 60);
    std::printf("a pin and its end, %u groups on one block: %.0f ns\n", groups, (now() - begin) * 1e9 / 10000);
  }
  expect_right("pins");
  list.resize(std::min(blocks_, static_cast<unsigned>(kDevice * kMiB / block_size)) / 2);
  std::iota(list.begin(), list.end(), 0);
  timed("half of what may be there, in order", list, 264, false, 1);
  const size_t bytes = list.size() * block_size;
  void* const plain = device_words(bytes / 4);
  MUST(cudaMemset(plain, 1, bytes));
  MUST(cudaDeviceSynchronize());
  cudaEvent_t begin = nullptr, end = nullptr;
  for (cudaEvent_t* event : {&begin, &end}) MUST(cudaEventCreate(event));
  for (const unsigned groups : {264u, 1056u}) {
    double took[2] = {1e9, 1e9};
    for (unsigned round = 0; round < 10; ++round) {
      for (const bool asks : {false, true}) {
        MUST(cudaEventRecord(begin, stream_));
        vmem::gpu::sum(stream_, view_, asks ? nullptr : plain, bytes, 64 << 10, groups, 256, result_);
        MUST(cudaEventRecord(end, stream_));
        finish("sums", 60);
        float ms = 0;
        MUST(cudaEventElapsedTime(&ms, begin, end));
        took[asks ? 1 : 0] = std::min(took[asks ? 1 : 0], double{ms} / 1e3);
      }
    }
    std::printf("64 KiB under a pin each time, %u groups: %.0f GB/s, plain memory %.0f GB/s: %.3f\n", groups,
                static_cast<double>(bytes) / took[1] / 1e9, static_cast<double>(bytes) / took[0] / 1e9,
                took[0] / took[1]);
  }
  expect_right("sums");
  for (cudaEvent_t event : {begin, end}) MUST(cudaEventDestroy(event));
  MUST(cudaFree(plain));
  close();
  open(kBoth, kDevice);
  timed("at random, opened for writing, 132 groups", at_random, 132, false, 1024);
  close();
}

}  // namespace

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  ::testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i + 1 < argc; ++i) {
    if (strcmp(argv[i], "--seconds") == 0) seconds = static_cast<unsigned>(strtoul(argv[i + 1], nullptr, 10));
    if (strcmp(argv[i], "--block") == 0) block_size = strtoul(argv[i + 1], nullptr, 10) * kMiB;
  }
  alarm(600 + 3 * seconds);  // in any case
  return RUN_ALL_TESTS();
}
