// The way to a device: which blocks are claimed for it, what they wait for, and where they are when they have come, or
// could not.
#include <gtest/gtest.h>

#include <cerrno>

#include "pager_device_parts.h"

namespace {

using vmem::core::BigLock;
using vmem::core::BlockIndex;
using vmem::core::State;
using vmem::core::Urgency;
using vmem::memory::Use;
using vmem::pager::Batch;
using vmem::pager::DeferredWork;
using vmem::pager::Departure;
using vmem::pager::Move;
using vmem::pager::Region;
using vmem::pager::SpanOf;
using vmem::pager::Wish;
namespace core = vmem::core;
namespace store = vmem::store;

class PagerPromoter : public vmem::pager::test::DeviceParts {
 protected:
  void SetUp() override {
    config.device_budget = 4 * kUnit;
    devices.moves = true;
    ASSERT_TRUE(gpus.use(0).ok());
    ASSERT_TRUE(gpus.use(1).ok());
  }
  Region& supplied(size_t count) {
    Region& r = device_region(count);
    supply_frames(r);
    return r;
  }
  // Somebody wants the blocks on device 0; what can be read is read.
  void request(Region& r, BlockIndex first, BlockIndex last, Urgency urgency = Urgency::prefetch) {
    DeferredWork after;
    {
      BigLock lock(map.mutex());
      const void* owner = urgency == Urgency::acquire ? &r : nullptr;
      ASSERT_TRUE(wishes.push_back({&r, first, last, 0, urgency, owner}));
      promoter.pump(after);
    }
    page_in.run(after);
    engine.until_idle();
  }
  size_t ready() {
    BigLock lock(map.mutex());
    return gpus[0].ready.size();
  }
  // As a worker does it.
  void arrive() {
    Batch batch;
    {
      BigLock lock(map.mutex());
      for (Move* m : gpus[0].ready) batch.push_back(m);
      gpus[0].ready.clear();
    }
    arrivals.run(batch, 0);
  }
  void bring_with(Region& r, BlockIndex b, uint64_t value) {
    bring(r, b);
    {
      BigLock lock(map.mutex());
      r.table[b].flags &= static_cast<uint16_t>(~core::kProtected);
    }
    ASSERT_TRUE(trap.unprotect(r.address(b), r.block_size).ok());
    ASSERT_TRUE(trap.store(r.address(b), value));
  }
  void put_away(Region& r, BlockIndex b, uint64_t value) {
    bring_with(r, b, value);
    Move* m = nullptr;
    {
      BigLock lock(map.mutex());
      map.withdraw(r.table[b].aux);
      m = isolator.begin_take(r, b, false, false);
      ASSERT_NE(m, nullptr);
    }
    write_back.evict_batch({&m, 1});
    engine.until_idle();
    ASSERT_EQ(state(r, b), State::stored);
  }
  // .. of a block that is on a device.
  void take_away(Region& r, BlockIndex b) {
    BigLock lock(map.mutex());
    r.table[b].flags = 0;
    if (r.table[b].extent) space.release(r.table[b].extent);
    r.table[b].extent = {};
    remove(r, b);
  }
  uint64_t charged(size_t d = 0) {
    BigLock lock(map.mutex());
    return gpus[d].budget.charged();
  }

  vmem::pager::EvictRequests evictions;
  vmem::pager::ReadAhead read_ahead{shared, waits, page_in, speculation, evictions, pressure};
  vmem::pager::Queue<Wish> wishes;
  vmem::pager::Queue<Departure> departures;
  vmem::pager::Promoter promoter{shared, wishes, gpus, blocks, page_in, read_ahead, reader, supply, migrator, *this};
  vmem::pager::Arrivals arrivals{shared, &devices, departures, gpus, blocks, holes, failed, page_in, supply, *this};
};

TEST_F(PagerPromoter, ABlockOfZerosNeedsNoFrameAndNothingIsRead) {
  Region& r = device_region(1);
  request(r, 0, 0);
  EXPECT_EQ(state(r, 0), State::entering);
  EXPECT_EQ(charged(), kUnit);
  arrive();
  EXPECT_EQ(state(r, 0), State::on_device);
  EXPECT_EQ(engine.count(store::Io::Op::read), 0u);
  EXPECT_TRUE(wishes.empty());
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
  EXPECT_EQ(state(r, 0), State::taking);
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
    ASSERT_FALSE(wishes.empty());
    EXPECT_EQ(wishes.front().next, 4u);
    EXPECT_EQ(gpus[0].budget.wanted(), 2 * kUnit);
    wishes.pop_front();
  }
  arrive();
  for (const BlockIndex b : {0, 1, 2, 3}) take_away(r, b);
}

TEST_F(PagerPromoter, AHintLeavesLeasedBlocksWhereTheyAre) {
  Region& r = supplied(2);
  bring(r, 0);
  {
    BigLock lock(map.mutex());
    ASSERT_TRUE(grants.grant({&r, 0, 0}, VMEM_READ, VMEM_HOST, nullptr).ok());
  }
  request(r, 0, 1);
  EXPECT_EQ(state(r, 0), State::resident);
  EXPECT_EQ(state(r, 1), State::entering);
  arrive();
  take_away(r, 1);
  BigLock lock(map.mutex());
  grants.take_back({&r, 0, 0}, VMEM_READ, VMEM_HOST, nullptr);
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
  EXPECT_EQ(wishes.size(), 1u);
  wishes.pop_front();
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

TEST_F(PagerPromoter, WhatADeviceCannotMakeIsInItsFrameAndWhoWaitsHearsWhy) {
  Region& r = supplied(1);
  put_away(r, 0, 3);
  request(r, 0, 0);
  devices.prepare_error = EIO;
  arrive();
  EXPECT_EQ(state(r, 0), State::held);
  EXPECT_EQ(charged(), 0u);
  BigLock lock(map.mutex());
  EXPECT_EQ(gpus[0].failures, 1u);
  EXPECT_EQ(gpus[0].failure.code(), -EIO);
}

TEST_F(PagerPromoter, AnAcquireBeginsWithItsOwnBlocksAndAWorkerEndsIt) {
  Region& r = device_region(2);
  request(r, 0, 1, Urgency::acquire);
  ASSERT_EQ(ready(), 2u);
  BigLock lock(map.mutex());
  const SpanOf mine{&r, 1, 1};
  const Batch batch = arrivals.take_ready({&mine, 1}, 0);
  ASSERT_EQ(batch.size(), 1u);
  EXPECT_FALSE(arrivals.end_issued(lock, 0));
  lock.unlock();
  arrivals.begin(batch, 0);
  lock.lock();
  EXPECT_EQ(r.table[1].state, State::entering);
  EXPECT_TRUE(blocks.has_come(r, 1, 0)) << "its stream can wait for the copy";
  EXPECT_FALSE(blocks.has_come(r, 0, 0));
  EXPECT_TRUE(arrivals.end_issued(lock, 0));
  EXPECT_EQ(r.table[1].state, State::on_device);
  EXPECT_EQ(r.issued, 0u);
  lock.unlock();
  arrive();
  for (const BlockIndex b : {0, 1}) take_away(r, b);
}

TEST_F(PagerPromoter, ABlockOnAnotherDeviceComesStraightFromThere) {
  Region& r = device_region(1);
  Move* m = nullptr;
  {
    BigLock lock(map.mutex());
    place(r, 0, 1);
  }
  request(r, 0, 0);
  {
    BigLock lock(map.mutex());
    ASSERT_EQ(gpus[0].from_peers.size(), 1u);
    m = gpus[0].from_peers.front();
    gpus[0].from_peers.clear();
  }
  migrator.run({&m, 1}, 0, 0);
  EXPECT_EQ(charged(0), kUnit);
  EXPECT_EQ(charged(1), 0u);
  take_away(r, 0);
}

}  // namespace
