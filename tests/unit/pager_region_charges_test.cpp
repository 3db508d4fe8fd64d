// Charges of a region to the host budget besides its blocks: all or nothing, and all credited at
// the end.
#include <gtest/gtest.h>

#include <cerrno>

#include "pager/calls/region_charges.h"
#include "pager_device_parts.h"

namespace vmem::pager::test {
namespace {

class PagerRegionCharges : public DeviceParts {
 protected:
  // Describes it as RegionCreate does; it is not published.
  static void describe(Region& r, size_t block_size, bool bounces) {
    r.block_size = block_size;
    r.size = r.span = r.blocks * block_size;
    r.bounces = bounces;
    ASSERT_TRUE(r.table.create(r.blocks).ok());
  }
  Status charge(Region& r) {
    BigLock lock(map.mutex());
    return charges.charge(lock, r, clock.look(now_ns()));
  }
  void credit(Region& r) {
    BigLock lock(map.mutex());
    charges.credit(r);
  }
  uint64_t reserved_blocks() {
    BigLock lock(map.mutex());
    return sums.reserved_blocks;
  }
  uint64_t kept() {
    BigLock lock(map.mutex());
    return reserve.bytes();
  }
  RegionTotals& sums = ctx.totals;
  RegionCharges& charges = calls.charges;
};

TEST_F(PagerRegionCharges, ARegionHasWhatItNeedsAndGivesItBack) {
  Region r(16, 0);
  r.blocks = 16;
  describe(r, kBlock, true);
  ASSERT_TRUE(charge(r).ok());
  EXPECT_EQ(reserved_blocks(), 16u);
  EXPECT_EQ(r.charge.reserved_blocks, 16u);
  EXPECT_GE(kept(), uint64_t{kBlock});
  EXPECT_GT(r.charge.table_granted, 0u);
  {
    BigLock lock(map.mutex());
    EXPECT_GE(map.frame_table().size(), 16u) << "its blocks need no memory to move";
    EXPECT_NE(frames.get_bounce(kBlock), nullptr);
  }
  credit(r);
  EXPECT_EQ(reserved_blocks(), 0u);
  EXPECT_EQ(r.charge.reserved_blocks, 0u);
  EXPECT_EQ(kept(), 0u);
}

TEST_F(PagerRegionCharges, WhatFewerThanFourBlocksFitIntoIsRefusedWithTheNumbers) {
  Region r(4, 0);
  r.blocks = 4;
  describe(r, kBudget / 2, false);
  const Status s = charge(r);
  EXPECT_EQ(s.code(), -ENOMEM);
  EXPECT_NE(s.text().find("fewer than 4 blocks of 4 MiB"), std::string_view::npos) << s.text();
  EXPECT_EQ(reserved_blocks(), 0u);
}

TEST_F(PagerRegionCharges, OneThatDoesNotFitBesideLeasesTakesNothing) {
  Region& other = region(7 * (1 << 20) / kBlock);
  {
    BigLock lock(map.mutex());
    ASSERT_TRUE(grants.grant({&other, 0, 83}, VMEM_READ, VMEM_HOST, nullptr).ok());
  }
  const uint64_t before = kept();  // 84 blocks are leased
  Region r(8, 0);
  r.blocks = 8;
  describe(r, size_t{1} << 20, false);
  EXPECT_EQ(charge(r).code(), -ENOMEM);
  EXPECT_EQ(reserved_blocks(), 0u);
  EXPECT_EQ(kept(), before);
  {
    BigLock lock(map.mutex());
    grants.take_back({&other, 0, 83}, VMEM_READ, VMEM_HOST, nullptr);
  }
  EXPECT_TRUE(charge(r).ok()) << "there is room now";
  credit(r);
}

TEST_F(PagerRegionCharges, TheLastRegionOfASizeLetsOthersHaveItsStagingFrames) {
  Region r(1, 0);
  r.blocks = 1;
  describe(r, kUnit, false);
  r.gpu = true;
  uint64_t told = 0;
  {
    BigLock lock(map.mutex());
    budget.set(uint64_t{80} << 20);
    reserve.follow_budget();
  }
  ASSERT_TRUE(charge(r).ok());
  {
    BigLock lock(map.mutex());
    EXPECT_EQ(staging.of(r).regions, 1u);
    told = gpus.work().count();
  }
  credit(r);
  BigLock lock(map.mutex());
  EXPECT_EQ(staging.of(r).regions, 0u);
  EXPECT_GT(gpus.work().count(), told) << "workers look for frames that nobody needs";
}

}  // namespace
}  // namespace vmem::pager::test
