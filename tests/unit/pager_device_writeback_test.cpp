// Blocks that stay on their device while its changes are written: what is written, the blocks'
// state afterwards, and who owns the frame.
#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "edit_block.h"
#include "pager_device_parts.h"

namespace vmem::pager::test {
namespace {

class PagerDeviceWriteback : public DeviceParts {
 protected:
  void SetUp() override {
    devices.transitions = true;
    ASSERT_TRUE(gpus.use(0).ok());
  }
  Region& placed() {
    Region& r = device_region(1);
    supply_frames(r);
    BigLock lock(map.mutex());
    place(r, 0, 0);
    edit(r.table, 0).flags |= core::kDirty;
    return r;
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
    device_writeback.write({&m, 1}, after);
    page_in.run(after);
    engine.until_idle();
    EXPECT_EQ(state(r, 0), State::on_device);
    BigLock lock(map.mutex());
    EXPECT_EQ(completion.outstanding, 0u);
    return completion.status;
  }
  size_t used_frames(const Region& r) {
    BigLock lock(map.mutex());
    return staging.of(r.block_size).frames.total() - staging.of(r.block_size).frames.free();
  }
  void end(Region& r) {
    BigLock lock(map.mutex());
    edit(r.table, 0).flags = 0;
    if (r.table[0].extent) space.release(r.table[0].extent);
    edit(r.table, 0).extent = {};
    remove(r, 0);
  }
};

TEST_F(PagerDeviceWriteback, WhatTheStoreHasIsNotWrittenAgain) {
  Region& r = placed();
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

TEST_F(PagerDeviceWriteback, WhatDidNotComeOverIsNotWrittenAndStaysDirty) {
  Region& r = placed();
  const Status s = write(r, 7, core::error(EIO, "as the test wants it"));
  EXPECT_EQ(s.code(), -EIO);
  EXPECT_NE(std::string(s.text()).find("as the test wants it: not written"), std::string::npos) << s.text();
  EXPECT_EQ(engine.count(Io::Op::write), 0u);
  EXPECT_NE(flags(r, 0, core::kDirty), 0);
  EXPECT_EQ(flags(r, 0, core::kUnknown), 0) << "no write of it has failed";
  EXPECT_EQ(used_frames(r), 0u);
  end(r);
}

TEST_F(PagerDeviceWriteback, AWriteThatFailsLeavesItsMarkUntilOneIsDone) {
  Region& r = placed();
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
    writes.take_error().ignore();
  }
  end(r);
}

TEST_F(PagerDeviceWriteback, TheFrameOfAHostCopyStaysTheCopys) {
  Region& r = placed();
  {
    BigLock lock(map.mutex());
    edit(r.table, 0).flags &= static_cast<uint16_t>(~core::kDirty);
    std::byte* frame = supply.frame(r, 0);
    memset(frame, 9, r.block_size);
    ASSERT_TRUE(supply.keep_copy(r, 0, frame));
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
}  // namespace vmem::pager::test
