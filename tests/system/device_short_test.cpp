// Devices whose memory others take and return: unleased blocks make room, and memory that becomes
// free is used again. On simulated devices.
#include <atomic>

#include "kernel_fixture.h"
#include "sim_support.h"

namespace systest {
namespace {

constexpr size_t kMemory = 64;  // blocks of each device

// The parameter: page tables of their own.
class DeviceShort : public SimTest, public ::testing::WithParamInterface<bool> {
 protected:
  void SetUp() override { start(2, {{"fault_timeout_ms", "3000"}}, GetParam()); }
  // Others now have all of the device's memory except so many blocks.
  static void leave_room(int device, size_t blocks) { sim().leave_to_others(device, (kMemory - blocks) * kBlock); }
  static uint64_t* words(vmem::region& r) { return static_cast<uint64_t*>(r.data()); }
  // Leases the blocks at a device, stores to them, and releases them.
  void visit(vmem::region& r, size_t first, size_t blocks, uint64_t value, int d, void* stream) {
    uint64_t* const at = words(r) + first * kWords;
    ASSERT_EQ(vmem_acquire(at, blocks * kBlock, kBoth, d, stream), 0) << vmem_last_error();
    for (size_t b = 0; b < blocks; ++b) launch_store(stream, at + b * kWords, value + b);
    ASSERT_EQ(vmem_release(at, blocks * kBlock, stream), 0) << vmem_last_error();
    ASSERT_TRUE(sim().synchronize(stream).ok());
  }
  static void expect(vmem::region& r, size_t first, size_t blocks, uint64_t value) {
    for (size_t b = 0; b < blocks; ++b)
      EXPECT_EQ(*static_cast<volatile uint64_t*>(words(r) + (first + b) * kWords), value + b) << first + b;
  }
  static uint64_t budget(int d) {
    const auto s = device_stats(d);
    EXPECT_LE(s.used_bytes, s.budget);
    return s.budget;
  }
};

TEST_P(DeviceShort, BlocksThatNobodyLeasesMakeRoomForOthers) {
  if (IsSkipped()) return;
  vmem::region r(32 * kBlock);
  visit(r, 0, 8, 100, 0, stream_);
  leave_room(0, 8);
  visit(r, 10, 1, 200, 0, stream_);
  visit(r, 16, 8, 300, 0, stream_);
  EXPECT_LT(budget(0), 16 * kBlock);
  expect(r, 0, 8, 100);
  expect(r, 10, 1, 200);
  expect(r, 16, 8, 300);
}

TEST_P(DeviceShort, MemoryThatOthersGiveBackIsUsedAgain) {
  if (IsSkipped()) return;
  vmem::region r(32 * kBlock);
  visit(r, 0, 2, 100, 0, stream_);
  leave_room(0, 2);
  visit(r, 4, 2, 200, 0, stream_);
  leave_room(0, kMemory);
  visit(r, 8, 16, 300, 0, stream_);  // the whole budget at once
  EXPECT_TRUE(until([] { return budget(0) == 16 * kBlock; }));
  expect(r, 0, 2, 100);
  expect(r, 4, 2, 200);
  expect(r, 8, 16, 300);
}

TEST_P(DeviceShort, BlocksMakeRoomForThoseOfOtherDevices) {
  if (IsSkipped()) return;
  void* const other = stream(1);
  vmem::region r(16 * kBlock);
  visit(r, 0, 4, 100, 1, other);
  visit(r, 8, 2, 200, 0, stream_);
  leave_room(1, 4);
  visit(r, 8, 2, 300, 1, other);
  expect(r, 0, 4, 100);
  expect(r, 8, 2, 300);
}

INSTANTIATE_TEST_SUITE_P(, DeviceShort, ::testing::Bool(),
                         [](const auto& p) { return std::string(p.param ? "handles" : "shared"); });

TEST_F(KernelPaging, ARangeIsOpenedWithinTheBudgetHoweverShortTheDeviceIs) {
  if (IsSkipped()) return;
  vmem::region r(32 * kBlock);
  const auto visit = [&](size_t first) {
    ASSERT_EQ(vmem_acquire(words(r) + first * kWords, 4 * kBlock, kBoth, 0, stream_), 0) << vmem_last_error();
    ASSERT_EQ(vmem_release(words(r) + first * kWords, 4 * kBlock, stream_), 0) << vmem_last_error();
    ASSERT_TRUE(sim().synchronize(stream_).ok());
  };
  visit(0);
  sim().leave_to_others(0, (kMemory - 4) * kBlock);
  visit(16);
  ASSERT_LT(device_stats().budget, 16 * kBlock) << "others have some of it";
  Open open(words(r), 16 * kBlock, kBoth, stream_, 16 * kBlock);
  ASSERT_NE(open.handle(), nullptr);
  std::atomic<int> told[2];
  for (uint32_t b = 0; b < 2; ++b) launch_add(stream_, open.view(), b, &told[b]);
  open.end();
  for (uint32_t b = 0; b < 2; ++b) EXPECT_EQ(told[b], kPresent) << b;
}

TEST_F(KernelPaging, BlocksThatNobodyLeasesMakeRoomForWhatKernelsAskFor) {
  if (IsSkipped()) return;
  vmem::region r(16 * kBlock);
  ASSERT_EQ(vmem_acquire(words(r) + 8 * kWords, 8 * kBlock, kBoth, 0, stream_), 0) << vmem_last_error();
  ASSERT_EQ(vmem_release(words(r) + 8 * kWords, 8 * kBlock, stream_), 0) << vmem_last_error();
  ASSERT_TRUE(sim().synchronize(stream_).ok());
  sim().leave_to_others(0, (kMemory - 8) * kBlock);
  Open open(words(r), 8 * kBlock, kBoth, stream_);
  std::atomic<int> told[4];
  for (uint32_t b = 0; b < 4; ++b) launch_add(stream_, open.view(), b, &told[b]);
  open.end();
  for (uint32_t b = 0; b < 4; ++b) {
    EXPECT_EQ(told[b], kPresent) << b;
    EXPECT_EQ(words(r)[b * kWords], 1u) << b;
  }
}

}  // namespace
}  // namespace systest
