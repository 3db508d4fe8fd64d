// Demotion from devices that obey, refuse, or are lost: the state of blocks afterwards, and what
// was copied and written for it.
#include <gtest/gtest.h>

#include <cerrno>

#include "edit_block.h"
#include "pager_device_parts.h"

namespace vmem::pager::test {
namespace {

class PagerDemoter : public DeviceParts {
 protected:
  void SetUp() override {
    devices.transitions = true;
    ASSERT_TRUE(gpus.use(0).ok());
  }
  // Block 0 is on device 0; `dirty`: it differs from all other copies. There are frames for it.
  Region& placed(bool dirty) {
    Region& r = device_region(4);
    supply_frames(r);
    BigLock lock(map.mutex());
    place(r, 0, 0);
    if (dirty) edit(r.table, 0).flags |= core::kDirty;
    return r;
  }
  Status leave(Region& r, Leave how) {
    Completion completion{1, {}};
    {
      BigLock lock(map.mutex());
      if (how != Leave::sync) map.withdraw(r.table[0].aux);
      Transition* m = demoter.begin(r, 0, how);
      if (m == nullptr) return core::error(ENOMEM, "no frame");
      EXPECT_EQ(r.table[0].state, State::demoting);
      m->completion = &completion;
      demoter.run(lock, {&m, 1});
    }
    engine.until_idle();
    BigLock lock(map.mutex());
    EXPECT_EQ(completion.outstanding, 0u);
    return completion.status;
  }
  uint64_t charged() {
    BigLock lock(map.mutex());
    return gpus[0].budget.charged();
  }
  size_t used_frames(const Region& r) {
    BigLock lock(map.mutex());
    return staging.of(r.block_size).frames.total() - staging.of(r.block_size).frames.free();
  }
  // The block is in a staging frame with the device's bytes; drops it.
  void drop_held(Region& r) {
    BigLock lock(map.mutex());
    ASSERT_EQ(r.table[0].state, State::staged);
    edit(r.table, 0).flags = 0;
    ASSERT_TRUE(map.reserve_transition());
    map.withdraw(r.table[0].aux);
    DeferredWork after;
    isolated.drop_held(r, 0, after);
  }
};

TEST_F(PagerDemoter, ACleanBlockIsForgottenThereAndNothingIsCopied) {
  Region& r = placed(false);
  ASSERT_TRUE(leave(r, Leave::evict).ok());
  EXPECT_EQ(state(r, 0), State::unpopulated);
  EXPECT_EQ(devices.copied, 0u);
  EXPECT_EQ(charged(), 0u);
}

TEST_F(PagerDemoter, ADirtyBlockComesToAStagingFrame) {
  Region& r = placed(true);
  ASSERT_TRUE(leave(r, Leave::evict).ok());
  EXPECT_EQ(state(r, 0), State::staged);
  EXPECT_EQ(devices.copied, 1u);
  EXPECT_EQ(charged(), 0u);
  EXPECT_EQ(used_frames(r), 1u);
  {
    BigLock lock(map.mutex());
    EXPECT_EQ(std::to_integer<uint8_t>(map.frame_table()[r.table[0].aux].bytes[kUnit - 1]), FakeDevices::kByte);
  }
  drop_held(r);
  EXPECT_EQ(used_frames(r), 0u);
}

TEST_F(PagerDemoter, ABlockWithAHostCopyLeavesWithoutBeingCopied) {
  Region& r = placed(false);
  {
    BigLock lock(map.mutex());
    ASSERT_TRUE(supply.keep_copy(r, 0, supply.frame(r, 0)));
  }
  ASSERT_TRUE(leave(r, Leave::host).ok());
  EXPECT_EQ(devices.copied, 0u);
  drop_held(r);
}

TEST_F(PagerDemoter, ADirtyBlockThatIsNotWantedIsNotCopied) {
  Region& r = placed(true);
  ASSERT_TRUE(leave(r, Leave::drop).ok());
  EXPECT_EQ(state(r, 0), State::unpopulated);
  EXPECT_EQ(devices.copied, 0u);
  EXPECT_EQ(flags(r, 0, core::kDirty), 0);
}

TEST_F(PagerDemoter, WhatIsSyncedIsWrittenAndStaysClean) {
  Region& r = placed(true);
  ASSERT_TRUE(leave(r, Leave::sync).ok());
  EXPECT_EQ(state(r, 0), State::on_device);
  EXPECT_EQ(flags(r, 0, core::kDirty), 0);
  EXPECT_EQ(engine.count(store::Io::Op::write), 1u);
  EXPECT_EQ(used_frames(r), 0u);
  ASSERT_TRUE(leave(r, Leave::evict).ok());
  EXPECT_EQ(state(r, 0), State::stored) << "clean it is only forgotten";
  EXPECT_EQ(devices.copied, 1u);
}

TEST_F(PagerDemoter, AWriteThatFailsLeavesTheBlockDirtyOnItsDevice) {
  Region& r = placed(true);
  engine.fail(store::Io::Op::write, EIO);
  EXPECT_EQ(leave(r, Leave::sync).code(), -EIO);
  EXPECT_EQ(state(r, 0), State::on_device);
  EXPECT_NE(flags(r, 0, core::kDirty), 0);
  EXPECT_EQ(used_frames(r), 0u);
  BigLock lock(map.mutex());
  writes.take_error().ignore();
  failed.clear_unknown(r, 0);
  edit(r.table, 0).flags = 0;
  remove(r, 0);
}

TEST_F(PagerDemoter, WhatADeviceDoesNotLetGoOfStaysThereWhole) {
  Region& r = placed(true);
  devices.unmap_error = EIO;
  EXPECT_EQ(leave(r, Leave::evict).code(), -EIO);
  EXPECT_EQ(state(r, 0), State::on_device);
  EXPECT_EQ(charged(), kUnit);
  EXPECT_EQ(used_frames(r), 0u);
  devices.unmap_error = 0;
  ASSERT_TRUE(leave(r, Leave::evict).ok());
  drop_held(r);
}

TEST_F(PagerDemoter, TheOnlyCopyOnALostDeviceGetsItsMark) {
  Region& r = placed(true);
  devices.lost = 0;
  EXPECT_EQ(leave(r, Leave::evict).code(), -EIO);
  EXPECT_EQ(state(r, 0), State::poisoned);
  EXPECT_NE(flags(r, 0, core::kLost), 0);
  EXPECT_EQ(charged(), 0u);
  EXPECT_EQ(used_frames(r), 0u);
}

TEST_F(PagerDemoter, WithoutAFrameForItsBytesABlockIsNotBegunWith) {
  Region& r = device_region(1);
  BigLock lock(map.mutex());
  place(r, 0, 0);
  edit(r.table, 0).flags |= core::kDirty;
  EXPECT_EQ(demoter.begin(r, 0, Leave::evict), nullptr);
  EXPECT_EQ(r.table[0].state, State::on_device);
  edit(r.table, 0).flags = 0;
  remove(r, 0);
}

class PagerRangeDemoter : public PagerDemoter {};

TEST_F(PagerRangeDemoter, ARangeLeavesButItsLeasedBlocksStayAndAreSaid) {
  Region& r = placed(false);
  BigLock lock(map.mutex());
  for (const core::BlockIndex b : {1, 2}) place(r, b, 0);
  ASSERT_TRUE(grants.grant({&r, 1, 1}, VMEM_READ, 0, nullptr).ok());
  RangeScan scan;
  ASSERT_TRUE(range_demoter.run(lock, r, 0, 3, Leave::evict, &scan).ok());
  EXPECT_TRUE(scan.skipped);
  EXPECT_EQ(r.table[0].state, State::unpopulated);
  EXPECT_EQ(r.table[1].state, State::on_device);
  EXPECT_EQ(r.table[2].state, State::unpopulated);
  scan = {};
  scan.all = true;
  ASSERT_TRUE(range_demoter.run(lock, r, 0, 3, Leave::evict, &scan).ok());
  EXPECT_FALSE(scan.skipped);
  EXPECT_EQ(r.table[1].state, State::unpopulated);
  grants.take_back({&r, 1, 1}, VMEM_READ, 0, nullptr);
}

TEST_F(PagerRangeDemoter, ARangeThatFindsNoFrameForTheTimeOutIsGivenUpAndStays) {
  config.fault_timeout_ms = 30;
  Region& r = device_region(1);
  BigLock lock(map.mutex());
  place(r, 0, 0);
  edit(r.table, 0).flags |= core::kDirty;
  RangeScan scan;
  EXPECT_EQ(range_demoter.run(lock, r, 0, 0, Leave::host, &scan).code(), -ENOMEM);
  EXPECT_EQ(r.table[0].state, State::on_device);
  edit(r.table, 0).flags = 0;
  remove(r, 0);
}

}  // namespace
}  // namespace vmem::pager::test
