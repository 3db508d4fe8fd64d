// The reserve of the host budget: kept for faults, ahead of other requests, and adjusted for memory
// that cannot be evicted.
#include <gtest/gtest.h>

#include "edit_block.h"
#include "memory/frame_pool.h"
#include "pager/account/fault_reserve.h"
#include "pager_fakes.h"

namespace vmem::pager::test {
namespace {

using core::kPage;

constexpr uint64_t kMiB = 1 << 20;

class FakeClock final : public WaitClock {
 public:
  uint64_t look(uint64_t) override { return 0; }
  bool hopeless(uint64_t) override { return false; }
};

class PagerFaultReserve : public ::testing::Test {
 protected:
  FakeTrap trap;
  FakeClock clock;
  core::Counters counters;
  FrameTable frame_table;
  memory::HostBudget budget{64 * kMiB};
  memory::FramePool frames{trap, budget, {}};
  CpuMappings cpu_mappings{trap, frame_table, clock, counters, true};
  FaultReserve reserve{budget, frames, cpu_mappings};
};

TEST_F(PagerFaultReserve, FollowsTheLargestBlocksThereAre) {
  EXPECT_EQ(reserve.bytes(), 0u);
  reserve.add_region(kPage);
  EXPECT_EQ(reserve.largest_block(), kPage);
  EXPECT_EQ(reserve.bytes(), 4 * kPage);
  reserve.add_region(kHugePage);
  reserve.add_region(kHugePage);
  EXPECT_EQ(reserve.bytes(), 8 * kMiB);
  reserve.remove_region(kHugePage);
  EXPECT_EQ(reserve.largest_block(), kHugePage) << "one is left";
  reserve.remove_region(kHugePage);
  EXPECT_EQ(reserve.largest_block(), kPage);
  EXPECT_EQ(reserve.bytes(), 4 * kPage);
  EXPECT_EQ(reserve.check(0, 1), "");
}

TEST_F(PagerFaultReserve, TakesAnEighthOfASmallBudgetAndNeverLessThanABlock) {
  reserve.add_region(kHugePage);
  EXPECT_EQ(reserve.of(32 * kMiB), 4 * kMiB);
  EXPECT_EQ(reserve.of(8 * kMiB), kHugePage);
  EXPECT_EQ(reserve.bytes(), 8 * kMiB);
  budget.set(32 * kMiB);
  reserve.follow_budget();
  EXPECT_EQ(reserve.bytes(), 4 * kMiB);
}

TEST_F(PagerFaultReserve, KnowsTheLargestBlockThereCanBe) {
  budget.set(4096 * kMiB);
  for (size_t block = kPage; block <= core::kMaxBlock; block *= 2) {
    reserve.add_region(block);
    EXPECT_EQ(reserve.largest_block(), block);
  }
  EXPECT_EQ(reserve.bytes(), 256 * kMiB);
  EXPECT_EQ(reserve.of(512 * kMiB), 64 * kMiB) << "an eighth";
  EXPECT_EQ(reserve.of(300 * kMiB), 64 * kMiB) << "one block";
  EXPECT_EQ(reserve.check(0, core::kBlockSizes), "");
  reserve.remove_region(core::kMaxBlock);
  EXPECT_EQ(reserve.largest_block(), core::kMaxBlock / 2);
}

TEST_F(PagerFaultReserve, WhatIsLeasedIsNotToBeHad) {
  reserve.add_region(kHugePage);
  EXPECT_TRUE(reserve.fits(56 * kMiB));
  EXPECT_FALSE(reserve.fits(56 * kMiB + 1));
  reserve.lease(16 * kMiB);
  EXPECT_EQ(reserve.pinned(), 16 * kMiB);
  EXPECT_EQ(reserve.kept(), 24 * kMiB);
  EXPECT_EQ(reserve.least(), 32 * kMiB);
  EXPECT_EQ(reserve.for_moves(), 24 * kMiB);
  EXPECT_FALSE(reserve.fits(56 * kMiB));
  EXPECT_EQ(reserve.check(16 * kMiB, 1), "");
  reserve.release(16 * kMiB);
  EXPECT_TRUE(reserve.fits(56 * kMiB));
}

TEST_F(PagerFaultReserve, WhatIsStaleAtADeviceIsPinned) {
  void* at = nullptr;
  ASSERT_TRUE(trap.attach(4 * kPage, kPage, trap::Transfer::copy, &at).ok());
  Region region{4, 4};
  region.base = static_cast<std::byte*>(at);
  region.block_size = kPage;
  ASSERT_TRUE(region.table.create(4).ok());
  frame_table.grow();
  edit(region.table, 1).aux = frame_table.take(region, 1, nullptr, kDevicePools);
  change(region.table, 1, State::unpopulated, State::promoting);
  change(region.table, 1, State::promoting, State::on_device);
  ASSERT_TRUE(cpu_mappings.expect());
  cpu_mappings.show(region, 1, 0);
  EXPECT_EQ(reserve.pinned(), 0u);
  cpu_mappings.change(region, 1);
  EXPECT_EQ(reserve.pinned(), kPage);
  EXPECT_EQ(reserve.check(0, 0), "") << "and not leased";
  cpu_mappings.forget(region, 1);
  EXPECT_EQ(reserve.pinned(), 0u);
}

TEST_F(PagerFaultReserve, FaultsMayHaveAllAcquiresLeaveHalfOthersWhatEvictorsKeep) {
  reserve.add_region(kHugePage);
  EXPECT_EQ(reserve.left_free(Urgency::fault, kHugePage), 0u);
  EXPECT_EQ(reserve.left_free(Urgency::acquire, kHugePage), 4 * kMiB);
  EXPECT_EQ(reserve.low_watermark(), 8 * kMiB);
  EXPECT_EQ(reserve.left_free(Urgency::prefetch, kHugePage), 6 * kMiB);
  EXPECT_EQ(reserve.left_free(Urgency::readahead, 32 * kMiB), 0u);
}

TEST_F(PagerFaultReserve, TheWatermarkIsAPartOfWhatMayLeaveAndTwoBlocksCanStay) {
  reserve.add_region(kPage);
  EXPECT_EQ(reserve.low_watermark(), 2 * kMiB) << "1/32";
  reserve.set_watermarks(25, 50);
  EXPECT_EQ(reserve.low_watermark(), 64 * kMiB / 100 * 25);
  reserve.set_refilling(true);
  EXPECT_EQ(reserve.low_watermark(), 64 * kMiB / 100 * 50);
  reserve.lease(32 * kMiB);
  EXPECT_EQ(reserve.low_watermark(), 32 * kMiB / 100 * 50);
  reserve.set_watermarks(100, 100);
  EXPECT_EQ(reserve.low_watermark(), 32 * kMiB - 2 * kPage) << "two blocks can stay";
  reserve.add_region(kHugePage);
  EXPECT_EQ(reserve.low_watermark(), 28 * kMiB);
}

TEST_F(PagerFaultReserve, EvictorsHaveWorkWhereLessIsFreeThanIsWanted) {
  reserve.add_region(kHugePage);
  ASSERT_TRUE(budget.charge(56 * kMiB, 0));
  EXPECT_FALSE(reserve.short_of(0, 0));
  EXPECT_TRUE(reserve.short_of(9 * kMiB, 0)) << "the first that waits needs more";
  EXPECT_FALSE(reserve.short_of(9 * kMiB, kMiB)) << "that is leaving already";
  reserve.want(10 * kMiB);
  reserve.want(9 * kMiB);
  EXPECT_TRUE(reserve.short_of(0, kMiB)) << "a region is being made";
  reserve.want_nothing();
  EXPECT_FALSE(reserve.short_of(0, 0));
  ASSERT_TRUE(budget.charge(kPage, 0));
  EXPECT_TRUE(reserve.short_of(0, 0));
  budget.credit(56 * kMiB + kPage);
}

TEST_F(PagerFaultReserve, AStaleBlockLeavesAQuarterToOthers) {
  reserve.add_region(kHugePage);
  EXPECT_TRUE(reserve.room_for_device_stale(48 * kMiB));
  EXPECT_FALSE(reserve.room_for_device_stale(48 * kMiB + 1));
  reserve.lease(48 * kMiB);
  EXPECT_FALSE(reserve.room_for_device_stale(kPage));
  reserve.release(48 * kMiB);
  reserve.set_watermarks(50, 50);
  EXPECT_FALSE(reserve.room_for_device_stale(33 * kMiB));
}

TEST_F(PagerFaultReserve, TheCheckFindsWhatDisagrees) {
  reserve.add_region(kHugePage);
  EXPECT_NE(reserve.check(0, 0), "");
  EXPECT_NE(reserve.check(kPage, 1), "");
  EXPECT_EQ(reserve.check(0, 1), "");
}

}  // namespace
}  // namespace vmem::pager::test
