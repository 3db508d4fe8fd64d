// Marks of failures: a block that failed half way is never taken for what it was before, and
// callers are told.
#include <gtest/gtest.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <future>
#include <thread>

#include "common/patience.h"
#include "pager_steps.h"

namespace {

using vmem::core::kHugePage;
using vmem::core::kPage;
using vmem::core::Status;
using vmem::pager::Backing;
using vmem::pager::test::Gate;
using vmem::pager::test::kSmall;
using vmem::pager::test::PagerSteps;
using vmem::store::Io;

class PagerMarks : public PagerSteps {
 protected:
  // The block is lost: its access gets SIGBUS, each call for its bytes says so, and dont-need ends
  // that state.
  void expect_lost(std::byte* r, size_t block, bool again = true) {
    EXPECT_TRUE(bus(r)) << "neither zeros nor half of it";
    EXPECT_EQ(stats().lost_blocks, 1u);
    for (int i = 0; i < 2; ++i) {
      const Status s = pager->sync(r, block);
      EXPECT_EQ(s.code(), -EIO);
      EXPECT_NE(s.text().find("region 1, block 0 (offset 0)"), std::string_view::npos) << s.text();
    }
    EXPECT_EQ(pager->evict(r, block, VMEM_SSD).code(), -EIO);
    EXPECT_EQ(pager->evict(r, block, VMEM_HOST).code(), -EIO) << "also where there is no device";
    const vmem_range all = range(r, block);
    EXPECT_EQ(pager->acquire({&all, 1}, VMEM_HOST, nullptr).code(), -EIO) << "what the store has is older";
    EXPECT_TRUE(bus(r));
    if (!again) return;
    EXPECT_TRUE(pager->advise(r, block, VMEM_ADVISE_DONT_NEED, VMEM_HOST).ok());
    EXPECT_TRUE(pager->sync(r, block).ok());
    EXPECT_EQ(get(r), 0u);
    put(r, 5);
    evict(r, block);
    EXPECT_EQ(get(r), 5u);
    EXPECT_EQ(get(r + block), 9u) << "its neighbour is as it was";
  }
  // Stores to a region of 16 blocks until there is no memory: *n blocks hold n + 1, and the next store
  // was refused. The trap refuses the first `refused` calls of fail().
  std::byte* store_without_room(unsigned refused, size_t* n) {
    Settings c = config();
    c.fault_timeout_ms = 30;
    start(c);
    std::byte* r = region(16, kHugePage);
    space->set_budget(0);
    if (refused != 0) trap->refuse_fail(refused);
    while (*n < 16 && trap->store(r + *n * kHugePage, *n + 1)) ++*n;
    return r;
  }
};

TEST_F(PagerMarks, AFileTornByAFailedWriteIsWrittenAgainThoughTheOldBytesAreBack) {
  for (size_t block : {kSmall, kHugePage}) {
    for (bool leaves : {false, true}) {
      start(config());
      std::byte* r = shared(2 * block, block);
      EXPECT_EQ(get(r), 0u);
      put(r, 7);
      engine->tear(ENOSPC);
      EXPECT_EQ(pager->sync(r, 2 * block).code(), -ENOSPC);
      EXPECT_EQ(in_file(0), 7u) << "half of the new bytes got there";
      EXPECT_EQ(stats().unknown_blocks, 1u);
      put(r, 0);  // the program undoes its change
      const Status s = leaves ? pager->evict(r, 2 * block, VMEM_SSD) : pager->sync(r, 2 * block);
      EXPECT_TRUE(s.ok()) << s.text();
      EXPECT_EQ(stats().unknown_blocks, 0u);
      EXPECT_EQ(in_file(0), 0u);
      EXPECT_EQ(get(r), 0u);
      TearDown();
      pager.reset();
    }
  }
}

// At that moment the program took away the right to read a page (mprotect).
TEST_F(PagerMarks, WhatCannotBeReadInPlaceIsWrittenFromACopy) {
  for (size_t block : {kSmall, kHugePage}) {
    for (bool leaves : {false, true}) {
      if (leaves && block == kHugePage) continue;  // moved: it is not in place
      start(config());
      std::byte* r = shared(2 * block, block);
      put(r, 7);
      engine->tear(EFAULT);
      const Status s = leaves ? pager->evict(r, 2 * block, VMEM_SSD) : pager->sync(r, 2 * block);
      EXPECT_TRUE(s.ok()) << s.text();
      EXPECT_EQ(engine->count(Io::Op::write), 2u);
      EXPECT_EQ(in_file(0), 7u);
      EXPECT_EQ(stats().unknown_blocks, 0u);
      EXPECT_EQ(get(r), 7u);
      TearDown();
      pager.reset();
    }
  }
}

TEST_F(PagerMarks, ASyncThatFailsItselfLeavesTheBackgroundsFailureToTheNext) {
  start(config());
  std::byte* r = region(2);
  std::byte* other = region(1);
  put(r, 1);
  put(other, 1);
  engine->tear(EIO);
  EXPECT_TRUE(pager->prefetch(r, kSmall, VMEM_SSD).ok());
  engine->until_count(Io::Op::write, 1);
  while (pager->counters().io_errors == 0) std::this_thread::yield();
  engine->tear(ENOSPC);
  EXPECT_EQ(pager->sync(other, kSmall).code(), -ENOSPC);
  EXPECT_EQ(pager->sync(other, kSmall).code(), -EIO);
  EXPECT_TRUE(pager->sync(other, kSmall).ok());
}

TEST_F(PagerMarks, AFileTornByAFailedWriteInTheBackgroundIsWrittenByFree) {
  start(config());
  std::byte* r = shared(2 * kHugePage, kHugePage);
  EXPECT_EQ(get(r), 0u);
  EXPECT_TRUE(pager->sync(r, kHugePage).ok()) << "waits until it is in place: a hint passes over what moves";
  put(r, 7);
  engine->tear(EIO);
  EXPECT_TRUE(pager->prefetch(r, kHugePage, VMEM_SSD).ok());
  engine->until_count(Io::Op::write, 1);
  EXPECT_EQ(in_file(0), 7u);
  put(r, 0);
  EXPECT_TRUE(pager->destroy(r, false).ok());
  EXPECT_EQ(in_file(0), 0u);
}

TEST_F(PagerMarks, AFailureBeforeTheTailOfAFileMarksTheWholeBlock) {
  start(config());
  const size_t size = kSmall - kPage + 100;
  std::byte* r = shared(size);
  EXPECT_EQ(get(r), 0u);
  put(r, 7);
  put(r + kSmall - kPage, 8);
  engine->tear(EIO);  // body and tail are one request, which stops half way
  EXPECT_EQ(pager->sync(r, size).code(), -EIO);
  EXPECT_EQ(in_file(0), 7u);
  put(r, 0);
  put(r + kSmall - kPage, 0);
  EXPECT_TRUE(pager->sync(r, size).ok());
  EXPECT_EQ(engine->count(Io::Op::write), 2u) << "body and tail again";
  EXPECT_EQ(in_file(0), 0u);
  EXPECT_EQ(in_file(kSmall - kPage), 0u);
}

TEST_F(PagerMarks, AStoredBlockTornByAFailedOverwriteIsNeverDroppedAsClean) {
  start(config());
  std::byte* r = region(1, kHugePage);
  put(r, 7);
  evict(r, kHugePage);
  EXPECT_EQ(get(r), 7u);
  tear_and_take_back(r, kHugePage, 7);
}

TEST_F(PagerMarks, ABlockThatCouldNotBeTakenOutWhollyIsLostAndSaysSo) {
  for (bool stored : {false, true}) {
    start(config());
    std::byte* r = region(2, kHugePage);
    put(r + kHugePage, 9);
    if (stored) {
      put(r, 6);
      evict(r, kHugePage);
      EXPECT_EQ(get(r), 6u);
    }
    put(r, 7);
    trap->tear_take();
    const Status s = pager->evict(r, kHugePage, VMEM_SSD);
    EXPECT_EQ(s.code(), -EIO);
    expect_lost(r, kHugePage);
    TearDown();
    pager.reset();
  }
}

// The file became shorter, and the trap refuses to show it and to take back its SIGBUS behind the
// file's end: no bytes can be put there. Nothing is lost, and an acquire has the bytes that there
// are.
TEST_F(PagerMarks, ABlockWhoseEndTheTrapDoesNotTakeBackGivesSigbusUntilAnAcquire) {
  start(config());
  std::byte* r = shared(kHugePage / 2 * 3, kHugePage, Backing::file_read) + kHugePage;
  engine->shorten(kHugePage / 4 * 5);
  trap->refuse_unfail(1);
  EXPECT_TRUE(bus(r));
  EXPECT_EQ(trap->calls("unfail refused"), 1u);
  struct vmem_stats stats = {};
  pager->queries().stats(&stats);
  EXPECT_EQ(stats.lost_blocks, 0u);
  const vmem_range all = range(r, kHugePage / 2, VMEM_READ);
  const Status acquired = pager->acquire({&all, 1}, VMEM_HOST, nullptr);
  ASSERT_TRUE(acquired.ok()) << acquired.text();
  EXPECT_EQ(get(r), 0u);
  EXPECT_TRUE(pager->release({&all, 1}, nullptr).ok());
}

TEST_F(PagerMarks, FreeTellsOfALostBlockOfASharedFileOnce) {
  start(config());
  std::byte* r = shared(2 * kHugePage, kHugePage);
  EXPECT_EQ(get(r), 0u);
  EXPECT_TRUE(pager->sync(r, kHugePage).ok()) << "waits until it is in place: a hint passes over what moves";
  put(r, 7);
  trap->tear_take();
  EXPECT_TRUE(pager->prefetch(r, kHugePage, VMEM_SSD).ok());
  trap->until_called("fail", 1);
  EXPECT_TRUE(bus(r));
  const Status s = pager->destroy(r, false);
  EXPECT_EQ(s.code(), -EIO);
  EXPECT_NE(s.text().find("offset 0"), std::string_view::npos) << s.text();
  EXPECT_TRUE(pager->destroy(r, false).ok()) << "it has said so";
}

TEST_F(PagerMarks, FreeIsSilentAboutALossThatASyncHasTold) {
  start(config());
  std::byte* r = shared(2 * kHugePage, kHugePage);
  put(r, 7);
  trap->tear_take();
  EXPECT_EQ(pager->evict(r, kHugePage, VMEM_SSD).code(), -EIO);
  EXPECT_EQ(pager->sync(r, 2 * kHugePage).code(), -EIO);
  EXPECT_TRUE(pager->destroy(r, false).ok());
}

TEST_F(PagerMarks, ALostBlockOfASharedFileShowsTheFileAgainWhenItIsDropped) {
  start(config());
  std::byte* r = shared(2 * kHugePage, kHugePage);
  put(r, 7);
  EXPECT_TRUE(pager->sync(r, kHugePage).ok());
  put(r, 8);
  trap->tear_take();
  EXPECT_EQ(pager->evict(r, kHugePage, VMEM_SSD).code(), -EIO);
  EXPECT_TRUE(bus(r));
  EXPECT_TRUE(pager->advise(r, kHugePage, VMEM_ADVISE_DONT_NEED, VMEM_HOST).ok());
  EXPECT_EQ(get(r), 7u);
  EXPECT_TRUE(pager->sync(r, 2 * kHugePage).ok());
}

TEST_F(PagerMarks, ABlockThatWasPutInPlaceHalfWayIsLostAndSaysSo) {
  for (size_t block : {kSmall, kHugePage}) {
    start(config());
    std::byte* r = region(2, block);
    put(r, 7);
    put(r + block, 9);
    evict(r, block);
    trap->tear_fill(ENOTRECOVERABLE);
    // A block that was copied for a load is protected, so no thread can have stored to it: see
    // below.
    if (block == kSmall) {
      (void)trap->store(r, 8);  // succeeds if it meets the half that was in place for a moment
    } else {
      uint64_t seen = 7;
      EXPECT_TRUE(!trap->load(r, &seen) || seen == 7u);
    }
    trap->until_called("fail", 1);
    expect_lost(r, block);
    TearDown();
    pager.reset();
  }
}

TEST_F(PagerMarks, ABlockThatWasCopiedHalfWayAndProtectedIsPutInPlaceAgain) {
  start(config());
  std::byte* r = region(2);
  put(r, 7);
  evict(r, kSmall);
  trap->tear_fill(ENOTRECOVERABLE);
  EXPECT_EQ(get(r), 7u);
  EXPECT_EQ(get(r + kSmall - 8), 0u);
  EXPECT_EQ(pager->counters().lost_blocks, 0u);
  EXPECT_TRUE(pager->sync(r, kSmall).ok());
}

TEST_F(PagerMarks, AFillThatFindsAPageInItsWayLosesNothingItCanProve) {
  // Copied: the frame has the block's bytes, whatever happened to the range.
  start(config());
  std::byte* r = region(2);
  put(r, 7);
  evict(r, kSmall);
  trap->tear_fill(EEXIST);
  EXPECT_EQ(get(r), 7u);
  EXPECT_EQ(get(r + kSmall - 8), 0u);
  EXPECT_EQ(pager->counters().lost_blocks, 0u);
  TearDown();
  pager.reset();
  // Moved: half of the frame is gone, which its digest shows.
  start(config());
  r = region(2, kHugePage);
  put(r, 7);
  put(r + kHugePage, 9);
  evict(r, kHugePage);
  trap->tear_fill(EEXIST);
  uint64_t seen = 7;
  EXPECT_TRUE(!trap->load(r, &seen) || seen == 7u);
  trap->until_called("fail", 1);
  expect_lost(r, kHugePage);
}

TEST_F(PagerMarks, ATouchIsAnsweredThoughTheTrapRefusedToFailTheBlockAtFirst) {
  start(config());
  std::byte* r = region(2);
  put(r, 7);
  evict(r, kSmall);
  engine->fail(Io::Op::read, EIO);
  trap->refuse_fail(3);
  EXPECT_TRUE(bus(r)) << "it tried again until it was told";
  EXPECT_EQ(trap->calls("fail refused"), 3u);
  EXPECT_EQ(pager->sync(r, kSmall).code(), -EIO) << "what was stored cannot be had";
  engine->fail(Io::Op::read, 0);
  const vmem_range all = range(r, kSmall);
  EXPECT_TRUE(pager->acquire({&all, 1}, VMEM_HOST, nullptr).ok());
  EXPECT_EQ(get(r), 7u);
  EXPECT_TRUE(pager->sync(r, kSmall).ok());
  EXPECT_TRUE(pager->release({&all, 1}, nullptr).ok());
}

// Without the trap, no access of the block would be reported, and the bytes that the call reads
// could not be put in place.
TEST_F(PagerMarks, ABlockThatTheTrapDoesNotTakeBackStaysFailed) {
  start(config());
  std::byte* r = region(2);
  put(r, 7);
  evict(r, kSmall);
  engine->flip_stored_bits();  // after an I/O error an access would read again
  EXPECT_TRUE(bus(r));
  engine->flip_stored_bits();
  const vmem_range all = range(r, kSmall);
  trap->refuse_unfail(2);
  EXPECT_EQ(pager->acquire({&all, 1}, VMEM_HOST, nullptr).code(), -ENOMEM);
  EXPECT_EQ(pager->release({&all, 1}, nullptr).code(), -EINVAL) << "nothing is leased";
  EXPECT_TRUE(bus(r));
  EXPECT_EQ(pager->sync(r, kSmall).code(), -EIO) << "what was stored cannot be had, still";
  EXPECT_EQ(pager->acquire({&all, 1}, VMEM_HOST, nullptr).code(), -ENOMEM);
  EXPECT_EQ(pager->check(), "");
  EXPECT_TRUE(pager->acquire({&all, 1}, VMEM_HOST, nullptr).ok());
  EXPECT_EQ(get(r), 7u);
  EXPECT_TRUE(pager->release({&all, 1}, nullptr).ok());
  EXPECT_TRUE(pager->sync(r, kSmall).ok());
}

// A part of it traps, the rest gives SIGBUS: no call can make the whole do either.
TEST_F(PagerMarks, TouchesOfABlockThatTheTrapTookBackByHalfAreAnswered) {
  start(config());
  std::byte* r = region(2);
  put(r, 7);
  evict(r, kSmall);
  engine->flip_stored_bits();  // after an I/O error an access would read again
  EXPECT_TRUE(bus(r));
  const vmem_range all = range(r, kSmall);
  trap->tear_unfail();
  EXPECT_EQ(pager->acquire({&all, 1}, VMEM_HOST, nullptr).code(), -ENOMEM);
  EXPECT_TRUE(bus(r)) << "trapped again, and the block is failed";
  EXPECT_TRUE(bus(r + kPage));
  EXPECT_TRUE(bus(r + kSmall - kPage)) << "never trapped";
  engine->flip_stored_bits();
  EXPECT_TRUE(pager->acquire({&all, 1}, VMEM_HOST, nullptr).ok());
  EXPECT_EQ(get(r), 7u);
  EXPECT_TRUE(pager->release({&all, 1}, nullptr).ok());
}

TEST_F(PagerMarks, AnAcquireOfABlockThatTheTrapNeverTakesEnds) {
  Settings c = config();
  c.fault_timeout_ms = 30;
  start(c);
  std::byte* r = region(2);
  put(r, 7);
  evict(r, kSmall);
  trap->fail_fill(ENOENT, SIZE_MAX);
  const vmem_range all = range(r, kSmall);
  const Status s = pager->acquire({&all, 1}, VMEM_HOST, nullptr);
  EXPECT_EQ(s.code(), -EIO);
  EXPECT_NE(s.text().find("region 1, block 0 (offset 0)"), std::string_view::npos) << s.text();
  EXPECT_EQ(pager->release({&all, 1}, nullptr).code(), -EINVAL) << "nothing is leased";
  trap->fail_fill(0, 0);
  EXPECT_TRUE(pager->acquire({&all, 1}, VMEM_HOST, nullptr).ok());
  EXPECT_EQ(get(r), 7u);
  EXPECT_TRUE(pager->release({&all, 1}, nullptr).ok());
}

// Its threads repeat the access after growing pauses, and get SIGBUS in the end. The bytes stay.
TEST_F(PagerMarks, AnAccessOfABlockThatTheTrapNeverTakesEndsAndIsNotTriedAllTheTime) {
  Settings c = config();
  c.fault_timeout_ms = 30;
  start(c);
  std::byte* r = region(2);
  put(r, 7);
  put(r + kSmall, 8);
  evict(r, kSmall);
  trap->fail_fill(ENOENT, SIZE_MAX);
  EXPECT_TRUE(bus(r));
  EXPECT_EQ(trap->calls("fill refused"), vmem::pager::FailedBlocks::kRefusals + 1);
  trap->fail_fill(0, 0);
  EXPECT_EQ(get(r + kSmall), 8u);
  EXPECT_TRUE(vmem::test::eventually([&] { return !bus(r); }));
  EXPECT_EQ(get(r), 7u);
  EXPECT_TRUE(pager->sync(r, 2 * kSmall).ok());
}

// If the trap takes it later, the waiting threads are answered, also beside other requests.
TEST_F(PagerMarks, AnAccessOfABlockThatTheTrapTakesLaterIsAnswered) {
  start(config());
  std::byte* r = region(2);
  put(r, 7);
  evict(r, kSmall);
  trap->fail_fill(ENOENT, 5);
  auto first = getting(r);
  trap->until_called("fill refused", 1);
  auto second = getting(r + kPage);
  EXPECT_EQ(first.get(), 7u);
  EXPECT_EQ(second.get(), 0u);
  trap->fail_fill(ENOENT, 2);
  evict(r, kSmall);
  const vmem_range all = range(r, kSmall);
  auto third = getting(r);
  EXPECT_TRUE(pager->acquire({&all, 1}, VMEM_HOST, nullptr).ok());
  EXPECT_EQ(third.get(), 7u);
  EXPECT_TRUE(pager->release({&all, 1}, nullptr).ok());
}

// SIGBUS cannot be set either: the threads wait, and the next try follows after a pause.
TEST_F(PagerMarks, AnAccessThatTheTrapDoesNotFailWaitsWithPauses) {
  start(config());
  std::byte* r = region(2);
  put(r, 7);
  evict(r, kSmall);
  engine->fail(Io::Op::read, EIO);
  trap->refuse_fail(9);  // of the block once, and then of the block and of the page
  const auto begun = std::chrono::steady_clock::now();
  EXPECT_TRUE(bus(r));
  EXPECT_EQ(trap->calls("fail refused"), 9u);
  EXPECT_GE(std::chrono::steady_clock::now() - begun, std::chrono::milliseconds(1 + 2 + 4 + 8 + 16));
}

TEST_F(PagerMarks, ABlockThatTheTrapDoesNotTakeBackWhenThereIsMemoryIsTakenBackLater) {
  size_t n = 0;
  std::byte* const r = store_without_room(0, &n);
  ASSERT_LT(n, 16u);
  EXPECT_TRUE(bus(r + n * kHugePage)) << "there is no memory for it";
  trap->refuse_unfail(1);
  pager->tunables_update().set_space_budget(UINT64_MAX);
  trap->until_called("unfail refused", 1);
  EXPECT_TRUE(pager->evict(r, n * kHugePage, VMEM_SSD).ok());
  trap->until_called("unfail", 1);
  put(r + n * kHugePage, n + 1);
  for (size_t i = 0; i <= n; ++i) EXPECT_EQ(get(r + i * kHugePage), i + 1);
}

TEST_F(PagerMarks, OneBlockThatTheTrapDoesNotTakeBackKeepsNoOtherFromBeingTakenBack) {
  size_t n = 0;
  std::byte* const r = store_without_room(0, &n);
  ASSERT_LT(n, 14u);
  EXPECT_TRUE(bus(r + n * kHugePage)) << "there is no memory for it";
  EXPECT_TRUE(bus(r + (n + 1) * kHugePage)) << "nor for this";
  trap->refuse_unfail(1);  // the first of them
  pager->tunables_update().set_space_budget(UINT64_MAX);
  trap->until_called("unfail refused", 1);
  trap->until_called("unfail", 1);
  put(r + (n + 1) * kHugePage, n + 2);
  EXPECT_EQ(get(r + (n + 1) * kHugePage), n + 2);
}

TEST_F(PagerMarks, ATouchThatWaitsForMemoryIsAnsweredThoughTheTrapRefusedAtFirst) {
  size_t n = 0;
  std::byte* const r = store_without_room(3, &n);
  ASSERT_LT(n, 16u);
  EXPECT_EQ(trap->calls("fail refused"), 3u);
  EXPECT_EQ(pager->counters().lost_blocks, 0u);
  pager->tunables_update().set_space_budget(UINT64_MAX);
  trap->until_called("unfail", 1);
  for (size_t i = 0; i < n; ++i) EXPECT_EQ(get(r + i * kHugePage), i + 1);
}

TEST_F(PagerMarks, DontNeedLeavesABlockThatWasLeasedWhileItWaited) {
  start(config());
  std::byte* r = region(1);
  put(r, 7);
  Gate gate("evict.taken");  // a sync has isolated the block
  auto syncing = calling([&] { return pager->sync(r, kSmall); });
  gate.until_reached();
  auto dropping = calling([&] { return pager->advise(r, kSmall, VMEM_ADVISE_DONT_NEED, VMEM_HOST); });
  EXPECT_NE(dropping.wait_for(std::chrono::milliseconds(50)), std::future_status::ready);  // it has checked for leases
  const vmem_range all = range(r, kSmall, VMEM_READ | VMEM_WRITE);
  auto leasing = calling([&] { return pager->acquire({&all, 1}, VMEM_HOST, nullptr); });
  while (pager->counters().lease_blocks == 0) std::this_thread::yield();
  gate.open();
  EXPECT_TRUE(syncing.get().ok());
  EXPECT_TRUE(leasing.get().ok());
  EXPECT_EQ(dropping.get().code(), -EBUSY);
  EXPECT_EQ(get(r), 7u);
  put(r, 8);
  EXPECT_EQ(get(r), 8u);
  EXPECT_TRUE(pager->release({&all, 1}, nullptr).ok());
  EXPECT_TRUE(pager->advise(r, kSmall, VMEM_ADVISE_DONT_NEED, VMEM_HOST).ok());
  EXPECT_EQ(get(r), 0u);
}

TEST_F(PagerMarks, WhatALeaseChangedWhileFreeWroteIsWrittenToo) {
  start(config());
  std::byte* r = shared(2 * kSmall);
  put(r, 7);
  put(r + kSmall, 7);
  EXPECT_TRUE(pager->sync(r, 2 * kSmall).ok());
  put(r, 8);
  engine->hold(Io::Op::write, true);
  auto freeing = calling([&] { return pager->destroy(r, false); });
  engine->until_held(1);  // the second block equalled the file, and was skipped
  const vmem_range second = range(r + kSmall, kSmall, VMEM_READ | VMEM_WRITE);
  EXPECT_TRUE(pager->acquire({&second, 1}, VMEM_HOST, nullptr).ok());
  put(r + kSmall, 9);
  EXPECT_TRUE(pager->release({&second, 1}, nullptr).ok());
  engine->hold(Io::Op::write, false);
  engine->let_go();
  const Status s = freeing.get();
  EXPECT_TRUE(s.ok()) << s.text();
  EXPECT_EQ(in_file(0), 8u);
  EXPECT_EQ(in_file(kSmall), 9u);
}

TEST_F(PagerMarks, APathThatIsFullIsToldOf) {
  for (size_t block : {kSmall, kHugePage}) {
    start(config());
    std::byte* r = region(2, block);
    put(r, 7);
    engine->fail(Io::Op::write, EIO);
    EXPECT_EQ(pager->evict(r, block, VMEM_SSD).code(), -EIO);
    EXPECT_EQ(space->refused(), 0u);
    engine->fail(Io::Op::write, ENOSPC);
    EXPECT_EQ(pager->evict(r, block, VMEM_SSD).code(), -ENOSPC);
    EXPECT_EQ(space->refused(), 1u);
    engine->fail(Io::Op::write, 0);
    evict(r, block);
    EXPECT_EQ(get(r), 7u);
    EXPECT_EQ(space->extents(), 1u);
    TearDown();
    pager.reset();
  }
}

TEST_F(PagerMarks, ABlockWhoseOverwriteFailedIsWrittenElsewhere) {
  start(config());
  std::byte* r = region(2, kHugePage);
  put(r, 7);
  evict(r, kHugePage);
  put(r, 8);
  engine->fail(Io::Op::write, ENOSPC);
  EXPECT_EQ(pager->evict(r, kHugePage, VMEM_SSD).code(), -ENOSPC);
  EXPECT_EQ(space->extents(), 1u) << "the old place is kept";
  EXPECT_EQ(pager->evict(r, kHugePage, VMEM_SSD).code(), -ENOSPC);
  EXPECT_EQ(space->refused(), 1u) << "the second try was somewhere else";
  engine->fail(Io::Op::write, 0);
  evict(r, kHugePage);
  EXPECT_EQ(get(r), 8u);
  EXPECT_EQ(space->extents(), 1u);
}

}  // namespace
