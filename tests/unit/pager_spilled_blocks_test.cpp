// Spilled blocks: ordered by arrival, never more than a share, and none on a device with a waiter
// for room.
#include <gtest/gtest.h>

#include "edit_block.h"
#include "pager/block/spilled_blocks.h"

namespace vmem::pager::test {
namespace {

using core::kHugePage;

constexpr uint64_t kBlock = kHugePage;

class PagerSpilledBlocks : public ::testing::Test {
 protected:
  void SetUp() override {
    region.block_size = kBlock;
    region.blocks = 8;
    ASSERT_TRUE(region.table.create(8).ok());
    frame_table.grow();
    guests.set_share(50);
    budget.begin(8 * kBlock, kBlock);
  }
  // A block on device d.
  FrameId block(size_t b, size_t d) {
    const FrameId id = frame_table.take(region, b, nullptr, static_cast<uint8_t>(kDevicePools + d));
    edit(region.table, b).aux = id;
    edit(region.table, b).device = static_cast<uint8_t>(d);
    change(region.table, b, State::unpopulated, State::promoting);
    change(region.table, b, State::promoting, State::on_device);
    return id;
  }
  Region region{8, 4};
  FrameTable frame_table;
  SpilledBlocks guests{frame_table};
  DeviceBudget budget;
};

TEST_F(PagerSpilledBlocks, TheyAreInTheOrderInWhichTheyCame) {
  const FrameId a = block(0, 1), b = block(1, 1), c = block(2, 1), other = block(3, 0);
  for (const FrameId id : {a, b, c}) guests.add(id, 1);
  guests.add(other, 0);
  EXPECT_EQ(guests.bytes(1), 3 * kBlock);
  EXPECT_EQ(guests.first(1), a);
  EXPECT_EQ(guests.after(a), b);
  EXPECT_TRUE(guests.remove(b));
  EXPECT_FALSE(guests.remove(b)) << "it is none any more";
  EXPECT_FALSE(guests.is(b));
  EXPECT_EQ(guests.after(a), c);
  EXPECT_EQ(guests.after(c), kNoFrame);
  EXPECT_TRUE(guests.remove(a));
  guests.add(a, 1);
  EXPECT_EQ(guests.first(1), c);
  EXPECT_EQ(guests.after(c), a);
  EXPECT_EQ(guests.first(0), other);
  EXPECT_EQ(guests.check(), "");
  for (const FrameId id : {c, a, other}) EXPECT_TRUE(guests.remove(id));
  EXPECT_EQ(guests.first(1), kNoFrame);
  EXPECT_EQ(guests.bytes(1), 0u);
  EXPECT_EQ(guests.check(), "");
}

TEST_F(PagerSpilledBlocks, TheyHaveAShareAndNoMore) {
  EXPECT_TRUE(guests.fits(1, budget, 4 * kBlock, 1));
  EXPECT_FALSE(guests.fits(1, budget, 5 * kBlock, 1));
  for (size_t b = 0; b < 4; ++b) guests.add(block(b, 1), 1);
  EXPECT_FALSE(guests.fits(1, budget, kBlock, 1));
  EXPECT_EQ(guests.over(1, budget, 1), 0u);
  guests.set_share(25);
  EXPECT_EQ(guests.over(1, budget, 1), 2 * kBlock);
  budget.set(4 * kBlock);
  EXPECT_EQ(guests.over(1, budget, 1), 3 * kBlock);
  guests.set_share(0);
  EXPECT_EQ(guests.over(1, budget, 1), 4 * kBlock);
}

TEST_F(PagerSpilledBlocks, NoneComesWhereThereIsNoRoomOrSomebodyWaitsForIt) {
  const DeviceBudget unused;
  EXPECT_FALSE(guests.fits(1, unused, kBlock, 1));
  budget.want(kBlock);
  EXPECT_FALSE(guests.fits(1, budget, kBlock, 1)) << "somebody waits for room";
  budget.want(0);
  EXPECT_TRUE(guests.fits(1, budget, kBlock, 1));
  budget.charge(8 * kBlock);
  EXPECT_FALSE(guests.fits(1, budget, kBlock, 1));
  budget.credit(8 * kBlock);
  ASSERT_TRUE(budget.follow_down(4 * kBlock));
  EXPECT_FALSE(guests.fits(1, budget, kBlock, 1)) << "others have the device's memory";
}

TEST_F(PagerSpilledBlocks, ADeviceMayBeClosedToThemForAWhile) {
  guests.add(block(0, 1), 1);
  guests.refuse(1, 100);
  EXPECT_FALSE(guests.fits(1, budget, kBlock, 99));
  EXPECT_EQ(guests.over(1, budget, 99), 0u) << "those that are there stay";
  EXPECT_TRUE(guests.fits(1, budget, kBlock, 100));
  EXPECT_TRUE(guests.fits(0, budget, kBlock, 99)) << "of another device nothing was said";
  guests.send_away(1, 200);
  EXPECT_FALSE(guests.fits(1, budget, kBlock, 199));
  EXPECT_EQ(guests.over(1, budget, 199), kBlock);
  EXPECT_EQ(guests.over(1, budget, 200), 0u);
}

TEST_F(PagerSpilledBlocks, AGuestThatIsElsewhereOrKnownToAPolicyIsNoticed) {
  const FrameId id = block(0, 1);
  guests.add(id, 1);
  frame_table[id].admitted = true;
  EXPECT_NE(guests.check(), "");
  frame_table[id].admitted = false;
  edit(region.table, 0).device = 0;
  EXPECT_NE(guests.check(), "");
  edit(region.table, 0).device = 1;
  EXPECT_EQ(guests.check(), "");
  frame_table[id].dev.spilled_to = 0;
  EXPECT_NE(guests.check(), "");
}

}  // namespace
}  // namespace vmem::pager::test
