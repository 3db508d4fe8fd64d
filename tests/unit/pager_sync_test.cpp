// Syncs and their results, evictions on request, and what a shared file gets before its region
// goes.
#include <gtest/gtest.h>

#include <cerrno>
#include <thread>

#include "edit_block.h"
#include "pager/calls/sync.h"
#include "pager_device_parts.h"

namespace {

using vmem::core::BigLock;
using vmem::core::BlockIndex;
using vmem::core::State;
using vmem::core::Status;
using vmem::core::Urgency;
using vmem::pager::Backing;
using vmem::pager::Region;
using vmem::store::Io;
namespace core = vmem::core;

class PagerSync : public vmem::pager::test::DeviceParts {
 protected:
  Region& changed(size_t count, Backing backing = Backing::anonymous) {
    Region& r = region(count, backing);
    {
      BigLock lock(map.mutex());
      sums.next_region_id = r.id + 1;
    }
    for (BlockIndex b = 0; b < count; ++b) {
      bring(r, b);
      put(r, b, b + 1);
    }
    return r;
  }
  Status sync_of(Region& r) { return sync.sync(r.base, r.size); }
  Status write_for_free(Region& r, bool force) {
    BigLock lock(map.mutex());
    ++r.counts.in_flight;
    Status s = sync.write_for_free(lock, r, force);
    --r.counts.in_flight;
    return s;
  }
  // Makes a background write fail.
  void fail_in_the_background() {
    BigLock lock(map.mutex());
    writeback_throttle.failed(core::error(EDQUOT, "in the background"), false, vmem::core::now_ns());
  }

  vmem::pager::RegionTotals& sums = ctx.totals;
  vmem::pager::PooledList<vmem::pager::PromotionRequest>& requests = queues.promotion_requests;
  vmem::pager::Sync& sync = calls.sync;
};

TEST_F(PagerSync, OnlyOfASharedFileIsTheFileFlushed) {
  Region& anonymous = changed(2);
  ASSERT_TRUE(sync_of(anonymous).ok());
  EXPECT_EQ(written(), 2u);
  EXPECT_EQ(engine.count(Io::Op::flush), 0u);
  Region& file = changed(1, Backing::file_shared);
  ASSERT_TRUE(sync_of(file).ok());
  EXPECT_EQ(engine.count(Io::Op::flush), 1u);
}

TEST_F(PagerSync, AFileIsFlushedThoughABlockOfItFailed) {
  Region& r = changed(2, Backing::file_shared);
  engine.fail(Io::Op::write, ENOSPC);
  EXPECT_EQ(sync_of(r).code(), -ENOSPC);
  EXPECT_EQ(engine.count(Io::Op::flush), 1u) << "what was written is durable";
  engine.fail(Io::Op::write, 0);
  EXPECT_TRUE(sync_of(r).ok());
}

TEST_F(PagerSync, AWriteThatFailedInTheBackgroundIsToldOnceAndAfterWhatTheRangeMet) {
  Region& r = changed(1);
  fail_in_the_background();
  engine.fail(Io::Op::write, EIO);
  EXPECT_EQ(sync_of(r).code(), -EIO) << "its own failure comes first";
  engine.fail(Io::Op::write, 0);
  EXPECT_EQ(sync_of(r).code(), -EDQUOT);
  EXPECT_TRUE(sync_of(r).ok());
}

TEST_F(PagerSync, BlocksUnderALeaseForWritingAreSaid) {
  Region& r = changed(2);
  lease(r, 1, VMEM_WRITE);
  EXPECT_EQ(sync_of(r).code(), -EBUSY);
  EXPECT_EQ(written(), 1u);
  fail_in_the_background();
  EXPECT_EQ(sync_of(r).code(), -EDQUOT) << "more than that blocks were skipped";
  end_lease(r, 1, VMEM_WRITE);
  EXPECT_TRUE(sync_of(r).ok());
}

TEST_F(PagerSync, WhatIsLostInTheRangeIsToldEachTime) {
  Region& r = changed(2);
  {
    BigLock lock(map.mutex());
    map.withdraw(r.table[1].aux);
    vmem::pager::DeferredWork after;
    ASSERT_TRUE(write_back.drop_contents(lock, r, 1, after).ok());
    failed.mark_lost(r, 1, core::error(EIO, "gone"));
  }
  EXPECT_EQ(sync_of(r).code(), -EIO);
  EXPECT_EQ(sync_of(r).code(), -EIO);
  EXPECT_TRUE(sync.sync(r.base, kBlock).ok()) << "another block's is none of its business";
}

TEST_F(PagerSync, AllRegionsAreThoseThatThereWereAndThatNobodyFrees) {
  EXPECT_TRUE(sync.sync_all().ok()) << "there is none";
  changed(1);
  Region& goes = changed(1);
  changed(1);
  {
    BigLock lock(map.mutex());
    goes.dying = true;
    --sums.next_region_id;  // makes the last region newer than the call
  }
  ASSERT_TRUE(sync.sync_all().ok());
  EXPECT_EQ(written(), 1u);
  {
    BigLock lock(map.mutex());
    ++sums.next_region_id;
    goes.dying = false;
  }
  ASSERT_TRUE(sync.sync_all().ok());
  EXPECT_EQ(written(), 3u);
}

TEST_F(PagerSync, AllRegionsAreSyncedThoughOneFails) {
  changed(1);
  changed(1);
  fail_in_the_background();
  engine.tear(EIO, 1);
  EXPECT_EQ(sync.sync_all().code(), -EIO);
  EXPECT_EQ(written(), 2u);
  EXPECT_EQ(sync.sync_all().code(), -EDQUOT);
  EXPECT_TRUE(sync.sync_all().ok());
}

TEST_F(PagerSync, RegionsAreWrittenTogetherAndAFileIsFlushedOnce) {
  constexpr size_t kRegions = 6;
  for (size_t i = 0; i < kRegions; ++i) {
    Region& r = changed(1, i < 3 ? Backing::anonymous : Backing::file_shared);
    r.source.file.file.inode = i < 3 ? 0 : 7;
  }
  engine.hold(Io::Op::write, true);
  std::thread all([&] { EXPECT_TRUE(sync.sync_all().ok()); });
  engine.until_held(kRegions);  // no region waits for another
  EXPECT_EQ(engine.count(Io::Op::flush), 0u) << "a file is flushed when all of it is written";
  engine.hold(Io::Op::write, false);
  engine.let_go();
  all.join();
  EXPECT_EQ(written(), kRegions);
  EXPECT_EQ(engine.count(Io::Op::flush), 1u);
}

TEST_F(PagerSync, ABlockThatIsAskedOutOfMemoryGoesAndOlderHintsAreForgotten) {
  Region& r = changed(3);
  EXPECT_EQ(sync.evict(r.base, r.size, 0).code(), -EINVAL) << "a device is no place to evict to";
  {
    BigLock lock(map.mutex());
    ASSERT_TRUE(requests.push_back({&r, 0, 1, 0, Urgency::prefetch, nullptr}));
    ASSERT_TRUE(requests.push_back({&r, 0, 1, 0, Urgency::acquire, this}));
  }
  ASSERT_TRUE(sync.evict(r.base, 2 * kBlock, VMEM_SSD).ok());
  EXPECT_EQ(state(r, 0), State::stored);
  EXPECT_EQ(state(r, 1), State::stored);
  EXPECT_EQ(state(r, 2), State::resident);
  BigLock lock(map.mutex());
  ASSERT_EQ(requests.size(), 1u);
  EXPECT_EQ(requests.front().owner, this) << "who waits goes on";
  requests.pop_front();
}

TEST_F(PagerSync, EvictingToTheHostTakesBlocksFromTheirDevices) {
  Region& r = device_region(2);
  supply_frames(r);
  devices.transitions = true;
  ASSERT_TRUE(gpus.use(0).ok());
  {
    BigLock lock(map.mutex());
    place(r, 0, 0);
    edit(r.table, 0).flags |= core::kDirty;
  }
  ASSERT_TRUE(sync.evict(r.base, r.size, VMEM_HOST).ok());
  EXPECT_EQ(state(r, 0), State::staged);
  EXPECT_EQ(written(), 0u);
  ASSERT_TRUE(sync.evict(r.base, r.size, VMEM_SSD).ok());
  EXPECT_EQ(state(r, 0), State::stored);
}

TEST_F(PagerSync, ARegionThatIsFreedByForceIsWrittenWhoeverLeasesIt) {
  Region& r = changed(2, Backing::file_shared);
  lease(r, 0, VMEM_WRITE);
  ASSERT_TRUE(write_for_free(r, true).ok());
  EXPECT_EQ(written(), 2u);
  end_lease(r, 0, VMEM_WRITE);
}

TEST_F(PagerSync, ARegionThatIsLeasedWhileItIsWrittenIsNotFreed) {
  Region& r = changed(2, Backing::file_shared);
  engine.hold(Io::Op::write, true);
  Status result;
  std::thread frees([&] { result = write_for_free(r, false); });
  engine.until_held(1);
  lease(r, 0, VMEM_WRITE);
  engine.hold(Io::Op::write, false);
  engine.let_go();
  frees.join();
  EXPECT_EQ(result.code(), -EBUSY);
  end_lease(r, 0, VMEM_WRITE);
  EXPECT_TRUE(write_for_free(r, false).ok());
}

TEST_F(PagerSync, ALeaseThatCameAndWentWhileARegionWasWrittenHasItLookedAtAgain) {
  Region& r = changed(1, Backing::file_shared);
  engine.hold(Io::Op::write, true);
  Status result;
  std::thread frees([&] { result = write_for_free(r, false); });
  engine.until_held(1);
  lease(r, 0, VMEM_WRITE);
  end_lease(r, 0, VMEM_WRITE);
  engine.hold(Io::Op::write, false);
  engine.let_go();
  frees.join();
  EXPECT_TRUE(result.ok()) << result.text();
  EXPECT_EQ(counters.swept_blocks, 2u) << "its block, looked at twice";
}

}  // namespace
