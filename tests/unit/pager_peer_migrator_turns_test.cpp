// Blocks that migrate between devices: which a worker takes in a turn, and when they come to rest.
#include <gtest/gtest.h>

#include <cerrno>
#include <utility>

#include "pager_device_parts.h"

namespace vmem::pager::test {
namespace {

class PagerPeerMigratorTurns : public DeviceParts {
 protected:
  static constexpr size_t kLarge = size_t{64} << 20;

  void SetUp() override {
    tunables.device_budget = size_t{2} << 30;
    devices.free = devices.total = uint64_t{4} << 30;
    devices.transitions = true;
    for (const int d : {0, 1}) ASSERT_TRUE(gpus.use(d).ok());
  }
  // Called when waiters are told that there is room.
  void memory_freed(DeferredWork&) VMEM_LOCKED override { charged_when_told_ = gpus[1].budget.charged(); }
  // Makes blocks of device 1 wait to go to device 0.
  void let_wait(Region& r, BlockIndex first, BlockIndex count) {
    BigLock lock(map.mutex());
    for (BlockIndex b = first; b < first + count; ++b) {
      place(r, b, 1);
      ASSERT_TRUE(map.reserve_transition());
      gpus[0].incoming.push_back(migrator.begin(r, b, 0));
    }
  }
  size_t waiting() {
    BigLock lock(map.mutex());
    return gpus[0].incoming.size();
  }
  void expect_there(Region& r, BlockIndex count) {
    BigLock lock(map.mutex());
    EXPECT_EQ(charged_when_told_, 0u) << "who wants room is told when there is some";
    EXPECT_EQ(gpus[0].budget.charged(), count * r.block_size);
    EXPECT_EQ(gpus[1].budget.charged(), 0u);
    for (BlockIndex b = 0; b < count; ++b) {
      EXPECT_EQ(r.table[b].state, State::on_device);
      EXPECT_EQ(r.table[b].device, 0);
      remove(r, b);
    }
  }
  uint64_t charged_when_told_ = UINT64_MAX;
};

TEST_F(PagerPeerMigratorTurns, BlocksThatComeWhileOthersMoveGoWithThem) {
  Region& r = device_region(3);
  let_wait(r, 0, 2);
  bool more = true;
  devices.while_migrating = [&](int) {
    if (std::exchange(more, false)) let_wait(r, 2, 1);
  };
  migrator.run_waiting(0);
  EXPECT_EQ(devices.migrated, 3u);
  EXPECT_EQ(waiting(), 0u);
  expect_there(r, 3);
}

// A waiter of one large block does not wait for the next.
TEST_F(PagerPeerMigratorTurns, ALargeOneIsAtRestBeforeTheNextGoes) {
  Region& r = device_region(4, kLarge);
  let_wait(r, 0, 4);
  devices.while_migrating = [&](int) {
    BigLock lock(map.mutex());
    for (BlockIndex b = 0; b + 1 < devices.migrated; ++b) EXPECT_EQ(r.table[b].state, State::on_device) << b;
  };
  migrator.run_waiting(0);
  EXPECT_EQ(devices.migrated, 4u);
  expect_there(r, 4);
}

// However many blocks come: a turn ends, since its worker has other work.
TEST_F(PagerPeerMigratorTurns, ATurnEnds) {
  constexpr BlockIndex kTurn = kPeerTurnBytes / kLarge;
  Region& r = device_region(2 * kTurn, kLarge);
  let_wait(r, 0, 1);
  BlockIndex came = 1;
  devices.while_migrating = [&](int) {
    if (came < 2 * kTurn) let_wait(r, came++, 1);
  };
  migrator.run_waiting(0);
  EXPECT_EQ(devices.migrated, kTurn);
  EXPECT_EQ(waiting(), 1u);
  devices.while_migrating = nullptr;
  migrator.run_waiting(0);
  EXPECT_EQ(waiting(), 0u);
  expect_there(r, kTurn + 1);
}

TEST_F(PagerPeerMigratorTurns, OneThatCannotGoStaysAndTheNextGoes) {
  Region& r = device_region(2, kLarge);
  let_wait(r, 0, 2);
  devices.migrate_error = ENOMEM;
  devices.while_migrating = [&](int) {
    if (devices.migrated == 2) devices.migrate_error = 0;
  };
  migrator.run_waiting(0);
  BigLock lock(map.mutex());
  EXPECT_EQ(r.table[0].device, 1);
  EXPECT_EQ(r.table[1].device, 0);
  for (const int d : {0, 1}) EXPECT_EQ(gpus[static_cast<size_t>(d)].budget.charged(), kLarge);
  for (const BlockIndex b : {0, 1}) remove(r, b);
}

}  // namespace
}  // namespace vmem::pager::test
