// Promotion: which blocks are claimed for it, what they wait for, and where they are after it
// succeeded or failed.
#include <gtest/gtest.h>

#include <cerrno>

#include "edit_block.h"
#include "pager_device_parts.h"

namespace vmem::pager::test {
namespace {

class PagerPromoter : public PromotionParts {};

TEST_F(PagerPromoter, ABlockOfZerosNeedsNoFrameAndNothingIsRead) {
  Region& r = device_region(1);
  request(r, 0, 0);
  EXPECT_EQ(state(r, 0), State::promoting);
  EXPECT_EQ(charged(), kUnit);
  arrive();
  EXPECT_EQ(state(r, 0), State::on_device);
  EXPECT_EQ(engine.count(store::Io::Op::read), 0u);
  EXPECT_TRUE(promotion_requests.empty());
  take_away(r, 0);
}

TEST_F(PagerPromoter, WhatTheStoreHasIsReadIntoAFrameWhichKeepsItAsAHostCopy) {
  Region& r = supplied(1);
  put_away(r, 0, 7);
  request(r, 0, 0);
  EXPECT_EQ(ready(), 1u);
  arrive();
  EXPECT_EQ(state(r, 0), State::on_device);
  EXPECT_EQ(devices.came, std::vector<uint64_t>{7});
  {
    BigLock lock(map.mutex());
    EXPECT_TRUE(map.copies().has(r.table[0].aux));
  }
  take_away(r, 0);
}

TEST_F(PagerPromoter, AResidentBlockLeavesHostMemory) {
  Region& r = supplied(1);
  bring_with(r, 0, 9);
  request(r, 0, 0);
  EXPECT_EQ(state(r, 0), State::isolating);
  arrive();
  EXPECT_EQ(state(r, 0), State::on_device);
  EXPECT_EQ(devices.came, std::vector<uint64_t>{9});
  EXPECT_NE(flags(r, 0, core::kDirty), 0) << "the SSD has it not";
  {
    BigLock lock(map.mutex());
    EXPECT_EQ(budget.charged(Use::blocks), 0u);
  }
  take_away(r, 0);
}

TEST_F(PagerPromoter, AResidentBlockThatSomebodyHasPinnedStaysAndIsWhole) {
  Region& r = supplied(1);
  bring_with(r, 0, 9);
  request(r, 0, 0);
  trap.pin_drop(2);
  arrive();
  EXPECT_EQ(state(r, 0), State::resident);
  EXPECT_EQ(charged(), 0u);
  uint64_t value = 0;
  ASSERT_TRUE(trap.load(r.address(0), &value));
  EXPECT_EQ(value, 9u);
}

TEST_F(PagerPromoter, RequestsForAFullDeviceWaitAndSayWhatTheyWant) {
  Region& r = device_region(6);
  request(r, 0, 5);
  EXPECT_EQ(ready(), 4u);
  {
    BigLock lock(map.mutex());
    ASSERT_FALSE(promotion_requests.empty());
    EXPECT_EQ(promotion_requests.front().next, 4u);
    EXPECT_EQ(gpus[0].budget.wanted(), 2 * kUnit);
    promotion_requests.pop_front();
  }
  arrive();
  for (const BlockIndex b : {0, 1, 2, 3}) take_away(r, b);
}

TEST_F(PagerPromoter, AHintLeavesLeasedBlocksWhereTheyAre) {
  Region& r = supplied(2);
  bring_with(r, 0, 1);
  {
    BigLock lock(map.mutex());
    ASSERT_TRUE(lease_manager.grant({&r, 0, 0}, VMEM_READ, VMEM_HOST, nullptr).ok());
  }
  request(r, 0, 1);
  EXPECT_EQ(state(r, 0), State::resident);
  EXPECT_EQ(state(r, 1), State::promoting);
  arrive();
  take_away(r, 1);
  BigLock lock(map.mutex());
  lease_manager.take_back({&r, 0, 0}, VMEM_READ, VMEM_HOST, nullptr);
}

TEST_F(PagerPromoter, WhatTheCpuIsShownOfAnotherDevicesBlockStaysWhateverAHintWants) {
  Region& r = supplied(2);
  {
    BigLock lock(map.mutex());
    for (const BlockIndex b : {0, 1}) {
      place(r, b, 1);
      ASSERT_TRUE(budget.charge(kUnit, 0));
      ASSERT_TRUE(cpu_mappings.expect());
      cpu_mappings.show(r, b, 1);
    }
    ASSERT_TRUE(lease_manager.grant({&r, 1, 1}, VMEM_READ, 1, nullptr).ok());
  }
  request(r, 0, 1);
  BigLock lock(map.mutex());
  EXPECT_TRUE(promotion_requests.empty());
  EXPECT_FALSE(cpu_mappings.waits()) << "a lease may come: nothing is asked for in the name of a store";
  EXPECT_EQ(r.table[0].flags & (core::kFaultPending | core::kStorePending), 0);
  lease_manager.take_back({&r, 1, 1}, VMEM_READ, 1, nullptr);
  map.match_holds(lock, {&r, 1, 1});
  cpu_mappings.forget(r);
  for (const BlockIndex b : {0, 1}) {
    map.frame_table()[r.table[b].aux].dev.cpu_mapped = map.frame_table()[r.table[b].aux].dev.asked = false;
    budget.credit(kUnit);
    edit(r.table, b).flags = 0;
    remove(r, b);
  }
}

TEST_F(PagerPromoter, WithoutAFrameARequestWaitsAndNothingIsCharged) {
  Region& r = device_region(1);
  {
    BigLock lock(map.mutex());
    budget.set(uint64_t{48} << 20);
    reserve.follow_budget();
  }
  put_away(r, 0, 3);
  request(r, 0, 0);
  EXPECT_EQ(state(r, 0), State::stored);
  EXPECT_EQ(charged(), 0u);
  BigLock lock(map.mutex());
  EXPECT_EQ(promotion_requests.size(), 1u);
  promotion_requests.pop_front();
}

TEST_F(PagerPromoter, AReadThatFailsLeavesTheBlockWhereItWasAndIsTold) {
  Region& r = supplied(1);
  put_away(r, 0, 3);
  engine.fail(store::Io::Op::read, EIO);
  request(r, 0, 0, Urgency::acquire);
  EXPECT_EQ(state(r, 0), State::stored);
  EXPECT_EQ(ready(), 0u);
  EXPECT_EQ(charged(), 0u);
  BigLock lock(map.mutex());
  EXPECT_EQ(r.reason(0).code(), -EIO);
}

class PagerCopyIn : public PagerPromoter {};

TEST_F(PagerCopyIn, WhatADeviceCannotMakeIsInItsFrameAndWhoWaitsHearsWhy) {
  Region& r = supplied(1);
  put_away(r, 0, 3);
  request(r, 0, 0);
  devices.prepare_error = EIO;
  arrive();
  EXPECT_EQ(state(r, 0), State::staged);
  EXPECT_EQ(charged(), 0u);
  BigLock lock(map.mutex());
  EXPECT_EQ(gpus[0].failures, 1u);
  EXPECT_EQ(gpus[0].failure.code(), -EIO);
}

TEST_F(PagerCopyIn, AnAcquireBeginsWithItsOwnBlocksAndAWorkerEndsIt) {
  Region& r = device_region(2);
  request(r, 0, 1, Urgency::acquire);
  ASSERT_EQ(ready(), 2u);
  BigLock lock(map.mutex());
  const BlockSpan mine{&r, 1, 1};
  const Batch batch = copy_in.take_ready({&mine, 1}, 0);
  ASSERT_EQ(batch.size(), 1u);
  EXPECT_FALSE(copy_in.end_issued(lock, 0));
  lock.unlock();
  copy_in.begin(batch, 0);
  lock.lock();
  EXPECT_EQ(r.table[1].state, State::promoting);
  EXPECT_TRUE(blocks.has_come(r, 1, 0)) << "its stream can wait for the copy";
  EXPECT_FALSE(blocks.has_come(r, 0, 0));
  EXPECT_TRUE(copy_in.end_issued(lock, 0));
  EXPECT_EQ(r.table[1].state, State::on_device);
  EXPECT_EQ(r.counts.issued, 0u);
  lock.unlock();
  arrive();
  for (const BlockIndex b : {0, 1}) take_away(r, b);
}

TEST_F(PagerPromoter, ABlockOnAnotherDeviceComesStraightFromThere) {
  Region& r = device_region(1);
  Transition* m = nullptr;
  {
    BigLock lock(map.mutex());
    place(r, 0, 1);
  }
  request(r, 0, 0);
  {
    BigLock lock(map.mutex());
    ASSERT_EQ(gpus[0].incoming.size(), 1u);
    m = gpus[0].incoming.front();
    gpus[0].incoming.clear();
  }
  migrator.run({&m, 1}, 0, 0);
  EXPECT_EQ(charged(0), kUnit);
  EXPECT_EQ(charged(1), 0u);
  take_away(r, 0);
}

}  // namespace
}  // namespace vmem::pager::test
