// Demotion from devices that obey, refuse, or are lost: the state of blocks afterwards, what was
// copied and written for it, and who owns the frame.
#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "edit_block.h"
#include "pager_device_parts.h"

namespace {

using vmem::core::BigLock;
using vmem::core::State;
using vmem::core::Status;
using vmem::pager::Completion;
using vmem::pager::DeferredWork;
using vmem::pager::Leave;
using vmem::pager::Region;
using vmem::pager::Transition;
using vmem::pager::test::FakeDevices;
using vmem::store::Io;
namespace core = vmem::core;

class PagerDemoter : public vmem::pager::test::DeviceParts {
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
    write_back.drop_held(r, 0, after);
  }
  // Writes block 0 from a frame full of `byte`; `copied` says why its copy failed.
  Status write(Region& r, int byte, const Status& copied = {}) {
    Completion completion{1, {}};
    Transition* m = nullptr;
    {
      BigLock lock(map.mutex());
      m = demoter.begin(r, 0, Leave::sync);
      if (m == nullptr) return core::error(ENOMEM, "no frame");
      m->completion = &completion;
    }
    if (!m->move.kept) memset(m->image, byte, r.block_size);
    if (!copied.ok()) m->status = Status(-copied.code(), copied.text());
    DeferredWork after;
    demoter.write({&m, 1}, after);
    page_in.run(after);
    engine.until_idle();
    EXPECT_EQ(state(r, 0), State::on_device);
    BigLock lock(map.mutex());
    EXPECT_EQ(completion.outstanding, 0u);
    return completion.status;
  }
  void end(Region& r) {
    BigLock lock(map.mutex());
    edit(r.table, 0).flags = 0;
    if (r.table[0].extent) space.release(r.table[0].extent);
    edit(r.table, 0).extent = {};
    remove(r, 0);
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
    ASSERT_TRUE(staging_allocator.keep_copy(r, 0, staging_allocator.frame(r, 0)));
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
  EXPECT_EQ(engine.count(Io::Op::write), 1u);
  EXPECT_EQ(used_frames(r), 0u);
  ASSERT_TRUE(leave(r, Leave::evict).ok());
  EXPECT_EQ(state(r, 0), State::stored) << "clean it is only forgotten";
  EXPECT_EQ(devices.copied, 1u);
}

TEST_F(PagerDemoter, AWriteThatFailsLeavesTheBlockDirtyOnItsDevice) {
  Region& r = placed(true);
  engine.fail(Io::Op::write, EIO);
  EXPECT_EQ(leave(r, Leave::sync).code(), -EIO);
  EXPECT_EQ(state(r, 0), State::on_device);
  EXPECT_NE(flags(r, 0, core::kDirty), 0);
  EXPECT_EQ(used_frames(r), 0u);
  BigLock lock(map.mutex());
  writeback_throttle.take_error().ignore();
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

TEST_F(PagerDemoter, WhatTheStoreHasIsNotWrittenAgain) {
  Region& r = placed(true);
  ASSERT_TRUE(write(r, 7).ok());
  EXPECT_EQ(engine.count(Io::Op::write), 1u);
  EXPECT_EQ(flags(r, 0, core::kDirty), 0);
  {
    BigLock lock(map.mutex());
    edit(r.table, 0).flags |= core::kDirty;
  }
  ASSERT_TRUE(write(r, 7).ok());
  EXPECT_EQ(engine.count(Io::Op::write), 1u) << "the digest is the same";
  EXPECT_EQ(flags(r, 0, core::kDirty), 0);
  ASSERT_TRUE(write(r, 8).ok());
  EXPECT_EQ(engine.count(Io::Op::write), 2u);
  EXPECT_EQ(used_frames(r), 0u);
  end(r);
}

TEST_F(PagerDemoter, WhatDidNotComeOverIsNotWrittenAndStaysDirty) {
  Region& r = placed(true);
  const Status s = write(r, 7, core::error(EIO, "as the test wants it"));
  EXPECT_EQ(s.code(), -EIO);
  EXPECT_NE(std::string(s.text()).find("as the test wants it: not written"), std::string::npos) << s.text();
  EXPECT_EQ(engine.count(Io::Op::write), 0u);
  EXPECT_NE(flags(r, 0, core::kDirty), 0);
  EXPECT_EQ(flags(r, 0, core::kUnknown), 0) << "no write of it has failed";
  EXPECT_EQ(used_frames(r), 0u);
  end(r);
}

TEST_F(PagerDemoter, AWriteThatFailsLeavesItsMarkUntilOneIsDone) {
  Region& r = placed(true);
  engine.fail(Io::Op::write, EIO);
  EXPECT_EQ(write(r, 7).code(), -EIO);
  EXPECT_NE(flags(r, 0, core::kDirty), 0);
  EXPECT_EQ(space.extents(), 0u) << "the room that it was to have is given back";
  engine.fail(Io::Op::write, 0);
  ASSERT_TRUE(write(r, 7).ok());
  EXPECT_EQ(flags(r, 0, core::kDirty | core::kUnknown), 0);
  EXPECT_EQ(used_frames(r), 0u);
  {
    BigLock lock(map.mutex());
    writeback_throttle.take_error().ignore();
  }
  end(r);
}

TEST_F(PagerDemoter, TheFrameOfAHostCopyStaysTheCopys) {
  Region& r = placed(true);
  {
    BigLock lock(map.mutex());
    edit(r.table, 0).flags &= static_cast<uint16_t>(~core::kDirty);
    std::byte* frame = staging_allocator.frame(r, 0);
    memset(frame, 9, r.block_size);
    ASSERT_TRUE(staging_allocator.keep_copy(r, 0, frame));
  }
  ASSERT_TRUE(write(r, 9).ok());
  EXPECT_EQ(used_frames(r), 1u);
  ASSERT_TRUE(write(r, 9).ok()) << "it may be held again";
  EXPECT_EQ(engine.count(Io::Op::write), 1u);
  {
    BigLock lock(map.mutex());
    EXPECT_TRUE(map.copies().has(r.table[0].aux));
    map.copies().drop(r.table[0].aux);
  }
  EXPECT_EQ(used_frames(r), 0u);
  end(r);
}

}  // namespace
