// Charges of tables to the host budget, and accesses that are refused because a table has no room
// to grow.
#include <gtest/gtest.h>

#include <memory>

#include "edit_block.h"
#include "memory/frame_pool.h"
#include "pager/account/metadata_charges.h"
#include "pager_fakes.h"

namespace vmem::pager::test {
namespace {

using memory::Use;

using core::kPage;

constexpr uint64_t kMiB = 1 << 20;

class FakeClock final : public WaitClock {
 public:
  uint64_t look(uint64_t) override { return 0; }
  bool hopeless(uint64_t) override { return false; }
};

class PagerMetadataCharges : public ::testing::Test {
 protected:
  static constexpr size_t kBlocks = 4096 * 16, kChunk = core::BlockTable::kChunk;
  static constexpr uint64_t kRest = 16 * kMiB;  // of `other`, beyond the free allowance of a process

  void SetUp() override {
    void* at = nullptr;
    ASSERT_TRUE(trap.attach(kBlocks * kPage, kPage, trap::Transfer::copy, &at).ok());
    region.base = static_cast<std::byte*>(at);
    region.block_size = kPage;
    ASSERT_TRUE(region.table.create(kBlocks).ok());
    tables.charge(region);  // as when a region is made
    empty = region.table.footprint();
    other.charge.table_granted = MetadataCharges::kFree + kRest;
  }
  void TearDown() override {
    EXPECT_EQ(tables.check(region.charge.table + region.charge.leases + other.charge.table), "");
  }
  uint64_t charged() const { return budget.charged(Use::tables); }
  // Leaves blocks no more memory than they have.
  void fill() {
    tables.charge(other);
    leased = budget.wanted() - reserve.for_moves();
    reserve.lease(leased);
  }
  bool refused(BlockIndex b) {
    uint64_t value = 0;
    return !trap.load(region.address(b), &value);
  }

  FakeTrap trap;
  FakeClock clock;
  core::Counters counters;
  FrameTable frame_table;
  TransitionPool transitions;
  memory::HostBudget budget{64 * kMiB};
  memory::FramePool frames{trap, budget, {}};
  CpuMappings cpu_mappings{trap, frame_table, clock, counters, true};
  FaultReserve reserve{budget, frames, cpu_mappings};
  MetadataCharges tables{budget, reserve, frame_table, transitions, trap};
  Region region{kBlocks, 4}, other{16, 4};
  uint64_t leased = 0, empty = 0;
};

TEST_F(PagerMetadataCharges, WhatEveryProcessCanSpareIsNotCharged) {
  change(region.table, 0, State::unpopulated, State::reading);
  tables.charge(region);
  EXPECT_EQ(tables.bytes(), empty + kPage + 1);
  EXPECT_EQ(charged(), 0u);
  tables.charge(other);
  EXPECT_EQ(charged(), kRest + empty + kPage + 1);
  tables.credit(other);
  EXPECT_EQ(charged(), 0u);
  EXPECT_EQ(other.charge.table, 0u);
}

TEST_F(PagerMetadataCharges, ResidentsAreChargedWhenTheyAreCounted) {
  tables.charge(other);
  frame_table.grow();
  EXPECT_EQ(charged(), kRest + empty);
  tables.count();
  EXPECT_EQ(charged(), kRest + empty + frame_table.size() * (sizeof(Frame) + 24));
}

TEST_F(PagerMetadataCharges, WhatWasGrantedIsChargedFromTheStartAndAlwaysThere) {
  region.charge.table_granted = empty + 2 * (kPage + 1);
  tables.charge(region);
  EXPECT_EQ(tables.bytes(), empty + 2 * (kPage + 1));
  fill();
  EXPECT_EQ(tables.growth(region, 0), 0u) << "it is charged already";
  EXPECT_TRUE(tables.may_grow(region, 0));
  change(region.table, 0, State::unpopulated, State::reading);
  EXPECT_TRUE(tables.may_grow(region, kChunk));
  change(region.table, kChunk, State::unpopulated, State::reading);
  EXPECT_FALSE(tables.may_grow(region, 2 * kChunk));
  EXPECT_TRUE(tables.may_grow(region, 1)) << "its page is there";
  EXPECT_EQ(tables.growth(region, 1), 0u);
}

TEST_F(PagerMetadataCharges, GrowthIsWhatTheNextPageAdds) {
  EXPECT_EQ(tables.growth(region, 0), 0u) << "there is some to spare";
  tables.charge(other);
  EXPECT_EQ(tables.growth(region, 0), kPage + 1);
}

TEST_F(PagerMetadataCharges, AnAccessThatIsRefusedIsMadeAgainWhenThereIsRoom) {
  fill();
  ASSERT_TRUE(tables.reserve());
  ASSERT_FALSE(tables.may_grow(region, 7));
  EXPECT_TRUE(tables.refuse(region, 7).ok());
  EXPECT_TRUE(refused(7));
  tables.try_again();
  EXPECT_EQ(tables.refused(), 1u);
  reserve.release(leased);
  trap.refuse_unfail(1);
  tables.try_again();
  EXPECT_EQ(tables.refused(), 1u) << "the trap does not take it back";
  tables.try_again();
  EXPECT_EQ(tables.refused(), 0u);
}

TEST_F(PagerMetadataCharges, WhatTheTrapDoesNotRefuseIsNotKnown) {
  fill();
  trap.refuse_fail(1);
  EXPECT_FALSE(tables.refuse(region, 7).ok());
  EXPECT_EQ(tables.refused(), 0u);
}

TEST_F(PagerMetadataCharges, TheOldestAsksAgainWhereTooManyAreRefused) {
  fill();
  for (BlockIndex b = 0; b < MetadataCharges::kMostRefused; ++b) EXPECT_TRUE(tables.refuse(region, b * kChunk).ok());
  EXPECT_EQ(trap.calls("unfail"), 0u);
  EXPECT_TRUE(tables.refuse(region, MetadataCharges::kMostRefused * kChunk).ok());
  EXPECT_EQ(trap.calls("unfail"), 1u);
  EXPECT_EQ(tables.refused(), MetadataCharges::kMostRefused);
  tables.forget(region);
  EXPECT_EQ(tables.refused(), 0u);
}

TEST_F(PagerMetadataCharges, AnAccessThatWasRefusedIsMadeAgainWhenAnotherBlockHasBegunItsPage) {
  fill();
  ASSERT_TRUE(tables.reserve());
  EXPECT_TRUE(tables.refuse(region, 7).ok());
  change(region.table, 8, State::unpopulated, State::reading);
  EXPECT_TRUE(tables.may_grow(region, 7));
  EXPECT_EQ(tables.refused(), 0u);
  EXPECT_EQ(trap.calls("unfail"), 1u);
}

// For a block in place, the trap takes back the SIGBUS of its pages only.
TEST_F(PagerMetadataCharges, ABlockThatCameMeanwhileKeepsItsPages) {
  fill();
  ASSERT_TRUE(tables.reserve());
  EXPECT_TRUE(tables.refuse(region, 7).ok());
  change(region.table, 8, State::unpopulated, State::reading);
  trap.refuse_unfail(1);
  EXPECT_TRUE(tables.may_grow(region, 7));
  change(region.table, 7, State::unpopulated, State::reading);
  reserve.release(leased);
  EXPECT_TRUE(tables.may_grow(region, kChunk));
  EXPECT_EQ(tables.refused(), 1u) << "it may not come";
  change(region.table, 7, State::reading, State::mapping);
  change(region.table, 7, State::mapping, State::resident);
  EXPECT_TRUE(tables.may_grow(region, kChunk));
  EXPECT_EQ(tables.refused(), 0u);
  EXPECT_EQ(trap.calls("unfail"), 0u);
}

TEST_F(PagerMetadataCharges, ABlockThatCameMeanwhileKeepsItsPagesWhereTooManyAreRefused) {
  fill();
  for (BlockIndex b = 0; b < MetadataCharges::kMostRefused; ++b) EXPECT_TRUE(tables.refuse(region, b * kChunk).ok());
  change(region.table, 0, State::unpopulated, State::reading);
  change(region.table, 0, State::reading, State::mapping);
  change(region.table, 0, State::mapping, State::resident);
  EXPECT_TRUE(tables.refuse(region, MetadataCharges::kMostRefused * kChunk).ok());
  EXPECT_EQ(trap.calls("unfail"), 0u);
  EXPECT_EQ(tables.refused(), MetadataCharges::kMostRefused);
}

TEST_F(PagerMetadataCharges, TheCheckFindsWhatDisagrees) {
  tables.charge(other);
  EXPECT_NE(tables.check(0), "");
}

}  // namespace
}  // namespace vmem::pager::test
