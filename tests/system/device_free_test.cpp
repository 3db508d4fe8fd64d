// Regions that are freed while some of their blocks are on a device. That memory counts as free
// only when the addresses are gone, and the device does not keep it for good. On simulated devices
// with page tables of their own.
#include <atomic>
#include <cstring>
#include <string>
#include <thread>

#include "kernel_fixture.h"
#include "sim_support.h"

namespace {

using systest::kBlock;
using systest::kBoth;

constexpr size_t kBudget = 32 << 20, kMemory = 128 << 20;

std::atomic<bool> stop, halted;
std::atomic<int> looks;

// Stops the first thread that is about to release addresses.
void stop_at_release(const char* step) {
  if (halted && std::strcmp(step, "device.memory") == 0) ++looks;
  if (std::strcmp(step, "device.release") != 0 || halted.exchange(true)) return;
  while (stop) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

class DeviceFree : public systest::SimTest {
 protected:
  void SetUp() override {
    start(1, {}, true);
    stop = true, halted = false, looks = 0;
  }
  void TearDown() override {
    end_free();
    vmem::core::step_hook.store(nullptr);
    SimTest::TearDown();
  }
  void visit(void* at, size_t size) {
    ASSERT_EQ(vmem_acquire(at, size, kBoth, 0, stream_), 0) << vmem_last_error();
    ASSERT_EQ(vmem_release(at, size, stream_), 0) << vmem_last_error();
    ASSERT_TRUE(sim().synchronize(stream_).ok());
  }
  void begin_free(void* at) {
    vmem::core::step_hook.store(&stop_at_release);
    freeing_ = std::thread([at] { EXPECT_EQ(vmem_free(at), 0) << vmem_last_error(); });
    ASSERT_TRUE(until([] { return halted.load(); }));
  }
  void end_free() {
    stop = false;
    if (freeing_.joinable()) freeing_.join();
  }
  std::thread freeing_;
};

TEST_F(DeviceFree, MemoryCountsAsUsedUntilTheAddressesAreGone) {
  if (IsSkipped()) return;
  void* first = nullptr;
  vmem::region second(kBudget);
  ASSERT_EQ(vmem_alloc(&first, kBudget, 0), 0) << vmem_last_error();
  visit(first, kBudget);
  sim().leave_to_others(0, kMemory - kBudget);
  begin_free(first);
  EXPECT_EQ(device_stats().used_bytes, kBudget) << "the next block would be one too many for the device";
  EXPECT_EQ(vmem::api::Runtime::get().check(), "");
  std::thread other([&] { visit(second.data(), kBudget); });
  end_free();
  other.join();
  EXPECT_EQ(device_stats().budget, kBudget) << "nobody else has taken any memory";
  EXPECT_EQ(sim().taken(0), kBudget);
  EXPECT_EQ(vmem::api::Runtime::get().check(), "");
}

TEST_F(DeviceFree, WhatTheDeviceKeepsGoesBackHoweverLongItTookToFree) {
  if (IsSkipped()) return;
  void* at = nullptr;
  ASSERT_EQ(vmem_alloc(&at, 4 * kBlock, 0), 0) << vmem_last_error();
  visit(at, 4 * kBlock);
  begin_free(at);
  EXPECT_TRUE(until([] { return looks >= 3; })) << "nobody looks any more";
  EXPECT_EQ(sim().taken(0), 4 * kBlock);
  end_free();
  EXPECT_TRUE(until([] { return sim().taken(0) == 0; })) << sim().taken(0);
}

}  // namespace
