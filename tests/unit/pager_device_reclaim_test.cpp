// Room on devices, and blocks that migrate: which leave, where they go, and what is charged for it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <functional>
#include <thread>
#include <vector>

#include "core/clock.h"
#include "edit_block.h"
#include "pager_device_parts.h"

namespace vmem::pager::test {
namespace {

class OnTwoDevices : public DeviceParts {
 protected:
  void SetUp() override {
    tunables.device_budget = 4 * kUnit;
    devices.transitions = devices.streams = true;
    ASSERT_TRUE(gpus.use(0).ok());
    ASSERT_TRUE(gpus.use(1).ok());
  }
  // `count` dirty blocks of a region are on device 0.
  Region& placed(size_t count) {
    Region& r = device_region(count);
    supply_frames(r);
    BigLock lock(map.mutex());
    for (BlockIndex b = 0; b < count; ++b) {
      place(r, b, 0);
      edit(r.table, b).flags |= core::kDirty;
    }
    return r;
  }
  size_t on(const Region& r, int d) VMEM_LOCKED {
    size_t n = 0;
    for (BlockIndex b = 0; b < r.blocks; ++b) n += r.table[b].state == State::on_device && r.table[b].device == d;
    return n;
  }
  size_t held(const Region& r) VMEM_LOCKED {
    size_t n = 0;
    for (BlockIndex b = 0; b < r.blocks; ++b) n += r.table[b].state == State::staged;
    return n;
  }
  void clear(Region& r) VMEM_LOCKED {
    DeferredWork after;
    for (BlockIndex b = 0; b < r.blocks; ++b) {
      edit(r.table, b).flags = 0;
      if (r.table[b].state == State::on_device) {
        remove(r, b);
      } else if (r.table[b].state == State::staged) {
        ASSERT_TRUE(map.reserve_transition());
        map.withdraw(r.table[b].aux);
        write_back.drop_held(r, b, after);
      }
    }
  }
};

class PagerPeerMigrator : public OnTwoDevices {};

TEST_F(PagerPeerMigrator, ABlockCountsForBothDevicesOnItsWayAndForOneWhereverItComesToRest) {
  Region& r = placed(1);
  BigLock lock(map.mutex());
  for (const int error : {EIO, 0}) {
    devices.migrate_error = error;
    ASSERT_TRUE(map.reserve_transition());
    Transition* const m = migrator.begin(r, 0, 1);
    EXPECT_EQ(gpus[0].budget.charged(), kUnit);
    EXPECT_EQ(gpus[1].budget.charged(), kUnit);
    EXPECT_EQ(r.table[0].device, 1);
    lock.unlock();
    migrator.run({&m, 1}, 1, 1);
    lock.lock();
    const int d = error != 0 ? 0 : 1;
    EXPECT_EQ(r.table[0].state, State::on_device);
    EXPECT_EQ(r.table[0].device, d);
    EXPECT_EQ(gpus[static_cast<size_t>(d)].budget.charged(), kUnit);
    EXPECT_EQ(gpus[static_cast<size_t>(1 - d)].budget.charged(), 0u);
    EXPECT_TRUE(map.frame_table()[r.table[0].aux].admitted);
    EXPECT_EQ(gpus.check(), "");
  }
  EXPECT_EQ(gpus[1].failures, 1u);
  clear(r);
}

TEST_F(PagerPeerMigrator, AGuestThatCouldNotGoIsNoneAndTheDeviceIsLeftInPeaceForAWhile) {
  Region& r = placed(1);
  BigLock lock(map.mutex());
  map.spilled().set_share(50);
  devices.migrate_error = ENOMEM;
  ASSERT_TRUE(map.reserve_transition());
  Transition* const m = migrator.begin(r, 0, 1);
  m->move.spills = true;
  map.spilled().add(r.table[0].aux, 1);
  lock.unlock();
  migrator.run({&m, 1}, 1, 0);
  lock.lock();
  EXPECT_FALSE(map.spilled().is(r.table[0].aux));
  EXPECT_EQ(gpus[1].failures, 0u) << "nobody waits for it there";
  EXPECT_FALSE(map.spilled().fits(1, gpus[1].budget, kUnit, now_ns()));
  clear(r);
}

class PagerDeviceReclaim : public OnTwoDevices {
 protected:
  PooledList<PromotionRequest>& promotion_requests = queues.promotion_requests;

  // Leases blocks 2 and 3 again each time, before their leases end, until a block has left, or for
  // a minute.
  bool make_beside_leases(Region& r, BigLock& lock, const std::function<void()>& at_left = nullptr,
                          const std::function<void(bool left)>& looked = nullptr) {
    const vmem_range others{r.address(2), 2 * kUnit, VMEM_READ, 0};
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    bool left = false;
    while (!left && std::chrono::steady_clock::now() < deadline) {
      EXPECT_TRUE(lease_manager.grant({&r, 2, 3}, VMEM_READ, 0, nullptr).ok());
      devices.reached = false;
      lock.unlock();
      EXPECT_TRUE(releases.release({&others, 1}, nullptr, nullptr, false).ok());
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      lock.lock();
      left = room.make(lock, 0);
      if (left && at_left) at_left();
      EXPECT_TRUE(lease_manager.grant({&r, 2, 3}, VMEM_READ, 0, nullptr).ok());
      devices.reached = true;
      releases.reap(lock);
      if (looked) looked(left);
      lease_manager.take_back({&r, 2, 3}, VMEM_READ, 0, nullptr);
    }
    return left;
  }
};

TEST_F(PagerDeviceReclaim, WhatIsBestOnAnotherDeviceGoesThereFirstAndIsNoGuest) {
  Region& r = placed(4);
  BigLock lock(map.mutex());
  map.spilled().set_share(50);
  ASSERT_TRUE(r.advice.places.prefer(2, 2, 1));
  ASSERT_TRUE(r.advice.places.prefer(0, 0, 0));
  for (BlockIndex b = 0; b < 4; ++b) map.follow_advice(r, b);
  gpus[0].budget.want(kUnit);
  EXPECT_TRUE(room.make(lock, 0));
  EXPECT_EQ(r.table[2].device, 1);
  EXPECT_FALSE(map.spilled().is(r.table[2].aux));
  EXPECT_TRUE(map.frame_table()[r.table[2].aux].admitted);
  EXPECT_EQ(on(r, 0), 3u);
  gpus[0].budget.want(3 * kUnit);
  EXPECT_TRUE(room.make(lock, 0));
  EXPECT_EQ(r.table[0].device, 0) << "it is at home";
  EXPECT_TRUE(map.spilled().is(r.table[1].aux) && map.spilled().is(r.table[3].aux)) << "these are nowhere";
  gpus[0].budget.want(0);
  clear(r);
}

TEST_F(PagerDeviceReclaim, WhatIsBestInHostMemoryIsNobodysGuest) {
  Region& r = placed(2);
  BigLock lock(map.mutex());
  map.spilled().set_share(50);
  ASSERT_TRUE(r.advice.places.prefer(1, 1, VMEM_HOST));
  map.follow_advice(r, 1);
  gpus[0].budget.want(3 * kUnit);
  EXPECT_TRUE(room.make(lock, 0));
  EXPECT_EQ(r.table[1].state, State::staged);
  EXPECT_EQ(on(r, 0), 1u);
  gpus[0].budget.want(0);
  clear(r);
}

TEST_F(PagerDeviceReclaim, AGuestWhereItIsBestIsAtHome) {
  Region& r = placed(1);
  BigLock lock(map.mutex());
  map.withdraw(r.table[0].aux);
  map.spilled().add(r.table[0].aux, 0);
  map.follow_advice(r, 0);
  EXPECT_TRUE(map.spilled().is(r.table[0].aux));
  ASSERT_TRUE(r.advice.places.prefer(0, 0, 0));
  map.follow_advice(r, 0);
  EXPECT_FALSE(map.spilled().is(r.table[0].aux));
  EXPECT_TRUE(map.frame_table()[r.table[0].aux].admitted);
  clear(r);
}

TEST_F(PagerDeviceReclaim, AsMuchLeavesAsSomebodyWaitsForAndNoMore) {
  Region& r = placed(4);
  BigLock lock(map.mutex());
  map.spilled().set_share(0);
  EXPECT_FALSE(room.make(lock, 0)) << "nobody waits";
  gpus[0].budget.want(kUnit);
  EXPECT_TRUE(room.make(lock, 0));
  EXPECT_EQ(on(r, 0), 3u);
  EXPECT_EQ(held(r), 1u);
  EXPECT_FALSE(room.make(lock, 0)) << "there is room";
  clear(r);
}

TEST_F(PagerDeviceReclaim, WhatAPeerHasRoomForGoesThereSpilled) {
  Region& r = placed(4);
  BigLock lock(map.mutex());
  map.spilled().set_share(50);
  gpus[0].budget.want(kUnit);
  EXPECT_TRUE(room.make(lock, 0));
  EXPECT_EQ(on(r, 0), 3u);
  EXPECT_EQ(on(r, 1), 1u);
  EXPECT_EQ(map.spilled().bytes(1), kUnit);
  EXPECT_EQ(gpus[0].to_peers, kUnit);
  // A spilled block leaves first when the device that holds it needs room, and goes to host memory.
  gpus[1].budget.want(4 * kUnit);
  EXPECT_TRUE(room.make(lock, 1));
  EXPECT_EQ(on(r, 1), 0u);
  EXPECT_EQ(held(r), 1u);
  EXPECT_EQ(map.spilled().bytes(1), 0u);
  clear(r);
}

TEST_F(PagerDeviceReclaim, LeasedBlocksStayAndWhatIsNotKeptByThemIsFoundBehindThem) {
  Region& r = placed(4);
  BigLock lock(map.mutex());
  map.spilled().set_share(0);
  ASSERT_TRUE(lease_manager.grant({&r, 0, 2}, VMEM_READ, 0, nullptr).ok());
  gpus[0].budget.want(4 * kUnit);
  for (int i = 0; i < 8; ++i) room.make(lock, 0);
  EXPECT_EQ(on(r, 0), 3u);
  EXPECT_EQ(r.table[3].state, State::staged);
  EXPECT_FALSE(room.make(lock, 0));
  lease_manager.take_back({&r, 0, 2}, VMEM_READ, 0, nullptr);
  clear(r);
}

TEST_F(PagerDeviceReclaim, WhatIsToStayStaysWhileLeasesOfOthersEndAndGoesWhereTheirStreamIsHeld) {
  Region& r = placed(4);
  const vmem_range others{r.address(1), 3 * kUnit, VMEM_READ, 0};
  for (const bool hot : {false, true}) {
    {
      BigLock lock(map.mutex());
      map.spilled().set_share(0);
      r.advice.advised.clear();
      r.advice.advised.push_back({0, 0, hot ? policy::Temperature::hot : policy::Temperature::normal, !hot});
      map.follow_advice(r, 0);
      gpus[0].budget.want(kUnit);
    }
    // A machine that stands still for that long makes it late: retry.
    for (int i = 0; i < 100; ++i) {
      devices.reached = false;
      {
        BigLock lock(map.mutex());
        ASSERT_TRUE(lease_manager.grant({&r, 1, 3}, VMEM_READ, 0, nullptr).ok());
      }
      const uint64_t begun = now_ns();
      ASSERT_TRUE(releases.release({&others, 1}, nullptr, nullptr, false).ok());
      BigLock lock(map.mutex());
      const bool left = room.make(lock, 0);
      if (now_ns() < begun + StreamReleases::kSoon) {
        ASSERT_FALSE(left);
        break;
      }
      ASSERT_LT(i, 99);
      if (left) GTEST_SKIP() << "this machine stands still";
      devices.reached = true;
      gpus[0].budget.want(0);
      EXPECT_FALSE(room.make(lock, 0));
      gpus[0].budget.want(kUnit);
    }
    BigLock lock(map.mutex());
    EXPECT_EQ(r.table[0].state, State::on_device);
    EXPECT_TRUE(map.frame_table()[r.table[0].aux].admitted);
    devices.reached = true;
    EXPECT_TRUE(room.make(lock, 0)) << "now others can go";
    EXPECT_EQ(r.table[0].state, State::on_device);
    EXPECT_EQ(on(r, 0), 3u);
    gpus[0].budget.want(0);
    EXPECT_FALSE(room.make(lock, 0));
    for (BlockIndex b = 1; b < 4; ++b) {
      if (r.table[b].state == State::on_device) continue;
      DeferredWork after;
      ASSERT_TRUE(map.reserve_transition());
      map.withdraw(r.table[b].aux);
      write_back.drop_held(r, b, after);
      place(r, b, 0);
      edit(r.table, b).flags |= core::kDirty;
    }
  }
  devices.reached = false;
  BigLock lock(map.mutex());
  ASSERT_TRUE(lease_manager.grant({&r, 1, 3}, VMEM_READ, 0, nullptr).ok());
  lock.unlock();
  ASSERT_TRUE(releases.release({&others, 1}, nullptr, nullptr, false).ok());
  std::this_thread::sleep_for(std::chrono::nanoseconds(StreamReleases::kSoon));
  lock.lock();
  gpus[0].budget.want(kUnit);
  EXPECT_TRUE(room.make(lock, 0)) << "nothing else can go for as long as the stream is held";
  EXPECT_EQ(r.table[0].state, State::staged);
  devices.reached = true;
  releases.reap(lock);
  gpus[0].budget.want(0);
  clear(r);
}

TEST_F(PagerDeviceReclaim, WhatIsToStayGoesWhereOthersAreLeasedAgainEachTime) {
  Region& r = placed(4);
  BigLock lock(map.mutex());
  map.spilled().set_share(0);
  r.advice.advised.push_back({0, 1, policy::Temperature::normal, true});
  for (const BlockIndex b : {0, 1}) map.follow_advice(r, b);
  gpus[0].budget.want(kUnit);
  EXPECT_TRUE(make_beside_leases(
      r, lock,
      [&] {
        EXPECT_EQ(on(r, 0), 3u);
        gpus[0].budget.want(2 * kUnit);
        EXPECT_TRUE(room.make(lock, 0)) << "for the next one nobody waits again";
      },
      [&](bool left) { EXPECT_EQ(on(r, 0), left ? 2u : 4u); }));
  for (const BlockIndex b : {0, 1}) EXPECT_EQ(r.table[b].state, State::staged);
  gpus[0].budget.want(0);
  clear(r);
}

// A pinned block leaves, too, if the blocks that could leave before it find no frame.
TEST_F(PagerDeviceReclaim, WhatIsToStayGoesWhereOthersTryToLeaveInVain) {
  Region& r = placed(4);
  BigLock lock(map.mutex());
  map.spilled().set_share(0);
  r.advice.advised.push_back({0, 0, policy::Temperature::normal, true});
  map.follow_advice(r, 0);
  edit(r.table, 0).flags = core::kDigest;  // zeros: needs no frame
  std::vector<std::byte*> taken;
  while (std::byte* const frame = staging.of(r.block_size).frames.get(0)) taken.push_back(frame);
  gpus[0].budget.want(2 * kUnit);
  EXPECT_TRUE(make_beside_leases(r, lock));
  EXPECT_EQ(r.table[0].state, State::unpopulated);
  EXPECT_EQ(on(r, 0), 3u);
  for (std::byte* const frame : taken) staging.of(r.block_size).frames.put(frame);
  gpus[0].budget.want(0);
  clear(r);
}

TEST_F(PagerDeviceReclaim, ABlockThatAnAcquireElsewhereWaitsForMakesRoomWhereNothingElseCan) {
  Region& r = placed(4);
  BigLock lock(map.mutex());
  ASSERT_TRUE(lease_manager.grant({&r, 0, 2}, VMEM_READ, 0, nullptr).ok());
  ASSERT_TRUE(lease_manager.grant({&r, 3, 3}, VMEM_READ, 1, nullptr).ok());
  gpus[0].budget.want(kUnit);
  EXPECT_FALSE(room.make(lock, 0));
  ASSERT_TRUE(promotion_requests.push_back({&r, 3, 3, 1, core::Urgency::acquire, &r}));
  EXPECT_TRUE(room.make(lock, 0));
  EXPECT_EQ(r.table[3].state, State::staged);
  lease_manager.take_back({&r, 0, 2}, VMEM_READ, 0, nullptr);
  lease_manager.take_back({&r, 3, 3}, VMEM_READ, 1, nullptr);
  clear(r);
}

}  // namespace
}  // namespace vmem::pager::test
