// The CPU's view of blocks on a device: which accesses are shown a copy, which wait, and what
// becomes of copies.
// becomes of copies.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>

#include "edit_block.h"
#include "pager_device_parts.h"

namespace vmem::pager::test {
namespace {

using trap::FaultKind;

class PagerCpuMapper : public DeviceParts {
 protected:
  void SetUp() override {
    devices.transitions = devices.streams = true;
    ASSERT_TRUE(gpus.use(0).ok());
  }
  // Block 0 is on device 0; with `access`, under a lease.
  Region& placed(unsigned access) {
    Region& r = device_region(1);
    supply_frames(r);
    BigLock lock(map.mutex());
    place(r, 0, 0);
    if (access != 0) {
      EXPECT_TRUE(lease_manager.grant({&r, 0, 0}, access, 0, nullptr).ok());
    }
    return r;
  }
  // Block 0 is on device 0, advised read mostly, and not leased.
  Region& read_mostly() {
    Region& r = placed(0);
    BigLock lock(map.mutex());
    EXPECT_TRUE(r.advice.places.set_read_mostly(0, 0, true));
    return r;
  }
  void end_lease(Region& r, unsigned access) {
    BigLock lock(map.mutex());
    lease_manager.take_back({&r, 0, 0}, access, 0, nullptr);
    map.match_holds(lock, {&r, 0, 0});
  }
  bool meet_and_serve(Region& r, FaultKind kind) {
    BigLock lock(map.mutex());
    EXPECT_TRUE(cpu_mappings.met(r, 0, {reinterpret_cast<uintptr_t>(r.base), kind, 0}, now_ns()));
    return cpu_mapper.serve(lock);
  }
  bool serve() {
    BigLock lock(map.mutex());
    return cpu_mapper.serve(lock);
  }
  bool is_shown(const Region& r) {
    BigLock lock(map.mutex());
    return map.frame_table()[r.table[0].aux].dev.cpu_mapped;
  }
  void take_away(Region& r) {
    BigLock lock(map.mutex());
    if (map.frame_table()[r.table[0].aux].dev.cpu_mapped) {
      EXPECT_TRUE(cpu_mapper.hide(lock, r, 0));
    }
    remove(r, 0);
  }
  uint64_t charged() {
    BigLock lock(map.mutex());
    return budget.charged(Use::blocks);
  }
  void expect_in_host_memory(Region& r) {
    EXPECT_EQ(state(r, 0), State::resident);
    EXPECT_EQ(byte(r), FakeDevices::kByte);
    BigLock lock(map.mutex());
    EXPECT_EQ(gpus[0].budget.charged(), 0u);
    EXPECT_FALSE(cpu_mappings.any());
  }
  uint8_t byte(Region& r) {
    uint64_t value = 0;
    EXPECT_TRUE(trap.load(r.base, &value));
    return static_cast<uint8_t>(value);
  }
};

TEST_F(PagerCpuMapper, ALoadUnderAReadLeaseIsShownACopyAndTheDeviceKeepsTheBlock) {
  Region& r = placed(VMEM_READ);
  EXPECT_TRUE(meet_and_serve(r, FaultKind::read));
  EXPECT_EQ(state(r, 0), State::on_device);
  EXPECT_TRUE(is_shown(r));
  EXPECT_EQ(byte(r), FakeDevices::kByte);
  EXPECT_EQ(charged(), kUnit) << "as a block in host memory";
  EXPECT_FALSE(serve()) << "nobody waits any more";
  end_lease(r, VMEM_READ);
  take_away(r);
  EXPECT_EQ(charged(), 0u);
}

TEST_F(PagerCpuMapper, OfWhatIsReadMostTheCopyThatALoadHasMadeStaysAsLongAsItIsTheBlock) {
  for (const bool mostly : {false, true}) {
    for (const bool changed : {false, true}) {
      Region& r = placed(VMEM_READ);
      {
        BigLock lock(map.mutex());
        ASSERT_TRUE(r.advice.places.set_read_mostly(0, 0, mostly));
        map.frame_table()[r.table[0].aux].dev.changed = changed;
      }
      EXPECT_TRUE(meet_and_serve(r, FaultKind::read));
      {
        BigLock lock(map.mutex());
        EXPECT_EQ(map.copies().has(r.table[0].aux), mostly && !changed);
        map.frame_table()[r.table[0].aux].dev.changed = false;
      }
      EXPECT_EQ(byte(r), FakeDevices::kByte);
      end_lease(r, VMEM_READ);
      take_away(r);
    }
  }
}

TEST_F(PagerCpuMapper, ABlockThatNobodyLeasesComesToHostMemory) {
  Region& r = placed(0);
  EXPECT_TRUE(meet_and_serve(r, FaultKind::read));
  EXPECT_EQ(state(r, 0), State::resident);
  EXPECT_EQ(byte(r), FakeDevices::kByte);
  BigLock lock(map.mutex());
  EXPECT_EQ(gpus[0].budget.charged(), 0u);
}

TEST_F(PagerCpuMapper, OfWhatIsReadMostAndNotLeasedALoadIsShownACopyAndAStoreMakesItTheBlock) {
  Region& r = read_mostly();
  EXPECT_TRUE(meet_and_serve(r, FaultKind::read));
  EXPECT_EQ(state(r, 0), State::on_device);
  EXPECT_TRUE(is_shown(r));
  EXPECT_EQ(byte(r), FakeDevices::kByte);
  EXPECT_EQ(charged(), kUnit);
  const size_t copied = devices.copied;
  EXPECT_TRUE(meet_and_serve(r, FaultKind::write_protect));
  expect_in_host_memory(r);
  EXPECT_EQ(devices.copied, copied) << "what was shown is the block";
  EXPECT_TRUE(trap.store(r.base, 7)) << "it is not protected any more";
  EXPECT_EQ(charged(), kUnit);
}

TEST_F(PagerCpuMapper, AStoreToWhatIsReadMostAndNotLeasedMovesIt) {
  Region& r = read_mostly();
  EXPECT_TRUE(meet_and_serve(r, FaultKind::write));
  expect_in_host_memory(r);
}

TEST_F(PagerCpuMapper, WhatIsBestInHostMemoryOrWasDroppedForWantOfItIsMoved) {
  for (const bool displaced : {false, true}) {
    Region& r = read_mostly();
    {
      BigLock lock(map.mutex());
      map.frame_table()[r.table[0].aux].dev.displaced = displaced;
      if (!displaced) {
        ASSERT_TRUE(r.advice.places.prefer(0, 0, VMEM_HOST));
      }
    }
    EXPECT_TRUE(meet_and_serve(r, FaultKind::read));
    expect_in_host_memory(r);
  }
}

TEST_F(PagerCpuMapper, WhatCannotBeShownIsMoved) {
  Region& r = read_mostly();
  trap.fail_fill(ENOMEM, 1);
  EXPECT_TRUE(meet_and_serve(r, FaultKind::read));
  EXPECT_EQ(state(r, 0), State::on_device);
  EXPECT_FALSE(is_shown(r));
  EXPECT_EQ(charged(), 0u);
  for (int i = 0; i < 3000 && state(r, 0) != State::resident; ++i) {
    if (!serve()) usleep(10000);
  }
  expect_in_host_memory(r);
}

TEST_F(PagerCpuMapper, WithoutMemoryThatNobodyKeepsFreeItIsMoved) {
  Region& r = read_mostly();
  uint64_t rest = 0;
  {
    BigLock lock(map.mutex());
    rest = budget.available() - reserve.low_watermark();
    ASSERT_TRUE(budget.charge(rest, 0));
  }
  EXPECT_TRUE(meet_and_serve(r, FaultKind::read));
  expect_in_host_memory(r);
  BigLock lock(map.mutex());
  budget.credit(rest);
}

TEST_F(PagerCpuMapper, OneCopyGivesWayToTheNextWhereMemoryIsShort) {
  Region& r = device_region(2);
  supply_frames(r);
  uint64_t rest = 0;
  {
    BigLock lock(map.mutex());
    for (const BlockIndex b : {0, 1}) place(r, b, 0);
    ASSERT_TRUE(r.advice.places.set_read_mostly(0, 1, true));
    rest = budget.available() - reserve.low_watermark() - kUnit;
    ASSERT_TRUE(budget.charge(rest, 0));
    ASSERT_TRUE(cpu_mappings.met(r, 0, {reinterpret_cast<uintptr_t>(r.base), FaultKind::read, 0}, 1));
    EXPECT_TRUE(cpu_mapper.serve(lock));
    EXPECT_TRUE(map.frame_table()[r.table[0].aux].dev.cpu_mapped);
  }
  usleep(2 * CpuMappings::kShownAtLeast / 1000);
  {
    BigLock lock(map.mutex());
    ASSERT_TRUE(cpu_mappings.met(r, 1, {reinterpret_cast<uintptr_t>(r.address(1)), FaultKind::read, 0}, 1));
    EXPECT_TRUE(cpu_mapper.serve(lock));
    EXPECT_FALSE(map.frame_table()[r.table[0].aux].dev.cpu_mapped) << "the oldest";
    EXPECT_FALSE(map.frame_table()[r.table[0].aux].dev.displaced);
    EXPECT_TRUE(cpu_mapper.serve(lock));
    EXPECT_TRUE(map.frame_table()[r.table[1].aux].dev.cpu_mapped);
    EXPECT_TRUE(cpu_mapper.hide(lock, r, 1));
    budget.credit(rest);
    for (const BlockIndex b : {0, 1}) remove(r, b);
  }
}

TEST_F(PagerCpuMapper, WhatWentForWantOfMemoryIsRemembered) {
  Region& r = read_mostly();
  EXPECT_TRUE(meet_and_serve(r, FaultKind::read));
  usleep(2 * CpuMappings::kShownAtLeast / 1000);
  uint64_t rest = 0;
  {
    BigLock lock(map.mutex());
    rest = budget.available();
    ASSERT_TRUE(budget.charge(rest, 0));
    EXPECT_TRUE(cpu_mapper.serve(lock));
    EXPECT_FALSE(map.frame_table()[r.table[0].aux].dev.cpu_mapped);
    EXPECT_TRUE(map.frame_table()[r.table[0].aux].dev.displaced);
    budget.credit(rest);
  }
  take_away(r);
}

TEST_F(PagerCpuMapper, AnAccessWaitsForTheEndOfAWriteLease) {
  Region& r = placed(VMEM_WRITE);
  EXPECT_FALSE(meet_and_serve(r, FaultKind::read));
  EXPECT_EQ(state(r, 0), State::on_device);
  EXPECT_FALSE(is_shown(r));
  end_lease(r, VMEM_WRITE);
  EXPECT_TRUE(serve());
  EXPECT_EQ(state(r, 0), State::resident);
}

TEST_F(PagerCpuMapper, AStoreUnderAReadLeaseChangesTheCopyWhichIsTheBlockWhenTheLeaseEnds) {
  Region& r = placed(VMEM_READ);
  EXPECT_TRUE(meet_and_serve(r, FaultKind::write));
  EXPECT_TRUE(is_shown(r));
  meet_and_serve(r, FaultKind::write_protect);  // the thread repeats the store and meets the write protection
  {
    BigLock lock(map.mutex());
    EXPECT_TRUE(map.frame_table()[r.table[0].aux].dev.stale);
    EXPECT_EQ(cpu_mappings.device_stale_bytes(), kUnit);
  }
  ASSERT_TRUE(trap.store(r.base, 7));
  EXPECT_EQ(state(r, 0), State::on_device) << "the device keeps what it was";
  end_lease(r, VMEM_READ);
  for (int i = 0; i < 100 && state(r, 0) != State::resident; ++i) serve();
  EXPECT_EQ(state(r, 0), State::resident);
  EXPECT_EQ(byte(r), 7u);
}

TEST_F(PagerCpuMapper, WithoutMemoryForACopyTheAccessWaits) {
  Region& r = placed(VMEM_READ);
  uint64_t rest = 0;
  {
    BigLock lock(map.mutex());
    rest = budget.available();
    ASSERT_TRUE(budget.charge(rest, 0));
  }
  EXPECT_FALSE(meet_and_serve(r, FaultKind::read));
  EXPECT_EQ(state(r, 0), State::on_device);
  {
    BigLock lock(map.mutex());
    EXPECT_TRUE(cpu_mappings.waits());
    budget.credit(rest);
    cpu_mappings.forget(r);
    edit(r.table, 0).flags = 0;
  }
  end_lease(r, VMEM_READ);
  take_away(r);
}

TEST_F(PagerCpuMapper, WhatIsShownAndPinnedStaysAndNobodyWaitsForThePin) {
  Region& r = placed(VMEM_READ);
  EXPECT_TRUE(meet_and_serve(r, FaultKind::read));
  trap.pin_drop(1);
  {
    BigLock lock(map.mutex());
    EXPECT_FALSE(cpu_mapper.hide(lock, r, 0));
  }
  EXPECT_TRUE(is_shown(r));
  EXPECT_EQ(charged(), r.block_size);
  EXPECT_EQ(byte(r), FakeDevices::kByte);
  end_lease(r, VMEM_READ);
  take_away(r);
}

TEST_F(PagerCpuMapper, WhatIsShownOfALostDevicesBlockIsTheBlock) {
  Region& r = placed(VMEM_READ);
  EXPECT_TRUE(meet_and_serve(r, FaultKind::read));
  devices.lost = 0;
  {
    BigLock lock(map.mutex());
    EXPECT_FALSE(cpu_mapper.hide(lock, r, 0)) << "it may be all there is";
    EXPECT_TRUE(gpus[0].rescue);
    EXPECT_TRUE(cpu_mapper.rescue(lock));
    EXPECT_FALSE(cpu_mapper.rescue(lock)) << "there is nothing left";
  }
  EXPECT_EQ(state(r, 0), State::resident);
  EXPECT_EQ(byte(r), FakeDevices::kByte);
  end_lease(r, VMEM_READ);
}

}  // namespace
}  // namespace vmem::pager::test
