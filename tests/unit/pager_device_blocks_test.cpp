// Blocks on a device: what is known of those that may change there, and their state when they come
// to rest.
#include <gtest/gtest.h>

#include "edit_block.h"
#include "pager_device_parts.h"

namespace vmem::pager::test {
namespace {

class PagerDeviceBlocks : public DeviceParts {
 protected:
  void SetUp() override { ASSERT_TRUE(gpus.use(0).ok() && gpus.use(1).ok()); }
  bool dirty(const Region& r) VMEM_LOCKED { return (r.table[0].flags & core::kDirty) != 0; }
  bool has_copy(const Region& r) VMEM_LOCKED { return map.copies().has(r.table[0].aux); }
};

TEST_F(PagerDeviceBlocks, WhatMayHaveChangedIsDirtyAndHasNoCopyUntilNobodyHasStored) {
  Region& r = device_region(1);
  supply_frames(r);
  BigLock lock(map.mutex());
  place(r, 0, 0);
  ASSERT_TRUE(staging_allocator.keep_copy(r, 0, staging_allocator.frame(r, 0)));
  blocks.may_change(r, 0);
  EXPECT_TRUE(dirty(r));
  EXPECT_FALSE(has_copy(r));
  blocks.not_changed({&r, 0, 0}, 1);
  EXPECT_TRUE(dirty(r)) << "that was said of another device";
  blocks.not_changed({&r, 0, 0}, 0);
  EXPECT_FALSE(dirty(r));
  EXPECT_TRUE(has_copy(r));
  blocks.may_change(r, 0);
  blocks.may_change(r, 0);
  blocks.not_changed({&r, 0, 0}, 0);
  EXPECT_TRUE(dirty(r)) << "one of two leases knows nothing of the other";
  EXPECT_EQ(map.frame_table()[r.table[0].aux].dev.copy, core::kNoFrame);
  edit(r.table, 0).flags = 0;
  remove(r, 0);
}

TEST_F(PagerDeviceBlocks, WhatWasDirtyBeforeStaysSoThoughNobodyHasStored) {
  Region& r = device_region(1);
  BigLock lock(map.mutex());
  place(r, 0, 0);
  edit(r.table, 0).flags |= core::kDirty;
  blocks.may_change(r, 0);
  blocks.not_changed({&r, 0, 0}, 0);
  EXPECT_TRUE(dirty(r));
  edit(r.table, 0).flags = 0;
  remove(r, 0);
}

TEST_F(PagerDeviceBlocks, AClaimedBlockIsNotChosenToLeave) {
  Region& r = device_region(1);
  BigLock lock(map.mutex());
  place(r, 0, 0);
  blocks.claim(r, 0);
  EXPECT_EQ(r.table[0].state, State::demoting);
  policy::Victim victim;
  EXPECT_EQ(map.policy(r.table[0].aux).victims(1, {&victim, 1}), 0u);
  blocks.unclaim(r, 0);
  EXPECT_EQ(r.table[0].state, State::on_device);
  EXPECT_FALSE(cpu_mappings.waits()) << "nobody met it";
  EXPECT_EQ(map.policy(r.table[0].aux).victims(1, {&victim, 1}), 1u);
  map.frame_table()[r.table[0].aux].admitted = false;  // the policy has forgotten it
  remove(r, 0);
}

TEST_F(PagerDeviceBlocks, WhoMetABlockOnItsWayIsServedWhenItHasComeToRest) {
  Region& r = device_region(1);
  BigLock lock(map.mutex());
  place(r, 0, 0);
  blocks.claim(r, 0);
  edit(r.table, 0).flags |= core::kFaultPending;
  const uint64_t called = gpus.work().count();
  blocks.unclaim(r, 0);
  EXPECT_TRUE(cpu_mappings.waits());
  EXPECT_GT(gpus.work().count(), called);
  cpu_mappings.forget(r);
  edit(r.table, 0).flags = 0;
  remove(r, 0);
}

TEST_F(PagerDeviceBlocks, WhatComesToRestOnALostDeviceIsRescued) {
  Region& r = device_region(1);
  BigLock lock(map.mutex());
  place(r, 0, 0);
  blocks.claim(r, 0);
  gpus[0].lost = true;
  blocks.unclaim(r, 0);
  EXPECT_TRUE(gpus[0].rescue);
  gpus[0].lost = gpus[0].rescue = false;
  remove(r, 0);
}

TEST_F(PagerDeviceBlocks, AGuestThatIsUsedIsTheDevicesOwnAndOneThatCouldNotLeaveIsAGuestAgain) {
  Region& r = device_region(1);
  BigLock lock(map.mutex());
  place(r, 0, 1);
  map.withdraw(r.table[0].aux);
  map.spilled().add(r.table[0].aux, 1);
  EXPECT_EQ(map.spilled().bytes(1), kUnit);
  map.spilled().remove(r.table[0].aux);
  Transition move;
  move.region = &r;
  move.device = 1;
  move.move.was_spilled = true;
  blocks.know_again(move);
  EXPECT_TRUE(map.spilled().is(r.table[0].aux));
  EXPECT_FALSE(map.frame_table()[r.table[0].aux].admitted);
  blocks.adopt(r, 0);
  EXPECT_FALSE(map.spilled().is(r.table[0].aux));
  EXPECT_TRUE(map.frame_table()[r.table[0].aux].admitted);
  remove(r, 0);
}

TEST_F(PagerDeviceBlocks, ABlockHasComeWhenItsCopyIsIssuedAndNotBefore) {
  Region& r = device_region(1);
  BigLock lock(map.mutex());
  EXPECT_FALSE(blocks.has_come(r, 0, 0));
  place(r, 0, 0);
  EXPECT_TRUE(blocks.has_come(r, 0, 0));
  EXPECT_FALSE(blocks.has_come(r, 0, 1));
  blocks.claim(r, 0);
  EXPECT_FALSE(blocks.has_come(r, 0, 0));
  blocks.unclaim(r, 0);
  remove(r, 0);
}

}  // namespace
}  // namespace vmem::pager::test
