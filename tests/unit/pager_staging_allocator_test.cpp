// Staging frames as they are made, found and freed, on devices that pin everything.
#include <gtest/gtest.h>

#include <cerrno>
#include <vector>

#include "core/clock.h"
#include "edit_block.h"
#include "pager_device_parts.h"

namespace vmem::pager::test {
namespace {

class PagerStagingAllocator : public DeviceParts {
 protected:
  core::Status want(const Region& r) {
    uint64_t mark = 0;
    {
      BigLock lock(map.mutex());
      mark = clock.look(now_ns());
    }
    return staging_allocator.want(r, mark);
  }
};

TEST_F(PagerStagingAllocator, ARegionHasFramesOfItsSizeUntilItGoesAndOthersNeedTheMemory) {
  Region& r = device_region(1);
  supply_frames(r);
  BigLock lock(map.mutex());
  const Staging& pool = staging.of(r.block_size).frames;
  EXPECT_GE(pool.total(), Staging::kLeast);
  EXPECT_EQ(budget.charged(Use::staging), pool.total() * kUnit);
  EXPECT_EQ(devices.pinned, 1u);
  EXPECT_FALSE(staging_allocator.give_back(lock)) << "a region needs them";
  --staging.of(r.block_size).regions;
  EXPECT_TRUE(staging_allocator.give_back(lock));
  EXPECT_EQ(budget.charged(Use::staging), 0u);
  EXPECT_EQ(devices.pinned, 0u);
  EXPECT_FALSE(staging_allocator.give_back(lock)) << "there are none";
}

TEST_F(PagerStagingAllocator, WhereTheShareNeverHasRoomForThemTheRegionIsRefusedAtOnce) {
  EXPECT_EQ(want(device_region(1)).code(), -ENOMEM);
  EXPECT_EQ(budget.charged(Use::staging), 0u);
}

TEST_F(PagerStagingAllocator, WhoFindsNoFrameHasSomeMade) {
  Region& r = device_region(1);
  BigLock lock(map.mutex());
  budget.set(uint64_t{48} << 20);
  reserve.follow_budget();
  EXPECT_FALSE(staging_allocator.grow(lock)) << "nobody wants any";
  const uint64_t called = gpus.work().count();
  EXPECT_EQ(staging_allocator.frame(r, 0), nullptr);
  EXPECT_GT(gpus.work().count(), called) << "a worker makes them";
  EXPECT_TRUE(staging_allocator.grow(lock));
  std::byte* const frame = staging_allocator.frame(r, 0);
  ASSERT_NE(frame, nullptr);
  EXPECT_FALSE(staging_allocator.grow(lock));
  EXPECT_EQ(staging_allocator.is_short(), std::nullopt) << "more can be made";
  staging.of(r.block_size).frames.put(frame);
}

TEST_F(PagerStagingAllocator, AHostCopyKeepsItsFrameWhileTheLastAreMade) {
  Region& r = device_region(1);
  supply_frames(r);
  ASSERT_TRUE(gpus.use(0).ok());
  BigLock lock(map.mutex());
  Staging& pool = staging.of(r.block_size).frames;
  place(r, 0, 0);
  ASSERT_TRUE(staging_allocator.keep_copy(r, 0, staging_allocator.frame(r, 0)));
  std::vector<std::byte*> taken;
  while (std::byte* const frame = pool.get(0)) taken.push_back(frame);
  const size_t last = staging.of(r.block_size).growth.take(SIZE_MAX);  // the rest of the share
  ASSERT_TRUE(pool.reserve(last, 0));
  staging.of(r.block_size).growth.begin();
  EXPECT_EQ(staging_allocator.frame(r, 0), nullptr);
  EXPECT_EQ(staging_allocator.is_short(), std::nullopt) << "evictors take none, either";
  EXPECT_TRUE(map.copies().has(r.table[0].aux));
  pool.unreserve(last);
  staging.of(r.block_size).growth.end(false, now_ns());
  std::byte* const frame = staging_allocator.frame(r, 0);
  EXPECT_NE(frame, nullptr) << "they could not be made";
  EXPECT_FALSE(map.copies().has(r.table[0].aux));
  pool.put(frame);
  for (std::byte* const each : taken) pool.put(each);
  edit(r.table, 0).flags = 0;
  remove(r, 0);
}

TEST_F(PagerStagingAllocator, AHostCopyGivesUpItsFrameUnlessItMayBeAllThereIs) {
  Region& r = device_region(1);
  supply_frames(r);
  ASSERT_TRUE(gpus.use(0).ok());
  BigLock lock(map.mutex());
  place(r, 0, 0);
  std::byte* const frame = staging_allocator.frame(r, 0);
  ASSERT_NE(frame, nullptr);
  ASSERT_TRUE(staging_allocator.keep_copy(r, 0, frame));
  const core::FrameId copy = map.frame_table()[r.table[0].aux].dev.copy;
  const auto choose = [&]() VMEM_LOCKED {
    policy::Victim victim;
    return map.policy(copy).victims(1, {&victim, 1}) == 1 && victim.id == copy;
  };
  edit(r.table, 0).flags |= core::kDirty;
  gpus[0].lost = true;
  ASSERT_TRUE(choose());
  EXPECT_FALSE(staging_allocator.evict_copy(copy)) << "its device is lost";
  EXPECT_TRUE(map.copies().has(r.table[0].aux));
  gpus[0].lost = false;
  ASSERT_TRUE(choose());
  EXPECT_TRUE(staging_allocator.evict_copy(copy));
  EXPECT_FALSE(map.copies().has(r.table[0].aux));
  EXPECT_EQ(staging.of(r.block_size).frames.free(), staging.of(r.block_size).frames.total());
  edit(r.table, 0).flags = 0;
  remove(r, 0);
}

TEST_F(PagerStagingAllocator, WhatIsPinnedToItsDeviceOrChangesThereKeepsNoCopy) {
  Region& r = device_region(2);
  supply_frames(r);
  ASSERT_TRUE(gpus.use(0).ok());
  BigLock lock(map.mutex());
  std::byte* const frame = staging_allocator.frame(r, 0);
  ASSERT_NE(frame, nullptr);
  place(r, 0, 0);
  map.frame_table()[r.table[0].aux].dev.changed = true;
  EXPECT_FALSE(staging_allocator.keep_copy(r, 0, frame));
  r.advice.advised.push_back({1, 1, policy::Temperature::normal, true});
  place(r, 1, 0);
  EXPECT_FALSE(staging_allocator.keep_copy(r, 1, frame));
  staging.of(r.block_size).frames.put(frame);
  remove(r, 0);
  remove(r, 1);
}

}  // namespace
}  // namespace vmem::pager::test
