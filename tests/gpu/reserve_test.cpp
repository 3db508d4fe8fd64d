// When another process takes the device's memory, the device tier gives back the memory that it
// keeps for later blocks, and blocks still arrive. The test always leaves 16 GiB of the device free
// for other programs, so device_reserve is above that: the other process takes all but those 16 GiB
// and the memory that the test needs. No third process may allocate or free device memory.
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <string>
#include <thread>

#include "../system/child.h"
#include "../system/support.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kGiB = uint64_t{1} << 30;
constexpr uint64_t kStaysFree = 16 * kGiB;
constexpr uint64_t kBudget = 4 * kGiB;
constexpr uint64_t kReserve = 22 * kGiB;  // more than the other process leaves
constexpr size_t kBlock = 8 << 20;

#define VMEM_DO(call) ASSERT_EQ((call), 0) << vmem_last_error()

uint64_t free_bytes() {
  size_t free = 0, total = 0;
  EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  return free;
}
double gib(uint64_t bytes) {
  return static_cast<double>(bytes) / static_cast<double>(kGiB);
}
bool say(int fd) {
  return write(fd, "x", 1) == 1;
}
bool hear(int fd) {
  char c = 0;
  return read(fd, &c, 1) == 1;
}

// Takes all but 16 GiB and the budget; when told to, takes most of the budget too.
TEST(ReserveChild, DISABLED_Other) {
  const int in = atoi(getenv("VMEM_TEST_IN")), out = atoi(getenv("VMEM_TEST_OUT"));
  ASSERT_EQ(cudaFree(nullptr), cudaSuccess);
  const auto take = [](uint64_t bytes) {  // until the process ends
    uint64_t taken = 0;
    for (void* p = nullptr; taken + kGiB / 4 <= bytes && cudaMalloc(&p, kGiB / 4) == cudaSuccess;) taken += kGiB / 4;
    return taken;
  };
  take(free_bytes() - kStaysFree - kBudget);
  ASSERT_TRUE(say(out));
  ASSERT_TRUE(hear(in));
  const uint64_t more = take(std::min(kBudget - kGiB / 2, free_bytes() - kStaysFree));
  std::printf("the other process took %.2f GiB more\n", gib(more));
  EXPECT_GE(more, kBudget / 2);
  ASSERT_TRUE(say(out));
  hear(in);
}

class Reserve : public systest::SystemTest {};

TEST_F(Reserve, WhatIsKeptForBlocksToComeGoesBackBesideAProcessThatTakesTheDevice) {
  ASSERT_EQ(cudaFree(nullptr), cudaSuccess);
  if (free_bytes() < kReserve + 2 * kBudget + 4 * kGiB) GTEST_SKIP() << gib(free_bytes()) << " GiB are free";
  configure({{"device", "handles"},
             {"host_budget", "1GiB"},
             {"device_budget", std::to_string(kBudget)},
             {"device_reserve", std::to_string(kReserve)}});
  vmem_region_attr attr = {};
  attr.size = sizeof attr;
  attr.block_size = kBlock;
  void* p = nullptr;
  VMEM_DO(vmem_create(&p, kBudget, &attr));
  auto* const bytes = static_cast<std::byte*>(p);
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  // Fill the budget with new zero blocks. Then free all but one block, and move that one in and
  // out.
  VMEM_DO(vmem_acquire(p, kBudget, VMEM_READ, 0, stream));
  VMEM_DO(vmem_release(p, kBudget, stream));
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  const uint64_t full = free_bytes();
  std::atomic<bool> stop{false};
  std::atomic<int> came{0}, failed{0};
  std::thread traffic([&] {
    for (; !stop; std::this_thread::sleep_for(std::chrono::milliseconds(2)), ++came) {
      if (vmem_acquire(bytes, kBlock, VMEM_READ | VMEM_WRITE, 0, stream) != 0 ||
          vmem_release(bytes, kBlock, stream) != 0 || vmem_evict(bytes, kBlock, VMEM_HOST) != 0)
        ++failed;
    }
  });
  VMEM_DO(vmem_advise(bytes + kBlock, kBudget - kBlock, VMEM_ADVISE_DONT_NEED, 0));
  std::this_thread::sleep_for(std::chrono::seconds(3));
  const uint64_t kept = free_bytes();
  EXPECT_LT(kept, full + kGiB / 2) << "while blocks come it is kept for them";
  int to[2], from[2];
  ASSERT_EQ(pipe(to) + pipe(from), 0);
  for (const int mine : {to[1], from[0]}) ASSERT_EQ(fcntl(mine, F_SETFD, FD_CLOEXEC), 0);
  const pid_t other = systest::start_child("ReserveChild.DISABLED_Other", {{"VMEM_TEST_IN", std::to_string(to[0])},
                                                                           {"VMEM_TEST_OUT", std::to_string(from[1])}});
  close(to[0]);
  close(from[1]);
  EXPECT_TRUE(hear(from[0]));
  const auto start = Clock::now();
  const uint64_t taken = free_bytes();
  uint64_t now = taken;
  const bool back = vmem::test::eventually([&] { return (now = free_bytes()) + kGiB >= kStaysFree + 2 * kBudget; });
  std::printf(
      "%.1f GiB free with the budget of %.0f GiB in use, %.1f while it is kept; another process left %.1f, and "
      "%.0f ms later %.1f were free\n",
      gib(full), gib(kBudget), gib(kept), gib(taken),
      std::chrono::duration<double, std::milli>(Clock::now() - start).count(), gib(now));
  EXPECT_TRUE(back) << gib(now);
  EXPECT_TRUE(say(to[1]));
  EXPECT_TRUE(hear(from[0])) << "the other one finds it";
  const int before = came;
  EXPECT_TRUE(vmem::test::eventually([&] { return came > before + 20; })) << "blocks go on coming";
  stop = true;
  traffic.join();
  EXPECT_EQ(failed, 0);
  close(to[1]);
  EXPECT_EQ(systest::wait_for_child(other, 20), 0);
  close(from[0]);
  VMEM_DO(vmem_free(p));
  vmem_shutdown();
  cudaStreamDestroy(stream);
  vmem_set("device", "auto");
}

}  // namespace
