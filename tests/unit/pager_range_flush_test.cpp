// Writing and demoting the blocks of a range: which are written and which skipped, their state
// afterwards, and the result.
#include <gtest/gtest.h>

#include <cerrno>

#include "edit_block.h"
#include "pager/calls/range_flush.h"
#include "pager_device_parts.h"

namespace {

using vmem::core::BigLock;
using vmem::core::BlockIndex;
using vmem::core::State;
using vmem::core::Status;
using vmem::pager::Backing;
using vmem::pager::DeferredWork;
using vmem::pager::Leave;
using vmem::pager::RangeScan;
using vmem::pager::Region;
using vmem::store::Io;
namespace core = vmem::core;

class PagerRangeFlush : public vmem::pager::test::DeviceParts {
 protected:
  Region& changed(size_t count, Backing backing = Backing::anonymous) {
    Region& r = region(count, backing);
    for (BlockIndex b = 0; b < count; ++b) change(r, b, b + 1);
    return r;
  }
  void change(Region& r, BlockIndex b, uint64_t value) {
    bring(r, b);
    put(r, b, value);
  }
  Status write(Region& r, bool keep, RangeScan* scan) {
    BigLock lock(map.mutex());
    ++r.counts.in_flight;
    Status s = range_flush.write(lock, r, 0, r.blocks - 1, keep, scan);
    --r.counts.in_flight;
    return s;
  }
  Status write(Region& r, bool keep) {
    RangeScan scan;
    Status s = write(r, keep, &scan);
    EXPECT_FALSE(scan.skipped);
    return s;
  }
};

TEST_F(PagerRangeFlush, WhatTheStoreDoesNotHaveIsWrittenOnceAndStays) {
  Region& r = changed(3);
  ASSERT_TRUE(write(r, true).ok());
  EXPECT_EQ(written(), 3u);
  for (BlockIndex b = 0; b < 3; ++b) {
    EXPECT_EQ(state(r, b), State::resident);
    EXPECT_NE(flags(r, b, core::kProtected), 0) << "else it could change unseen";
  }
  ASSERT_TRUE(write(r, true).ok());
  EXPECT_EQ(written(), 3u);
}

TEST_F(PagerRangeFlush, WhatIsToLeaveMemoryIsInTheStoreAlone) {
  Region& r = changed(2);
  ASSERT_TRUE(write(r, true).ok());
  ASSERT_TRUE(write(r, false).ok());
  EXPECT_EQ(written(), 2u) << "it had been written already";
  for (BlockIndex b = 0; b < 2; ++b) EXPECT_EQ(state(r, b), State::stored);
}

TEST_F(PagerRangeFlush, BlocksUnderALeaseForWritingAreSkippedUnlessLeasesDoNotMatter) {
  Region& r = changed(3);
  lease(r, 0, VMEM_WRITE);
  lease(r, 1, VMEM_READ);
  RangeScan scan;
  ASSERT_TRUE(write(r, true, &scan).ok());
  EXPECT_TRUE(scan.skipped);
  EXPECT_EQ(written(), 2u);
  EXPECT_EQ(flags(r, 0, core::kProtected), 0) << "who leases it goes on storing";
  scan = {};
  scan.all = true;
  ASSERT_TRUE(write(r, true, &scan).ok());
  EXPECT_FALSE(scan.skipped);
  EXPECT_EQ(written(), 3u);
  end_lease(r, 0, VMEM_WRITE);
  end_lease(r, 1, VMEM_READ);
}

TEST_F(PagerRangeFlush, WhatIsLeasedInWhateverWayDoesNotLeaveMemory) {
  Region& r = changed(2);
  lease(r, 0, VMEM_READ);
  RangeScan scan;
  ASSERT_TRUE(write(r, false, &scan).ok());
  EXPECT_TRUE(scan.skipped);
  EXPECT_EQ(state(r, 0), State::resident);
  EXPECT_EQ(state(r, 1), State::stored);
  end_lease(r, 0, VMEM_READ);
}

TEST_F(PagerRangeFlush, AWriteThatFailsIsToldAndTheRestIsWrittenAllTheSame) {
  Region& r = changed(3);
  engine.tear(EIO, 2);
  EXPECT_EQ(write(r, true).code(), -EIO);
  EXPECT_EQ(written(), 3u);
  size_t unknown = 0;
  for (BlockIndex b = 0; b < 3; ++b) {
    EXPECT_EQ(state(r, b), State::resident);
    unknown += flags(r, b, core::kUnknown) != 0;
  }
  EXPECT_EQ(unknown, 1u);
  ASSERT_TRUE(write(r, true).ok());
  EXPECT_EQ(written(), 4u) << "the one that failed";
}

TEST_F(PagerRangeFlush, ARegionThatNobodyStoresToIsNotLookedAt) {
  Region& r = region(1, Backing::file_read);
  bring(r, 0);
  ASSERT_TRUE(write(r, true).ok());
  EXPECT_EQ(written(), 0u);
}

TEST_F(PagerRangeFlush, WhatADeviceHasChangedIsWrittenAndStaysThereUnlessOnlyTheHostMatters) {
  Region& r = device_region(1);
  supply_frames(r);
  devices.transitions = true;
  ASSERT_TRUE(gpus.use(0).ok());
  {
    BigLock lock(map.mutex());
    place(r, 0, 0);
    edit(r.table, 0).flags |= core::kDirty;
  }
  RangeScan scan;
  scan.all = scan.host = true;
  ASSERT_TRUE(write(r, true, &scan).ok());
  EXPECT_EQ(written(), 0u);
  ASSERT_TRUE(write(r, true).ok());
  EXPECT_EQ(written(), 1u);
  EXPECT_EQ(state(r, 0), State::on_device);
  EXPECT_EQ(flags(r, 0, core::kDirty), 0);
  ASSERT_TRUE(write(r, false).ok());
  EXPECT_EQ(state(r, 0), State::stored);
}

TEST_F(PagerRangeFlush, WhoDoesNotWaitLeavesWhatIsUnderWayAndWritesTheRest) {
  Region& r = region(3);
  for (const BlockIndex b : {0, 2}) change(r, b, 5);
  ASSERT_TRUE(write(r, false).ok());
  change(r, 2, 6);
  engine.hold(Io::Op::read, true);
  DeferredWork after;
  {
    BigLock lock(map.mutex());
    ASSERT_TRUE(page_in.start_fill(r, 0, core::Urgency::fault, after));
  }
  page_in.run(after);
  engine.until_held(1);
  RangeScan scan;
  scan.wait = RangeScan::Wait::never;
  ASSERT_TRUE(write(r, true, &scan).ok());
  EXPECT_EQ(scan.left.size(), 1u);
  EXPECT_EQ(scan.left.begin()->first, 0u);
  EXPECT_EQ(written(), 3u);
  engine.hold(Io::Op::read, false);
  engine.let_go();
}

// A kernel's thread may release it after the call has waited for the region's releases.
TEST_F(PagerRangeFlush, ABlockWhoseReleaseIsPendingIsWaitedForAndWritten) {
  tunables.fault_timeout_ms = 50;
  Region& r = device_region(1);
  supply_frames(r);
  devices.transitions = devices.streams = true;
  ASSERT_TRUE(gpus.use(0).ok());
  int stream = 0;
  RangeScan scan;
  scan.all = true;
  scan.wait = RangeScan::Wait::while_it_goes_on;
  const auto run = [&] {
    BigLock lock(map.mutex());
    scan.left.clear();
    scan.progress = {};
    scan.progress.look(vmem::core::now_ns(), true);
    ++r.counts.in_flight;
    const Status s = range_flush.demote(lock, r, 0, 0, Leave::sync, &scan);
    --r.counts.in_flight;
    return s;
  };
  const auto release = [&] {
    {
      BigLock lock(map.mutex());
      ASSERT_TRUE(lease_manager.grant({&r, 0, 0}, VMEM_WRITE, 0, &stream).ok());
      edit(r.table, 0).flags |= core::kDirty;
    }
    const vmem_range what{r.address(0), r.block_size, VMEM_WRITE, 0};
    ASSERT_TRUE(releases.release({&what, 1}, &stream, &stream, false).ok());
  };
  {
    BigLock lock(map.mutex());
    place(r, 0, 0);
  }
  release();
  ASSERT_TRUE(run().ok());
  EXPECT_EQ(scan.left.size(), 1u) << "its stream is held";
  EXPECT_EQ(devices.copied, 1u) << "as it is now";
  release();
  devices.reached = true;
  ASSERT_TRUE(run().ok());
  EXPECT_TRUE(scan.left.empty());
  EXPECT_EQ(devices.copied, 2u);
  BigLock lock(map.mutex());
  remove(r, 0);
}

TEST_F(PagerRangeFlush, ABlockThatDoesNotComeToRestCountsOnce) {
  Region& r = device_region(2);
  ASSERT_TRUE(gpus.use(0).ok());
  {
    BigLock lock(map.mutex());
    for (const BlockIndex b : {0, 1}) {
      place(r, b, 0);
      core::change(r.table, b, State::on_device, State::demoting);
    }
  }
  RangeScan scan;
  scan.all = true;
  scan.wait = RangeScan::Wait::never;
  ASSERT_TRUE(write(r, true, &scan).ok());
  EXPECT_EQ(scan.left.size(), 2u);
  BigLock lock(map.mutex());
  for (const BlockIndex b : {0, 1}) {
    core::change(r.table, b, State::demoting, State::on_device);
    remove(r, b);
  }
}

TEST_F(PagerRangeFlush, AFilesFlushIsWaitedForAndItsFailureIsTold) {
  Region& r = region(1, Backing::file_shared);
  r.source.file.path = "the-file";
  {
    BigLock lock(map.mutex());
    EXPECT_TRUE(range_flush.flush_file(lock, r).ok());
  }
  EXPECT_EQ(engine.count(Io::Op::flush), 1u);
  engine.fail(Io::Op::flush, EIO);
  BigLock lock(map.mutex());
  const Status s = range_flush.flush_file(lock, r);
  EXPECT_EQ(s.code(), -EIO);
  EXPECT_NE(s.text().find("the-file"), std::string_view::npos) << s.text();
}

TEST_F(PagerRangeFlush, ARangeLeavesButItsLeasedBlocksStayAndAreSaid) {
  devices.transitions = true;
  ASSERT_TRUE(gpus.use(0).ok());
  Region& r = device_region(4);
  supply_frames(r);
  BigLock lock(map.mutex());
  for (const BlockIndex b : {0, 1, 2}) place(r, b, 0);
  ASSERT_TRUE(lease_manager.grant({&r, 1, 1}, VMEM_READ, 0, nullptr).ok());
  RangeScan scan;
  ASSERT_TRUE(range_flush.demote(lock, r, 0, 3, Leave::evict, &scan).ok());
  EXPECT_TRUE(scan.skipped);
  EXPECT_EQ(r.table[0].state, State::unpopulated);
  EXPECT_EQ(r.table[1].state, State::on_device);
  EXPECT_EQ(r.table[2].state, State::unpopulated);
  scan = {};
  scan.all = true;
  ASSERT_TRUE(range_flush.demote(lock, r, 0, 3, Leave::evict, &scan).ok());
  EXPECT_FALSE(scan.skipped);
  EXPECT_EQ(r.table[1].state, State::unpopulated);
  lease_manager.take_back({&r, 1, 1}, VMEM_READ, 0, nullptr);
}

TEST_F(PagerRangeFlush, ARangeThatFindsNoFrameForTheTimeOutIsGivenUpAndStays) {
  devices.transitions = true;
  ASSERT_TRUE(gpus.use(0).ok());
  tunables.fault_timeout_ms = 30;
  Region& r = device_region(1);
  BigLock lock(map.mutex());
  place(r, 0, 0);
  edit(r.table, 0).flags |= core::kDirty;
  RangeScan scan;
  EXPECT_EQ(range_flush.demote(lock, r, 0, 0, Leave::host, &scan).code(), -ENOMEM);
  EXPECT_EQ(r.table[0].state, State::on_device);
  edit(r.table, 0).flags = 0;
  remove(r, 0);
}

}  // namespace
