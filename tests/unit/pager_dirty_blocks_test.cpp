// DirtyBlocks: oldest first, each once, counted; and the faults that wait until there are fewer.
#include <gtest/gtest.h>

#include "edit_block.h"
#include "pager/block/dirty_blocks.h"

namespace vmem::pager::test {
namespace {

constexpr uint64_t kBlock = 64 << 10;

class PagerDirtyBlocks : public ::testing::Test {
 protected:
  void SetUp() override {
    tunables.writeback_interval_ns = 1000;
    tunables.dirty_limit = 2 * kBlock;
    region.block_size = kBlock;
    region.blocks = 8;
    region.backing = Backing::file_shared;
    ASSERT_TRUE(region.table.create(8).ok());
    frame_table.grow();
  }
  void TearDown() override { EXPECT_EQ(dirty.check(), ""); }
  FrameId block(size_t b) {
    const FrameId id = frame_table.take(region, b, nullptr, kHostPool);
    edit(region.table, b).aux = id;
    change(region.table, b, State::unpopulated, State::reading);
    change(region.table, b, State::reading, State::staged);
    return id;
  }
  Tunables tunables;
  Region region{8, 4};
  FrameTable frame_table;
  DirtyBlocks dirty{frame_table, tunables};
};

TEST_F(PagerDirtyBlocks, TheFirstStoreIsItsAgeAndTheOldestIsFirst) {
  const FrameId a = block(3), b = block(1), c = block(2);
  dirty.add(a, 10);
  dirty.add(b, 20);
  dirty.add(c, 30);
  dirty.add(a, 40);
  EXPECT_EQ(dirty.first(), a);
  EXPECT_EQ(dirty.since(a), 10u);
  EXPECT_EQ(dirty.bytes(), 3 * kBlock);
  dirty.put_off(a, 50);
  EXPECT_EQ(dirty.first(), b);
  dirty.remove(c);
  dirty.remove(c);
  dirty.remove(b);
  EXPECT_EQ(dirty.first(), a);
  EXPECT_EQ(dirty.since(a), 50u);
  dirty.remove(a);
  EXPECT_EQ(dirty.first(), kNoFrame);
  EXPECT_EQ(dirty.bytes(), 0u);
}

TEST_F(PagerDirtyBlocks, AnOverdueBlockComesToTheFront) {
  const FrameId a = block(3), b = block(1);
  dirty.add(a, 5000);
  dirty.add(b, 6000);
  dirty.put_off(a, 6000, DirtyFrame::Overdue::leased);
  EXPECT_TRUE(dirty.overdue(a));
  EXPECT_FALSE(dirty.overdue(b));
  EXPECT_EQ(dirty.first(), b);
  const uint64_t changes = dirty.changes();
  dirty.bring_forward(a, 6500);
  EXPECT_EQ(dirty.first(), a);
  EXPECT_EQ(dirty.since(a), 5500u) << "it is due, whenever it was put off";
  EXPECT_TRUE(dirty.overdue(a)) << "until its write begins";
  EXPECT_GT(dirty.changes(), changes) << "an evictor that found nothing looks again";
  EXPECT_EQ(dirty.check(), "");
  dirty.remove(b);
  dirty.put_off(a, 7000, DirtyFrame::Overdue::yes);
  dirty.bring_forward(a, 7000);
  EXPECT_EQ(dirty.bytes(), kBlock);
  dirty.put_off(a, 8000);
  EXPECT_FALSE(dirty.overdue(a));
}

TEST_F(PagerDirtyBlocks, ABlockThatSomebodyHoldsCountsForNoLimit) {
  const FrameId a = block(0), b = block(1), c = block(2);
  dirty.add(a, 10);
  dirty.add(b, 20);
  ASSERT_TRUE(dirty.slows(20));
  dirty.put_off(a, 30, DirtyFrame::Overdue::leased);
  EXPECT_FALSE(dirty.slows(30)) << "a wait would not make it leave";
  EXPECT_EQ(dirty.bytes(), 2 * kBlock);
  dirty.add(c, 40);
  EXPECT_TRUE(dirty.slows(40)) << "the limit holds for the others";
  dirty.remove(c);
  dirty.bring_forward(a, 50);
  EXPECT_TRUE(dirty.slows(50)) << "it can be written";
}

TEST_F(PagerDirtyBlocks, FaultsWaitAtTheLimitAndGoOnBelowIt) {
  const FrameId a = block(0), b = block(1);
  dirty.add(a, 10);
  EXPECT_TRUE(dirty.many());
  EXPECT_FALSE(dirty.slows(10));
  dirty.add(b, 20);
  ASSERT_TRUE(dirty.slows(20));
  EXPECT_TRUE(dirty.slow(region, 4, 20));
  EXPECT_TRUE(dirty.slow(region, 4, 21)) << "it waits already, and is in there once";
  EXPECT_TRUE(dirty.slow(region, 5, 22));
  EXPECT_EQ(dirty.wake_one(30, 0).region, nullptr);
  EXPECT_EQ(dirty.stuck_ns(30), 10u);
  dirty.write_begins(kBlock);
  dirty.write_ends(kBlock, 29);
  EXPECT_EQ(dirty.stuck_ns(30), 1u);
  dirty.remove(a);
  EXPECT_EQ(dirty.wake_one(30, 0).first, 4u);
  EXPECT_EQ(dirty.wake_one(30, kBlock).region, nullptr) << "there is room for one";
  dirty.lift(100);
  EXPECT_EQ(dirty.wake_one(99, kBlock).first, 5u);
  EXPECT_FALSE(dirty.any_slowed());
}

TEST_F(PagerDirtyBlocks, ARegionThatGoesIsForgottenAndWithoutAnIntervalNobodyWaits) {
  dirty.add(block(0), 10);
  dirty.add(block(1), 10);
  EXPECT_TRUE(dirty.slow(region, 4, 20));
  dirty.forget(region);
  EXPECT_FALSE(dirty.any_slowed());
  EXPECT_TRUE(dirty.slow(region, 4, 20));
  tunables.writeback_interval_ns = 0;
  EXPECT_FALSE(dirty.slows(20));
  EXPECT_EQ(dirty.wake_one(20, 0).first, 4u);
}

TEST_F(PagerDirtyBlocks, WithoutALimitOfItsOwnItIsAPartOfTheBudget) {
  tunables.dirty_limit = 0;
  tunables.host_budget = uint64_t{8} << 30;
  EXPECT_EQ(dirty.limit(), uint64_t{2} << 30);
  tunables.host_budget = uint64_t{16} << 20;
  EXPECT_EQ(dirty.limit(), DirtyBlocks::kLeastLimit);
}

}  // namespace
}  // namespace vmem::pager::test
