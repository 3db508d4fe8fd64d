// Holes where blocks left a device: the trap stands at all of them afterwards, and the number of
// calls is bounded.
#include <gtest/gtest.h>

#include <array>
#include <memory>

#include "pager/tier/managed_holes.h"
#include "pager_managed_parts.h"

namespace {

using vmem::core::BigLock;
using vmem::device::Range;
using vmem::pager::Region;

class PagerManagedHoles : public vmem::pager::test::ManagedParts {
 protected:
  Range block(const Region& r, size_t b) { return {reinterpret_cast<uintptr_t>(r.address(b)), r.block_size}; }
};

TEST_F(PagerManagedHoles, NeighboursGetTheTrapByOneCallAndTheDevicesHearOfAll) {
  const Region& r = device_region(4);
  const std::array<Range, 3> ranges = {block(r, 0), block(r, 1), block(r, 3)};
  holes.restore_trap(ranges);
  ASSERT_EQ(counting.attached.size(), 2u);
  EXPECT_EQ(counting.attached[0].address, ranges[0].address);
  EXPECT_EQ(counting.attached[0].size, 2 * kUnit);
  EXPECT_EQ(counting.attached[1].address, ranges[2].address);
  EXPECT_EQ(counting.attached[1].size, kUnit);
  EXPECT_EQ(managed.settled, 3u);
}

TEST_F(PagerManagedHoles, NoCallReachesFromOneRegionIntoTheNext) {
  Region& r = device_region(4);
  const std::array<Range, 4> ranges = {block(r, 0), block(r, 1), block(r, 2), block(r, 3)};
  auto second = std::make_unique<Region>(2, 0);
  second->id = ++ids;
  second->base = r.base + 2 * kUnit;
  second->block_size = kUnit;
  second->blocks = 2;
  second->size = second->span = 2 * kUnit;
  ASSERT_TRUE(second->table.create(2).ok());
  {
    BigLock lock(map.mutex());
    r.size = r.span = 2 * kUnit;
    reserve.add_region(kUnit);
    metadata_charges.charge(*second);
    map.regions().emplace(reinterpret_cast<uintptr_t>(second->base), std::move(second));
  }
  holes.restore_trap(ranges);
  ASSERT_EQ(counting.attached.size(), 2u);
  EXPECT_EQ(counting.attached[0].size, 2 * kUnit);
  EXPECT_EQ(counting.attached[1].address, ranges[2].address);
  EXPECT_EQ(counting.attached[1].size, 2 * kUnit);
}

TEST_F(PagerManagedHoles, ATrapThatIsRefusedIsAskedForAgain) {
  const Region& r = device_region(2);
  counting.attach_failures = 3;
  const std::array<Range, 2> ranges = {block(r, 0), block(r, 1)};
  holes.restore_trap(ranges);
  EXPECT_EQ(counting.attach_failures, 0u);
  ASSERT_EQ(counting.attached.size(), 1u);
  EXPECT_EQ(counting.attached[0].size, 2 * kUnit);
}

TEST_F(PagerManagedHoles, WhereDevicesHavePageTablesOfTheirOwnTheTrapHasNeverGone) {
  const Region& r = device_region(1);
  const std::array<Range, 1> ranges = {block(r, 0)};
  managed.view = vmem::device::CpuView::split;
  holes.restore_trap(ranges);
  EXPECT_TRUE(counting.attached.empty());
}

TEST_F(PagerManagedHoles, ABusyDeviceIsAskedAgainAndARefusalIsOne) {
  const Region& r = device_region(1);
  const std::array<Range, 1> ranges = {block(r, 0)};
  managed.punch_error = EBUSY;
  managed.punch_failures = 3;
  EXPECT_TRUE(holes.punch(ranges).ok());
  EXPECT_EQ(managed.punches, 4u);
  managed.punch_error = EIO;
  managed.punch_failures = 3;
  EXPECT_EQ(holes.punch(ranges).code(), -EIO);
  EXPECT_EQ(managed.punches, 5u);
}

}  // namespace
