// The device tier's workers, on devices that finish at once: queued work gets done, without further
// calls.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>

#include "common/patience.h"
#include "pager/threads/device_workers.h"
#include "pager_device_parts.h"

namespace vmem::pager::test {
namespace {

using vmem::test::eventually;

class PagerDeviceWorkers : public PromotionParts {
 protected:
  explicit PagerDeviceWorkers(size_t count = 2) : PromotionParts(std::make_unique<FakeDevices>(count)) {}
  void SetUp() override {
    PromotionParts::SetUp();
    devices.streams = true;
    ASSERT_TRUE(workers.start().ok());
  }
  void TearDown() override {
    workers.stop();
    PromotionParts::TearDown();
  }
  void memory_freed(DeferredWork& after) VMEM_LOCKED override { promoter.pump(after); }
  size_t on_device(Region& r) {
    size_t n = 0;
    for (BlockIndex b = 0; b < r.blocks; ++b) n += state(r, b) == State::on_device;
    return n;
  }

  DeviceWorkers workers{ctx, calls};
};

TEST_F(PagerDeviceWorkers, WhatIsReadyArrives) {
  Region& r = device_region(2);
  request(r, 0, 1);
  EXPECT_TRUE(eventually([&] { return on_device(r) == 2; }));
  for (const BlockIndex b : {0, 1}) take_away(r, b);
}

TEST_F(PagerDeviceWorkers, WhoFindsADeviceFullGetsTheRoomOfOthers) {
  Region& r = device_region(6);
  request(r, 0, 5, Urgency::acquire);
  EXPECT_TRUE(eventually([&] { return state(r, 4) == State::on_device && state(r, 5) == State::on_device; }));
  EXPECT_EQ(on_device(r), 4u);
  for (BlockIndex b = 0; b < r.blocks; ++b)
    if (state(r, b) == State::on_device) take_away(r, b);
}

TEST_F(PagerDeviceWorkers, WhoFindsNoFrameHasSomeMade) {
  Region& r = device_region(1);
  {
    BigLock lock(map.mutex());
    budget.set(uint64_t{48} << 20);
    reserve.follow_budget();
  }
  put_away(r, 0, 5);
  request(r, 0, 0, Urgency::acquire);
  EXPECT_TRUE(eventually([&] { return state(r, 0) == State::on_device; }));
  EXPECT_EQ(devices.came, std::vector<uint64_t>{5});
  take_away(r, 0);
}

TEST_F(PagerDeviceWorkers, AnAccessOfABlockThatNobodyLeasesBringsItToHostMemory) {
  Region& r = supplied(1);
  {
    BigLock lock(map.mutex());
    place(r, 0, 0);
    ASSERT_TRUE(cpu_mappings.met(r, 0, {reinterpret_cast<uintptr_t>(r.base), trap::FaultKind::read, 0}, now_ns()));
    gpus.work().notify_one();
  }
  EXPECT_TRUE(eventually([&] { return state(r, 0) == State::resident; }));
}

// Each of four blocks has memory on the device that can be freed when its copy has ended.
TEST_F(PagerDeviceWorkers, OneIsLeftForWhatLeavesWhereCopiesOfReadsThatFailedStandStill) {
  using Op = store::Io::Op;
  constexpr size_t kCount = 4, kSize = 2 * kUnit;
  std::atomic<size_t> waiting{0};
  std::atomic<bool> still{true};
  devices.while_waiting = [&] {
    ++waiting;
    eventually([&] { return !still; }, std::chrono::seconds(60));
  };
  Region& r = supplied(kCount, kSize);
  {
    BigLock lock(map.mutex());
    gpus[0].budget.set(kCount * kSize);
  }
  for (BlockIndex b = 0; b < kCount; ++b) put_away(r, b, 7);
  engine.hold(Op::read, true);
  request(r, 0, kCount - 1, Urgency::acquire, false);
  engine.until_held(kCount);
  engine.come(kUnit);
  ASSERT_TRUE(eventually([&] { return devices.prepared == kCount; }));
  engine.fail(Op::read, EIO);
  engine.hold(Op::read, false);
  engine.let_go();
  engine.until_idle();
  EXPECT_TRUE(eventually([&] { return waiting >= 3; }));
  // One worker is free: it polls the stream of a hint.
  ASSERT_TRUE(calls.prefetch.prefetch(r.base, kSize, 0, this).ok());
  const size_t before = devices.polled;
  {
    BigLock lock(map.mutex());
    gpus.work().notify_all();
  }
  EXPECT_TRUE(eventually([&] { return devices.polled > before; }));
  EXPECT_EQ(waiting, 3u);
  still = false;
  for (BlockIndex b = 0; b < kCount; ++b) EXPECT_TRUE(eventually([&] { return state(r, b) == State::stored; })) << b;
  EXPECT_EQ(devices.punched, kCount);
  EXPECT_EQ(charged(), 0u);
}

class PagerWorkersOfFour : public PagerDeviceWorkers {
 protected:
  static constexpr size_t kLarge = size_t{64} << 20;
  static constexpr BlockIndex kTurn = kPeerTurnBytes / kLarge;

  PagerWorkersOfFour() : PagerDeviceWorkers(4) {}
  void SetUp() override {
    PagerDeviceWorkers::SetUp();
    BigLock lock(map.mutex());
    for (DeviceState& g : gpus) g.budget.begin(uint64_t{64} << 30, kUnit);
    map.resize_policies();
  }
  // Makes a block of another device wait to go to device d.
  void let_wait(Region& r, BlockIndex b, int d) VMEM_LOCKED {
    place(r, b, (d + 1) % 4);
    ASSERT_TRUE(map.reserve_transition());
    gpus[static_cast<size_t>(d)].incoming.push_back(migrator.begin(r, b, d));
    gpus.work().notify_one();
  }
};

// As many workers as may migrate are occupied with devices that always have more to bring.
TEST_F(PagerWorkersOfFour, EachDeviceHasItsTurnWhateverComesToTheOthers) {
  constexpr BlockIndex kOfEach = 2 * kTurn + 2;
  Region& r = device_region(3 * kOfEach + 1, kLarge);
  std::array<std::atomic<BlockIndex>, 3> come{};  // begun, by device
  std::atomic<bool> fourth{false}, in_time{true};
  devices.while_migrating = [&](int d) {
    if (d == 3) {
      fourth = true;
      return;
    }
    const BlockIndex n = ++come[static_cast<size_t>(d)];
    if (n > 2 * kTurn && !eventually([&] { return fourth.load(); })) in_time = false;
    BigLock lock(map.mutex());
    if (n < kOfEach) let_wait(r, static_cast<BlockIndex>(d) * kOfEach + n, d);
  };
  {
    BigLock lock(map.mutex());
    for (int d = 0; d < 3; ++d) let_wait(r, static_cast<BlockIndex>(d) * kOfEach, d);
    let_wait(r, 3 * kOfEach, 3);
  }
  ASSERT_TRUE(eventually([&] { return on_device(r) == r.blocks; }, std::chrono::seconds(60)));
  EXPECT_TRUE(in_time) << "a device waits until there is nothing for others";
  BigLock lock(map.mutex());
  for (BlockIndex b = 0; b < r.blocks; ++b) {
    EXPECT_EQ(r.table[b].device, b / kOfEach);
    remove(r, b);
  }
}

}  // namespace
}  // namespace vmem::pager::test
