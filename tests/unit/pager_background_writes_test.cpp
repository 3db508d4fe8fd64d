// Background writes of shared files: which blocks, when, and which threads wait for them.
#include <gtest/gtest.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <future>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "common/patience.h"
#include "pager/host/background_writes.h"
#include "pager_parts.h"
#include "pager_steps.h"

namespace vmem::pager::test {
namespace {

using vmem::test::eventually;

constexpr uint64_t kHour = uint64_t{3600} * 1000000000;

// No reclaim thread runs; the test sets the time.
class BackgroundWritesByHand : public PagerParts {
 protected:
  BackgroundWritesByHand() { tunables.writeback_interval_ns = kHour; }

  Region& file(BlockIndex blocks) {
    Region& r = region(blocks, Backing::file_shared);
    r.source.id = 1;
    return r;
  }
  // The block is in place, and stored to at `at_ns`.
  void change(Region& r, BlockIndex b, uint64_t at_ns) {
    if (state(r, b) != core::State::resident) bring(r, b);
    put(r, b, 1000 + b);
    BigLock lock(map.mutex());
    map.note_dirty(r, b);
    map.dirty().put_off(r.table[b].aux, at_ns);
  }
  bool write_at(uint64_t now_ns) {
    bool any = false;
    {
      BigLock lock(map.mutex());
      any = background.write_some(lock, now_ns);
    }
    engine.until_idle();
    return any;
  }
  bool dirty(Region& r, BlockIndex b) {
    BigLock lock(map.mutex());
    return map.dirty().listed(r.table[b].aux);
  }
  uint64_t next(uint64_t now_ns) {
    BigLock lock(map.mutex());
    return background.next_ns(now_ns);
  }
  void lease(Region& r, BlockIndex first, BlockIndex last) {
    BigLock lock(map.mutex());
    ASSERT_TRUE(r.leases.prepare(first, last, nullptr));
    r.leases.acquire(first, last, VMEM_HOST, nullptr, VMEM_WRITE);
  }
  void end_lease(Region& r, BlockIndex first, BlockIndex last) {
    BigLock lock(map.mutex());
    ASSERT_TRUE(r.leases.divide(first, last));
    r.leases.release(first, last, nullptr, VMEM_WRITE);
    r.leases.join(first, last);
    map.match_holds(lock, {&r, first, last});
  }
  void write_overdue(Region& r, BlockIndex first, BlockIndex last) {
    {
      BigLock lock(map.mutex());
      background.write_overdue(lock, {&r, first, last});
    }
    engine.until_idle();
  }
  uint64_t start = now_ns() + kHour;
  BackgroundWrites& background = host.background;
};

TEST_F(BackgroundWritesByHand, ABlockIsWrittenWhenItIsOldEnoughAndStaysAsClean) {
  Region& r = file(4);
  EXPECT_EQ(next(start), UINT64_MAX) << "nothing is dirty: nobody wakes up";
  change(r, 2, start);
  EXPECT_EQ(next(start), start + kHour);
  EXPECT_FALSE(write_at(start + kHour - 1));
  EXPECT_TRUE(write_at(start + kHour));
  EXPECT_EQ(written(), 1u);
  EXPECT_EQ(engine.word(1, 2 * kBlock), 1002u);
  EXPECT_EQ(state(r, 2), core::State::resident);
  EXPECT_NE(flags(r, 2, core::kProtected), 0u);
  EXPECT_FALSE(dirty(r, 2));
  EXPECT_EQ(counters.background_write_bytes, kBlock);
  EXPECT_EQ(next(start + kHour), UINT64_MAX);
}

TEST_F(BackgroundWritesByHand, TheAgeIsThatOfTheFirstStore) {
  Region& r = file(1);
  change(r, 0, start);
  {
    BigLock lock(map.mutex());
    map.note_dirty(r, 0);  // a later store
    EXPECT_EQ(map.dirty().since(r.table[0].aux), start);
  }
  EXPECT_TRUE(write_at(start + kHour));
}

TEST_F(BackgroundWritesByHand, TheOldestGoFirst) {
  constexpr BlockIndex kFirst = 40, kOld = 64;  // kOld: a batch
  Region& r = file(kFirst + kOld);
  for (BlockIndex b = kFirst; b < kFirst + kOld; ++b) change(r, b, start);
  for (BlockIndex b = 0; b < 8; ++b) change(r, b, start + 1);
  EXPECT_TRUE(write_at(start + 2 * kHour));
  for (BlockIndex b = kFirst; b < kFirst + kOld; ++b) EXPECT_FALSE(dirty(r, b)) << b;
  for (BlockIndex b = 0; b < 8; ++b) EXPECT_TRUE(dirty(r, b)) << b;
  EXPECT_TRUE(write_at(start + 2 * kHour));
  for (BlockIndex b = 0; b < 8; ++b) EXPECT_FALSE(dirty(r, b)) << b;
}

TEST_F(BackgroundWritesByHand, NeighboursGoWithItUnlessTheyAreYoung) {
  Region& r = file(8);
  change(r, 3, start);
  change(r, 4, start + kHour / 4);
  change(r, 5, start + kHour - 1);
  change(r, 6, start + kHour - 1);
  EXPECT_TRUE(write_at(start + kHour));
  EXPECT_FALSE(dirty(r, 3) || dirty(r, 4));
  EXPECT_TRUE(dirty(r, 5) && dirty(r, 6));
}

TEST_F(BackgroundWritesByHand, FromHalfOfTheLimitOnAgeDoesNotMatter) {
  tunables.dirty_limit = 4 * kBlock;
  Region& r = file(8);
  change(r, 0, start);
  EXPECT_FALSE(write_at(start));
  change(r, 7, start);
  EXPECT_TRUE(write_at(start));
  EXPECT_FALSE(dirty(r, 0) && dirty(r, 7)) << "fewer than half of the limit";
}

TEST_F(BackgroundWritesByHand, ZeroSecondsWriteNothing) {
  tunables.writeback_interval_ns = 0;
  tunables.dirty_limit = kBlock;
  Region& r = file(4);
  for (BlockIndex b = 0; b < 4; ++b) change(r, b, start);
  EXPECT_EQ(next(start + 100 * kHour), UINT64_MAX);
  EXPECT_FALSE(write_at(start + 100 * kHour));
  BigLock lock(map.mutex());
  EXPECT_FALSE(map.dirty().slows(start));
}

TEST_F(BackgroundWritesByHand, AFileThatRefusesIsLeftAloneForAWhileAndOthersAreWritten) {
  Region& bad = file(2);
  change(bad, 0, start);
  engine.fail(Io::Op::write, EIO);
  EXPECT_TRUE(write_at(start + kHour));
  EXPECT_EQ(counters.io_errors, 1u);
  EXPECT_TRUE(dirty(bad, 0));
  EXPECT_EQ(state(bad, 0), core::State::resident);
  EXPECT_NE(flags(bad, 0, core::kUnknown), 0u) << "the file may have a part of it";
  {
    BigLock lock(map.mutex());
    EXPECT_EQ(writeback_throttle.pause(now_ns()), 0u) << "evictions do not wait for it";
    EXPECT_GT(bad.source.refused_until_ns, 0u);
    bad.source.refused_until_ns = start + 4 * kHour;
  }
  engine.fail(Io::Op::write, 0);
  Region& good = file(2);
  change(good, 1, start + kHour);
  change(bad, 1, start + kHour);
  EXPECT_TRUE(write_at(start + 3 * kHour));
  EXPECT_FALSE(dirty(good, 1));
  EXPECT_TRUE(dirty(bad, 0) && dirty(bad, 1));
  EXPECT_TRUE(write_at(start + 9 * kHour));
  EXPECT_FALSE(dirty(bad, 0) || dirty(bad, 1));
  EXPECT_EQ(flags(bad, 0, core::kUnknown), 0u);
}

TEST_F(BackgroundWritesByHand, ABlockBehindManyThatCannotBeWrittenIsWrittenAtOnce) {
  Region& bad = region(300, Backing::file_shared, core::kPage);
  {
    BigLock lock(map.mutex());
    ASSERT_TRUE(frames.want_bounce(core::kPage, 32 * core::kPage, 32 * core::kPage).ok());
  }
  for (BlockIndex b = 0; b < bad.blocks; ++b) change(bad, b, start);
  {
    BigLock lock(map.mutex());
    bad.source.refused_until_ns = start + 9 * kHour;
  }
  Region& good = file(1);
  change(good, 0, start);
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(write_at(start + kHour)) << i;
  EXPECT_FALSE(dirty(good, 0));
  EXPECT_FALSE(write_at(start + kHour));
  EXPECT_GT(next(start + kHour), start + kHour);
}

TEST_F(BackgroundWritesByHand, TheEndOfALeaseMakesAnOverdueBlockDue) {
  Region& r = file(4);
  for (BlockIndex b = 0; b < 4; ++b) change(r, b, start);
  lease(r, 1, 2);
  EXPECT_TRUE(write_at(start + kHour));
  EXPECT_FALSE(dirty(r, 0) || dirty(r, 3));
  EXPECT_TRUE(dirty(r, 1) && dirty(r, 2));
  EXPECT_GT(next(start + kHour), start + kHour) << "nobody looks meanwhile";
  lease(r, 2, 2);
  end_lease(r, 1, 2);
  EXPECT_TRUE(write_at(start + kHour));
  EXPECT_FALSE(dirty(r, 1));
  EXPECT_TRUE(dirty(r, 2)) << "it is leased still";
  end_lease(r, 2, 2);
  EXPECT_TRUE(write_at(start + kHour));
  EXPECT_FALSE(dirty(r, 2));
}

TEST_F(BackgroundWritesByHand, TheNextCallWritesAllThatIsOverdueAndNothingElse) {
  Region& r = file(72);
  for (BlockIndex b = 0; b < r.blocks; ++b) change(r, b, start);
  lease(r, 0, 71);
  for (int i = 0; i < 4; ++i) write_at(start + kHour);
  write_overdue(r, 0, 71);
  EXPECT_EQ(written(), 0u) << "what is leased for writing stays";
  end_lease(r, 0, 71);
  write_overdue(r, 1, 71);
  EXPECT_TRUE(dirty(r, 0)) << "outside the range";
  for (BlockIndex b = 1; b < r.blocks; ++b) EXPECT_FALSE(dirty(r, b)) << b;
  change(r, 5, start + 2 * kHour);
  write_overdue(r, 0, 71);
  EXPECT_TRUE(dirty(r, 5)) << "it is young";
  EXPECT_FALSE(dirty(r, 0));
}

// The kernel cannot read pages that the program has protected, and there is no memory for a copy.
TEST_F(BackgroundWritesByHand, BlocksThatCannotBeReadAreTriedOnceInAnInterval) {
  tunables.dirty_limit = 4 * kBlock;
  Region& r = file(4);
  const uint64_t begin = now_ns();  // a failure is noted by the clock
  for (BlockIndex b = 0; b < 4; ++b) change(r, b, begin);
  engine.fail(Io::Op::write, EFAULT);
  EXPECT_TRUE(write_at(begin)) << "so many are written whatever their age";
  const uint64_t tries = engine.count(Io::Op::write);
  EXPECT_FALSE(write_at(begin));
  EXPECT_FALSE(write_at(begin + kHour - 1));
  EXPECT_EQ(engine.count(Io::Op::write), tries);
  EXPECT_GT(next(begin + kHour - 1), begin + kHour - 1) << "a reclaim thread sleeps";
  EXPECT_TRUE(write_at(begin + 2 * kHour));
  EXPECT_GT(engine.count(Io::Op::write), tries);
  engine.fail(Io::Op::write, 0);
  EXPECT_TRUE(write_at(begin + 4 * kHour));
  for (BlockIndex b = 0; b < 4; ++b) EXPECT_FALSE(dirty(r, b)) << b;
}

TEST_F(BackgroundWritesByHand, WhatLeavesMemoryIsDirtyNoMore) {
  Region& r = file(2);
  change(r, 0, start);
  Transition* m = nullptr;
  {
    BigLock lock(map.mutex());
    map.withdraw(r.table[0].aux);
    m = isolator.begin_take(r, 0, false, false);
    ASSERT_NE(m, nullptr);
  }
  write_back.evict_batch({&m, 1});
  engine.until_idle();
  EXPECT_EQ(state(r, 0), core::State::unpopulated);
  BigLock lock(map.mutex());
  EXPECT_EQ(map.dirty().bytes(), 0u);
}

// The whole pager: its reclaim threads write.
class PagerBackgroundWrites : public PagerSteps {
 protected:
  // Stores to two blocks. Both count once they are in place.
  void fill_up_to_the_limit(std::byte* r) {
    put(r, 1);
    put(r + kSmall, 2);
    ASSERT_TRUE(eventually([&] { return stats().dirty_bytes == 2 * kSmall; }));
  }
  static Settings soon() {
    Settings c = config();
    c.writeback_interval_ns = 1000000;
    return c;
  }
};

TEST_F(PagerBackgroundWrites, WhatIsStoredReachesTheFileByItself) {
  for (size_t block : {kSmall, kHugePage}) {
    start(soon());
    std::byte* r = shared(2 * block, block);
    put(r + block, 7);
    EXPECT_TRUE(eventually([&] { return in_file(block) == 7; }));
    EXPECT_TRUE(eventually([&] { return stats().dirty_bytes == 0; }));
    put(r + block, 8);
    EXPECT_TRUE(eventually([&] { return in_file(block) == 8; })) << "a store to a block that was clean is seen";
    EXPECT_EQ(get(r + block), 8u);
    EXPECT_EQ(stats().evictions, 0u);
    TearDown();
    pager.reset();
  }
}

TEST_F(PagerBackgroundWrites, WhereTheModuleKeepsFramesABlockGoesBackProtected) {
  start(soon(), std::make_unique<FakeTrap>(false, true, true));
  std::byte* r = shared(2 * kSmall);
  put(r, 7);
  EXPECT_TRUE(eventually([&] { return in_file(0) == 7 && stats().dirty_bytes == 0; }));
  const uint64_t writes = engine->count(Io::Op::write);
  put(r, 8);
  EXPECT_TRUE(eventually([&] { return in_file(0) == 8 && stats().dirty_bytes == 0; }));
  EXPECT_EQ(engine->count(Io::Op::write), writes + 1);
}

TEST_F(PagerBackgroundWrites, ABlockThatIsOnlyReadIsNotWritten) {
  start(soon());
  std::byte* r = shared(2 * kHugePage, kHugePage);
  EXPECT_EQ(get(r), 0u);
  EXPECT_TRUE(eventually([&] { return stats().dirty_bytes == 0; })) << "moved into place, it may have been stored to";
  EXPECT_EQ(engine->count(Io::Op::write), 0u);
}

TEST_F(PagerBackgroundWrites, ABlockThatIsStoredToAllTheTimeIsWrittenAllTheTime) {
  start(soon());
  std::byte* r = shared(kSmall);
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (uint64_t n = 1; !stop; ++n) put(r, n);
  });
  for (uint64_t seen = 0, times = 0; times < 5; ++times) {
    EXPECT_TRUE(eventually([&] { return in_file(0) > seen; })) << seen;
    seen = in_file(0);
  }
  stop = true;
  writer.join();
}

TEST_F(PagerBackgroundWrites, UnderALeaseForWritingItWaitsForTheLease) {
  start(soon());
  std::byte* r = shared(2 * kSmall);
  const vmem_range first = range(r, kSmall, VMEM_READ | VMEM_WRITE);
  ASSERT_TRUE(pager->acquire({&first, 1}, VMEM_HOST, nullptr).ok());
  put(r, 7);
  for (uint64_t n = 1; n < 4; ++n) {
    put(r + kSmall, n);
    ASSERT_TRUE(eventually([&] { return in_file(kSmall) == n; }));
  }
  EXPECT_EQ(in_file(0), 0u);
  EXPECT_TRUE(pager->release({&first, 1}, nullptr).ok());
  EXPECT_TRUE(eventually([&] { return in_file(0) == 7; }));
}

TEST_F(PagerBackgroundWrites, LeasesOneAfterTheOtherDoNotKeepABlockFromItsFile) {
  start(soon());
  std::byte* r = shared(kSmall);
  const vmem_range all = range(r, kSmall, VMEM_READ | VMEM_WRITE);
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (uint64_t n = 1; !stop; ++n) {
      ASSERT_TRUE(pager->acquire({&all, 1}, VMEM_HOST, nullptr).ok());
      put(r, n);
      ASSERT_TRUE(pager->release({&all, 1}, nullptr).ok());
    }
  });
  for (uint64_t seen = 0, times = 0; times < 5; ++times) {
    EXPECT_TRUE(eventually([&] { return in_file(0) > seen; })) << seen;
    seen = in_file(0);
  }
  stop = true;
  writer.join();
}

TEST_F(PagerBackgroundWrites, ALargeLeaseThatIsTakenAgainAtOnceKeepsNoBlockFromItsFile) {
  constexpr uint64_t kBlocks = 100;  // more than are written at once
  Settings c = soon();
  c.host_budget = 4 * kBlocks * kSmall;
  start(c);
  std::byte* r = shared(kBlocks * kSmall);
  const vmem_range all = range(r, kBlocks * kSmall, VMEM_READ | VMEM_WRITE);
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (uint64_t n = 1; !stop; ++n) {
      ASSERT_TRUE(pager->acquire({&all, 1}, VMEM_HOST, nullptr).ok());
      for (uint64_t b = 0; b < kBlocks; ++b) put(r + b * kSmall, n);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));  // until all are due
      ASSERT_TRUE(pager->release({&all, 1}, nullptr).ok());
    }
  });
  for (uint64_t b : {uint64_t{0}, kBlocks / 2, kBlocks - 1}) {
    const uint64_t seen = in_file(b * kSmall);
    EXPECT_TRUE(eventually([&] { return in_file(b * kSmall) > seen; })) << b;
  }
  stop = true;
  writer.join();
}

TEST_F(PagerBackgroundWrites, EvictionsThatMeetAPinDoNotKeepABlockFromItsFile) {
  start(soon());
  std::byte* r = shared(kSmall);
  put(r, 1);
  trap->fail_take(EBUSY);
  std::atomic<bool> stop{false};
  std::thread reclaim([&] {
    while (!stop) pager->evict(r, kSmall, VMEM_SSD).ignore();
  });
  for (uint64_t n = 2; n < 7; ++n) {
    put(r, n);
    EXPECT_TRUE(eventually([&] { return in_file(0) == n; })) << n;
  }
  stop = true;
  reclaim.join();
  trap->fail_take(0);
}

// Stores of a network card, or O_DIRECT, that pinned the page before it was protected.
TEST_F(PagerBackgroundWrites, WhatAPinnedPageGetsAfterTheWriteIsNotLost) {
  for (size_t block : {kSmall, kHugePage}) {
    for (const bool leaves : {false, true}) {
      start(soon());
      std::byte* r = shared(2 * block, block);
      put(r, 7);
      ASSERT_TRUE(eventually([&] { return in_file(0) == 7 && stats().dirty_bytes == 0; }));
      const uint64_t late = 8;
      memcpy(r, &late, sizeof late);  // bypasses the protection
      if (leaves) {
        evict(r, block);
      } else {
        EXPECT_TRUE(pager->sync(r, block).ok());
      }
      EXPECT_EQ(in_file(0), 8u);
      TearDown();
      pager.reset();
    }
  }
}

TEST_F(PagerBackgroundWrites, AtTheLimitStoresWaitForWrites) {
  Settings c = soon();
  c.writeback_interval_ns = kHour;
  c.dirty_limit = 2 * kSmall;
  start(c);
  std::byte* r = shared(8 * kSmall);
  engine->hold(Io::Op::write, true);
  fill_up_to_the_limit(r);
  auto third = putting(r + 2 * kSmall, 3);
  auto fourth = putting(r + 3 * kSmall, 4);
  EXPECT_EQ(get(r + 5 * kSmall), 0u) << "loads go on";
  auto clean = putting(r + 5 * kSmall, 6);
  engine->until_held(1);
  trap->until_quiet();
  EXPECT_NE(third.wait_for(std::chrono::milliseconds(20)), std::future_status::ready);
  EXPECT_NE(clean.wait_for(std::chrono::milliseconds(0)), std::future_status::ready);
  EXPECT_LE(stats().dirty_bytes, 2 * kSmall);
  engine->hold(Io::Op::write, false);
  engine->let_go();
  third.get();
  fourth.get();
  clean.get();
  EXPECT_TRUE(eventually([&] { return stats().dirty_bytes < 2 * kSmall; }));
}

TEST_F(PagerBackgroundWrites, AtTheLimitStoresGoOnWhereTheFileTakesNoWrite) {
  Settings c = soon();
  c.dirty_limit = 2 * kSmall;
  start(c);
  std::byte* r = shared(8 * kSmall);
  engine->fail(Io::Op::write, ENOSPC);
  for (uint64_t b = 0; b < 8; ++b) put(r + b * kSmall, 1 + b);
  EXPECT_EQ(pager->sync(r, 8 * kSmall).code(), -ENOSPC);
  engine->fail(Io::Op::write, 0);
  EXPECT_TRUE(eventually([&] { return stats().dirty_bytes == 0; }));
  for (uint64_t b = 0; b < 8; ++b) EXPECT_EQ(in_file(b * kSmall), 1 + b);
}

TEST_F(PagerBackgroundWrites, AtTheLimitStoresGoOnWhereAllOfItIsLeased) {
  Settings c = soon();
  c.dirty_limit = 2 * kSmall;
  start(c);
  std::byte* r = shared(8 * kSmall);
  const vmem_range leased = range(r, 4 * kSmall, VMEM_READ | VMEM_WRITE);
  ASSERT_TRUE(pager->acquire({&leased, 1}, VMEM_HOST, nullptr).ok());
  put(r + 5 * kSmall, 5);
  EXPECT_TRUE(eventually([&] { return in_file(5 * kSmall) == 5; }));
  EXPECT_TRUE(pager->release({&leased, 1}, nullptr).ok());
}

TEST_F(PagerBackgroundWrites, BesideALeaseOfMoreThanTheLimitOtherStoresWaitForWrites) {
  Settings c = soon();
  c.dirty_limit = 2 * kSmall;
  start(c);
  std::byte* r = shared(8 * kSmall);
  const vmem_range leased = range(r, 4 * kSmall, VMEM_READ | VMEM_WRITE);
  ASSERT_TRUE(pager->acquire({&leased, 1}, VMEM_HOST, nullptr).ok());
  for (uint64_t n = 1; n < 4; ++n) {  // by then the reclaim thread has checked all leased blocks
    put(r + 4 * kSmall, n);
    ASSERT_TRUE(eventually([&] { return in_file(4 * kSmall) == n; }));
  }
  engine->hold(Io::Op::write, true);
  put(r + 5 * kSmall, 5);
  put(r + 6 * kSmall, 6);
  ASSERT_TRUE(eventually([&] { return stats().dirty_bytes == 6 * kSmall; }));  // a block counts once it is in place
  auto third = putting(r + 7 * kSmall, 7);
  engine->until_held(1);
  trap->until_quiet();
  EXPECT_NE(third.wait_for(std::chrono::milliseconds(20)), std::future_status::ready);
  engine->hold(Io::Op::write, false);
  engine->let_go();
  third.get();
  EXPECT_TRUE(pager->release({&leased, 1}, nullptr).ok());
}

// If the disk never answers, stores continue after the time-out of a fault.
TEST_F(PagerBackgroundWrites, AtTheLimitStoresGoOnWhereTheDiskHangs) {
  Settings c = soon();
  c.dirty_limit = 2 * kSmall;
  c.fault_timeout_ms = 50;
  start(c);
  std::byte* r = shared(8 * kSmall);
  engine->hold(Io::Op::write, true);
  fill_up_to_the_limit(r);
  put(r + 2 * kSmall, 3);
  EXPECT_TRUE(eventually([&] { return stats().dirty_bytes > 2 * kSmall; }));
  engine->hold(Io::Op::write, false);
  engine->let_go();
  EXPECT_TRUE(eventually([&] { return in_file(2 * kSmall) == 3; }));
}

TEST_F(PagerBackgroundWrites, ARegionIsFreedWhileItsStoresWait) {
  Settings c = soon();
  c.dirty_limit = 2 * kSmall;
  start(c);
  std::byte* r = shared(8 * kSmall);
  engine->hold(Io::Op::write, true);
  fill_up_to_the_limit(r);
  const size_t before = trap->met(r + 4 * kSmall);
  auto waits = std::async(std::launch::async, [&] { return trap->store(r + 4 * kSmall, 3); });
  trap->until_met(r + 4 * kSmall, before + 1);
  trap->until_quiet();
  auto freeing = calling([&] { return pager->destroy(r, true); });
  engine->hold(Io::Op::write, false);
  engine->let_go();
  EXPECT_TRUE(freeing.get().ok());
  waits.get();  // bytes in time, or SIGBUS, but no endless wait
  EXPECT_FALSE(pager->has_regions());
}

TEST_F(PagerBackgroundWrites, SettingsMayChangeMeanwhile) {
  Settings c = soon();
  c.writeback_interval_ns = kHour;
  c.dirty_limit = 2 * kSmall;
  start(c);
  std::byte* r = shared(8 * kSmall);
  engine->hold(Io::Op::write, true);
  fill_up_to_the_limit(r);
  auto waits = putting(r + 2 * kSmall, 3);
  trap->until_quiet();
  EXPECT_NE(waits.wait_for(std::chrono::milliseconds(20)), std::future_status::ready);
  pager->tunables_update().set_writeback(kHour, uint64_t{1} << 40);
  waits.get();
  engine->hold(Io::Op::write, false);
  engine->let_go();
  pager->tunables_update().set_writeback(1000000, uint64_t{1} << 40);
  EXPECT_TRUE(eventually([&] { return in_file(2 * kSmall) == 3; }));
}

}  // namespace
}  // namespace vmem::pager::test
