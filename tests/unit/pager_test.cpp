// The pager over a trap, an engine and a space in memory: tests force interleavings step by step.
#include "pager/pager.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <future>
#include <string>
#include <vector>

#include "common/patience.h"
#include "core/clock.h"
#include "core/log.h"
#include "pager_steps.h"

namespace vmem::pager::test {
namespace {

using trap::FaultKind;

TEST_F(PagerSteps, ABlockNeverWrittenReadsZeroWithoutIo) {
  start(config());
  std::byte* r = region(4);
  EXPECT_EQ(get(r + kSmall), 0u);
  EXPECT_EQ(engine->count(Io::Op::read), 0u);
  evict(r, 4 * kSmall);
  EXPECT_EQ(engine->count(Io::Op::write), 0u);
  EXPECT_EQ(space->used(), 0u);
}

TEST_F(PagerSteps, WhatIsEvictedComesBack) {
  for (size_t block : {kSmall, kHugePage}) {
    start(config());
    std::byte* r = region(2, block);
    put(r, 41);
    put(r + block - 8, 42);
    evict(r, 2 * block);
    EXPECT_EQ(ssd(r, 2 * block), block);
    EXPECT_EQ(get(r), 41u);
    EXPECT_EQ(get(r + block - 8), 42u);
    EXPECT_EQ(engine->count(Io::Op::read), 1u);
    TearDown();
    pager.reset();
  }
}

TEST_F(PagerSteps, TwoFaultsOnOneBlockAreOneRead) {
  start(config());
  std::byte* r = region(2);
  put(r, 7);
  evict(r, kSmall);
  engine->hold(Io::Op::read, true);
  auto first = getting(r);
  engine->until_held(1);
  auto second = getting(r), third = getting(r + 4096);
  trap->until_quiet();
  EXPECT_EQ(engine->held(), 1u);
  engine->let_go();
  EXPECT_EQ(first.get(), 7u);
  EXPECT_EQ(second.get(), 7u);
  EXPECT_EQ(third.get(), 0u);
  EXPECT_EQ(engine->count(Io::Op::read), 1u);
}

TEST_F(PagerSteps, AStoreThatMeetsTheProtectionBeforeTheInstallIsBookedIsAnswered) {
  start(config());
  std::byte* r = region(1);
  put(r, 7);
  evict(r, kSmall);
  Gate gate("install.after");  // the block is in place, protected, but the table still says mapping
  auto reader = getting(r);
  gate.until_reached();
  EXPECT_EQ(reader.get(), 7u);
  auto writer = putting(r, 8);
  // Its report is read while the state is mapping: only install() can answer it.
  while (trap->calls("unprotect") == 0 && writer.wait_for(std::chrono::milliseconds(5)) != std::future_status::ready) {
    trap->until_quiet();
    if (pager->counters().faults >= 1) break;
  }
  gate.open();
  writer.get();
  EXPECT_EQ(get(r), 8u);
  evict(r, kSmall);
  EXPECT_EQ(get(r), 8u) << "the store made the block dirty";
}

TEST_F(PagerSteps, AStoreWhileTheImageIsTakenWaitsAndIsNotLost) {
  start(config());
  std::byte* r = region(1);
  put(r, 7);
  Gate gate("evict.taken");  // write-protected, not hashed yet
  auto evicting = calling([&] { return pager->evict(r, kSmall, VMEM_SSD); });
  gate.until_reached();
  EXPECT_EQ(get(r), 7u) << "loads go on";
  auto writer = putting(r, 8);
  EXPECT_NE(writer.wait_for(std::chrono::milliseconds(20)), std::future_status::ready);
  trap->until_quiet();
  gate.open();
  EXPECT_TRUE(evicting.get().ok());
  writer.get();
  EXPECT_EQ(get(r), 8u);
  evict(r, kSmall);
  EXPECT_EQ(get(r), 8u);
}

TEST_F(PagerSteps, MemoryThatWasDroppedIsNeverCalledResident) {
  start(config());
  std::byte* r = region(1);
  put(r, 7);
  evict(r, kSmall);
  EXPECT_EQ(get(r), 7u);       // protected, equal to the store
  Gate gate("evict.decided");  // dropped already, but the table still says isolating
  auto evicting = calling([&] { return pager->evict(r, kSmall, VMEM_SSD); });
  gate.until_reached();
  ASSERT_GE(trap->calls("drop"), 1u);
  auto reader = getting(r);
  EXPECT_NE(reader.wait_for(std::chrono::milliseconds(20)), std::future_status::ready);
  trap->until_quiet();
  gate.open();
  EXPECT_TRUE(evicting.get().ok());
  EXPECT_EQ(reader.get(), 7u) << "read back, not taken from memory that was given away";
  EXPECT_EQ(engine->count(Io::Op::read), 2u);
}

TEST_F(PagerSteps, ABlockWantedWhileItIsWrittenStaysWithoutARead) {
  for (size_t block : {kSmall, kHugePage}) {
    start(config());
    std::byte* r = region(1, block);
    put(r, 7);
    engine->hold(Io::Op::write, true);
    auto evicting = calling([&] { return pager->evict(r, block, VMEM_SSD); });
    engine->until_held(1);
    auto writer = putting(r, 8);
    EXPECT_NE(writer.wait_for(std::chrono::milliseconds(20)), std::future_status::ready);
    trap->until_quiet();
    engine->hold(Io::Op::write, false);
    engine->let_go();
    EXPECT_TRUE(evicting.get().ok());
    writer.get();
    EXPECT_EQ(engine->count(Io::Op::read), 0u);
    EXPECT_EQ(get(r), 8u);
    evict(r, block);
    EXPECT_EQ(get(r), 8u) << "the store came after the image: it was written again";
    TearDown();
    pager.reset();
  }
}

TEST_F(PagerSteps, AWishBetweenTheLastLookAndTheDropIsReadBack) {
  start(config());
  std::byte* r = region(1);
  put(r, 7);
  // The access comes after finish_write() looked: as if while the memory was being dropped.
  engine->hold(Io::Op::write, true);
  auto evicting = calling([&] { return pager->evict(r, kSmall, VMEM_SSD); });
  engine->until_held(1);
  {
    Gate gate("evict.written");
    engine->let_go();
    gate.until_reached();
    engine->hold(Io::Op::write, false);
    gate.open();
    auto reader = getting(r);
    EXPECT_EQ(reader.get(), 7u);
  }
  EXPECT_TRUE(evicting.get().ok());
}

TEST_F(PagerSteps, AWriteThatFailsKeepsTheBlockAndTellsWhoAsked) {
  for (size_t block : {kSmall, kHugePage}) {
    start(config());
    std::byte* r = region(2, block);
    put(r, 7);
    engine->fail(Io::Op::write, ENOSPC);
    const Status s = pager->evict(r, 2 * block, VMEM_SSD);
    EXPECT_EQ(s.code(), -ENOSPC);
    EXPECT_NE(s.text().find("block 0"), std::string_view::npos) << s.text();
    EXPECT_EQ(pager->sync(r, 2 * block).code(), -ENOSPC) << "still not on the SSD";
    EXPECT_EQ(get(r), 7u);
    put(r, 8);
    EXPECT_EQ(engine->count(Io::Op::read), 0u) << "it never left";
    engine->until_count(Io::Op::write, 2);
    EXPECT_EQ(space->used(), 0u) << "the extent of the failed write came back";
    engine->fail(Io::Op::write, 0);
    EXPECT_TRUE(pager->sync(r, 2 * block).ok());
    evict(r, 2 * block);
    EXPECT_EQ(get(r), 8u);
    TearDown();
    pager.reset();
  }
}

TEST_F(PagerSteps, AFailedOverwriteOfAStoredBlockIsNotMistakenForACleanOne) {
  start(config());
  std::byte* r = region(1, kHugePage);
  put(r, 7);
  evict(r, kHugePage);
  EXPECT_EQ(get(r), 7u);
  put(r, 8);
  engine->fail(Io::Op::write, EIO);
  EXPECT_EQ(pager->evict(r, kHugePage, VMEM_SSD).code(), -EIO);
  put(r, 7);  // equals the store's bytes before the write that may have torn them
  engine->fail(Io::Op::write, 0);
  const uint64_t writes = engine->count(Io::Op::write);
  evict(r, kHugePage);
  EXPECT_EQ(engine->count(Io::Op::write), writes + 1) << "it is written again";
  EXPECT_EQ(get(r), 7u);
}

TEST_F(PagerSteps, ABackgroundFailureIsReportedByTheNextSyncOnce) {
  start(config());
  std::byte* r = region(16, kHugePage);
  std::byte* other = region(1);
  put(other, 1);
  EXPECT_TRUE(pager->sync(other, kSmall).ok());
  engine->fail(Io::Op::write, ENOSPC);
  for (size_t i = 0; i < 7; ++i) put(r + i * kHugePage, i + 100);
  engine->until_count(Io::Op::write, 2);
  engine->fail(Io::Op::write, 0);
  const Status told = pager->sync(other, kSmall);
  EXPECT_EQ(told.code(), -ENOSPC) << told.text();
  EXPECT_TRUE(pager->sync(other, kSmall).ok());
  for (size_t i = 0; i < 7; ++i) EXPECT_EQ(get(r + i * kHugePage), i + 100);
}

TEST_F(PagerSteps, NoRoomInTheStoreIsReportedAndMendsWhenThereIs) {
  start(config());
  std::byte* r = region(4);
  for (uint64_t i = 0; i < 4; ++i) put(r + i * kSmall, i + 1);
  space->set_budget(2 * kSmall);
  EXPECT_EQ(pager->evict(r, 4 * kSmall, VMEM_SSD).code(), -ENOSPC);
  EXPECT_EQ(ssd(r, 4 * kSmall), 2 * kSmall) << "what fits leaves";
  for (uint64_t i = 0; i < 4; ++i) EXPECT_EQ(get(r + i * kSmall), i + 1);
  pager->tunables_update().set_space_budget(UINT64_MAX);
  EXPECT_TRUE(pager->sync(r, 4 * kSmall).ok());
}

TEST_F(PagerSteps, ASmallBlockIsWrittenOverItsOldCopyWhereTheStoreIsFull) {
  start(config());
  std::byte* r = region(2);
  put(r, 1);
  put(r + kSmall, 2);
  evict(r, 2 * kSmall);
  EXPECT_EQ(get(r), 1u);
  space->set_budget(2 * kSmall);
  put(r, 8);
  EXPECT_TRUE(pager->sync(r, kSmall).ok());
  evict(r, kSmall);
  EXPECT_EQ(get(r), 8u);
  // Torn in the store, the block is still in memory, and must not count as clean.
  tear_and_take_back(r, kSmall, 8);
  EXPECT_EQ(get(r + kSmall), 2u);
  EXPECT_EQ(pager->counters().checksum_errors, 0u);
}

// The old copy's extent is as long as that copy; the new copy has another length.
TEST_F(PagerSteps, ACompressedBlockStaysInMemoryBesideItsOldCopyWhereTheStoreIsFull) {
  start(config());
  constexpr size_t kBlock = size_t{64} << 10;
  void* at = nullptr;
  RegionSpec what;
  what.size = what.block_size = kBlock;
  what.codec = store::Codec::lz4;
  ASSERT_TRUE(pager->create(what, &at).ok());
  put(at, 1);
  evict(at, kBlock);
  const uint64_t used = space->used();
  EXPECT_LT(used, kBlock) << "it shrank";
  space->set_budget(used);
  put(at, 8);
  EXPECT_EQ(pager->sync(at, kBlock).code(), -ENOSPC);
  EXPECT_EQ(pager->evict(at, kBlock, VMEM_SSD).code(), -ENOSPC);
  EXPECT_EQ(space->used(), used) << "the old copy stays until there is a new one";
  EXPECT_EQ(get(at), 8u);
  pager->tunables_update().set_space_budget(UINT64_MAX);
  evict(at, kBlock);
  EXPECT_EQ(get(at), 8u);
}

TEST_F(PagerSteps, WhatCanBeWrittenOverItsOldCopyDoesNotWaitForWhatFindsNoRoom) {
  Settings c = config();  // 4,096 blocks, less the memory of buffers
  c.fault_timeout_ms = 3000 * vmem::test::patience();
  start(c);
  constexpr size_t kStored = 2000, kAll = 4400, kBlock = core::kPage;
  std::byte* r = region(kAll, kBlock);
  for (size_t i = 0; i < kStored; ++i) put(r + i * kBlock, i + 1);
  evict(r, kStored * kBlock);
  engine->fill_disk(ENOSPC);
  for (size_t i = kStored; i < kAll; ++i) put(r + i * kBlock, i + 1);
  // Some of these must leave for others of them. The other blocks are older: their writes fail, 32
  // at a time, and then no write is tried for 640 ms.
  for (size_t i = 0; i < kStored; ++i) ASSERT_TRUE(trap->store(r + i * kBlock, i + 7)) << i;
  for (size_t i = 0; i < kAll; ++i) EXPECT_EQ(get(r + i * kBlock), i + (i < kStored ? 7 : 1)) << i;
}

TEST_F(PagerSteps, AFullStoreIsSaidOnceThoughOtherWritesSucceed) {
  start(config());
  static std::atomic<int> said;
  said = 0;
  core::set_log_sink(
      [](int, const char* line, void*) { said += std::string(line).find("is used up") != std::string::npos; }, nullptr);
  std::byte* r = region(8);
  for (uint64_t i = 0; i < 8; ++i) {
    put(r + i * kSmall, i + 1);
    space->set_budget(i * kSmall);
    EXPECT_EQ(pager->sync(r + i * kSmall, kSmall).code(), -ENOSPC);
    pager->tunables_update().set_space_budget(UINT64_MAX);
    EXPECT_TRUE(pager->sync(r + i * kSmall, kSmall).ok());
  }
  core::set_log_sink(nullptr, nullptr);
  EXPECT_EQ(said, 1);
}

TEST_F(PagerSteps, AFaultThatFindsNoMemoryFailsInTheEndAndRevivesWithTheStore) {
  Settings c = config();
  c.fault_timeout_ms = 30;
  start(c);
  std::byte* r = region(16, kHugePage);
  space->set_budget(0);
  size_t written = 0;
  for (; written < 16; ++written) {
    if (!trap->store(r + written * kHugePage, written + 100)) break;
  }
  ASSERT_GT(written, 4u) << "the budget holds some";
  ASSERT_LT(written, 16u) << "the store is full: some touch got SIGBUS";
  for (size_t i = 0; i < written; ++i) EXPECT_EQ(get(r + i * kHugePage), i + 100) << "what is in memory is untouched";
  pager->tunables_update().set_space_budget(UINT64_MAX);
  trap->until_called("unfail", 1);
  put(r + written * kHugePage, 1);
  for (size_t i = 0; i < written; ++i) EXPECT_EQ(get(r + i * kHugePage), i + 100);
  EXPECT_EQ(get(r + written * kHugePage), 1u);
}

TEST_F(PagerSteps, AFaultThatFailedForWantOfMemoryRevivesWhenMemoryIsFreed) {
  Settings c = config();
  c.fault_timeout_ms = 30;
  start(c);
  std::byte* full = region(16, kHugePage);
  std::byte* r = region(1, kHugePage);
  put(r, 77);
  evict(r, kHugePage);
  space->set_budget(0);
  size_t n = 0;
  while (n < 16 && trap->store(full + n * kHugePage, n + 1)) ++n;
  ASSERT_LT(n, 16u);
  ASSERT_TRUE(bus(r));
  EXPECT_TRUE(pager->destroy(full, false).ok());
  // The store is still full, but memory is not: the bytes must be readable again.
  trap->until_called("unfail", 1);
  EXPECT_EQ(get(r), 77u);
}

TEST_F(PagerSteps, AFaultIsNotFailedWhileWritesAreMerelySlow) {
  Settings c = config();
  c.fault_timeout_ms = 1000;
  start(c);
  std::byte* r = region(16, kHugePage);
  engine->hold(Io::Op::write, true);
  std::vector<std::future<void>> writers;
  for (size_t i = 0; i < 16; ++i) writers.push_back(putting(r + i * kHugePage, i + 100));
  engine->until_held(1);
  std::this_thread::sleep_for(std::chrono::seconds(3));  // three times the time-out of a wait without progress
  EXPECT_EQ(trap->calls("fail"), 0u);
  engine->hold(Io::Op::write, false);
  engine->let_go();
  for (auto& w : writers) w.get();
  for (size_t i = 0; i < 16; ++i) EXPECT_EQ(get(r + i * kHugePage), i + 100);
}

TEST_F(PagerSteps, AFaultAndAnAcquireOutlastAStopOfTheMachine) {
  const Settings c = config();  // has a time-out of a minute
  start(c);
  std::byte* r = region(16, kHugePage);
  space->set_budget(0);  // before the first store: no block leaves while the budget fills
  uint64_t n = 0;
  do {
    put(r + n * kHugePage, n + 100);
    ++n;
  } while (stats().host_bytes + kHugePage <= c.host_budget);
  auto toucher = std::async(std::launch::async, [&] { return trap->store(r + n * kHugePage, n + 100); });
  const auto leased_range = std::vector{range(r + (n + 1) * kHugePage, 1)};
  auto acquiring = calling([&] { return pager->acquire(leased_range, VMEM_HOST, nullptr); });
  // Each failed write is a round of the reclaim thread, which first checks for waits that are too
  // long.
  const auto rounds = [&](uint64_t count) {
    const uint64_t until = pager->counters().io_errors + count;
    while (pager->counters().io_errors < until) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  rounds(2);
  for (int stop = 0; stop < 3; ++stop) {
    core::clock_jumped_ns += uint64_t{3600} * 1000000000;
    rounds(2);
  }
  EXPECT_EQ(trap->calls("fail"), 0u);
  EXPECT_NE(acquiring.wait_for(std::chrono::milliseconds(0)), std::future_status::ready);
  pager->tunables_update().set_space_budget(UINT64_MAX);
  EXPECT_TRUE(toucher.get());
  const Status leased = acquiring.get();
  EXPECT_TRUE(leased.ok()) << leased.text();
  EXPECT_TRUE(pager->release(leased_range, nullptr).ok());
  for (uint64_t i = 0; i <= n; ++i) EXPECT_EQ(get(r + i * kHugePage), i + 100);
}

TEST_F(PagerSteps, AFaultIsNotGivenUpWhileOthersAreServed) {
  Settings c = config();
  // The time-out must exceed the time between two syncs of this thread, on a slow machine, too.
  const unsigned timeout_ms = 1000 * std::min(vmem::test::patience(), 5u);
  c.fault_timeout_ms = timeout_ms;
  start(c);
  std::byte* large = region(16, kHugePage);
  std::byte* small = region(1);
  put(small, 1);
  // It must stay in memory: once evicted it would wait for memory itself, and there would be no
  // progress.
  const vmem_range stays = range(small, kSmall);
  ASSERT_TRUE(pager->acquire({&stays, 1}, VMEM_HOST, nullptr).ok());
  space->set_budget(2 * kSmall);
  uint64_t n = 0;
  do {
    put(large + n * kHugePage, 101 + n);
    ++n;
  } while (stats().host_bytes + kHugePage <= c.host_budget);
  auto toucher = std::async(std::launch::async, [&] { return trap->store(large + n * kHugePage, 101 + n); });
  // The store has room for the small block only: for three times the time-out nothing else is
  // written.
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(3 * timeout_ms);
  for (uint64_t i = 0; std::chrono::steady_clock::now() < end && trap->calls("fail") == 0; ++i) {
    put(small, i);
    pager->sync(small, kSmall).ignore();  // may report a failed write of another block
  }
  EXPECT_EQ(trap->calls("fail"), 0u);
  pager->tunables_update().set_space_budget(UINT64_MAX);
  EXPECT_TRUE(toucher.get());
  EXPECT_TRUE(pager->release({&stays, 1}, nullptr).ok());
  for (uint64_t i = 0; i <= n; ++i) EXPECT_EQ(get(large + i * kHugePage), 101 + i);
}

TEST_F(PagerSteps, FreeWaitsForAReadInFlightAndItsToucherGetsSigbus) {
  start(config());
  std::byte* r = region(1);
  put(r, 7);
  evict(r, kSmall);
  engine->hold(Io::Op::read, true);
  auto toucher = std::async(std::launch::async, [&] { return bus(r); });
  engine->until_held(1);
  auto freeing = calling([&] { return pager->destroy(r, false); });
  EXPECT_NE(freeing.wait_for(std::chrono::milliseconds(20)), std::future_status::ready)
      << "the frame is still being written to";
  engine->let_go();
  EXPECT_TRUE(freeing.get().ok());
  toucher.get();  // the bytes or SIGBUS, but not a hang
  EXPECT_TRUE(bus(r));
  EXPECT_EQ(space->used(), 0u);
}

TEST_F(PagerSteps, AReadErrorFailsTheTouchAndLeasesNothing) {
  start(config());
  std::byte* r = region(3);
  for (uint64_t i = 0; i < 3; ++i) put(r + i * kSmall, i + 1);
  evict(r, 3 * kSmall);
  EXPECT_EQ(get(r), 1u);
  engine->fail(Io::Op::read, EIO);
  const vmem_range all = range(r, 3 * kSmall);
  const Status s = pager->acquire({&all, 1}, VMEM_HOST, nullptr);
  EXPECT_EQ(s.code(), -EIO);
  EXPECT_NE(s.text().find("path fake, offset"), std::string_view::npos) << s.text();
  EXPECT_EQ(pager->release({&all, 1}, nullptr).code(), -EINVAL) << "nothing is leased";
  const vmem_range first = range(r, kSmall);
  EXPECT_EQ(pager->release({&first, 1}, nullptr).code(), -EINVAL);
  EXPECT_TRUE(bus(r + kSmall) || bus(r + 2 * kSmall));
  EXPECT_EQ(get(r), 1u);
  engine->fail(Io::Op::read, 0);
  EXPECT_TRUE(pager->acquire({&all, 1}, VMEM_HOST, nullptr).ok()) << "the disk recovered";
  for (uint64_t i = 0; i < 3; ++i) EXPECT_EQ(get(r + i * kSmall), i + 1);
  EXPECT_TRUE(pager->release({&all, 1}, nullptr).ok());
}

TEST_F(PagerSteps, AFailedReadAheadHarmsNobodyWhoDidNotAsk) {
  start(config());
  std::byte* r = region(2);
  put(r, 7);
  evict(r, kSmall);
  engine->fail(Io::Op::read, EIO);
  EXPECT_TRUE(pager->prefetch(r, kSmall, VMEM_HOST).ok());
  engine->until_count(Io::Op::read, 1);
  engine->fail(Io::Op::read, 0);
  EXPECT_EQ(get(r), 7u) << "a touch reads for itself";
}

TEST_F(PagerSteps, WrongBytesFromTheStoreAreNeverShown) {
  for (size_t block : {kSmall, kHugePage}) {
    start(config());
    std::byte* r = region(1, block);
    put(r, 7);
    evict(r, block);
    engine->flip_stored_bits();
    EXPECT_TRUE(bus(r));
    EXPECT_EQ(pager->counters().checksum_errors, 1u);
    engine->flip_stored_bits();
    const vmem_range all = range(r, block);
    EXPECT_TRUE(pager->acquire({&all, 1}, VMEM_HOST, nullptr).ok());
    EXPECT_EQ(get(r), 7u);
    EXPECT_TRUE(pager->release({&all, 1}, nullptr).ok());
    TearDown();
    pager.reset();
  }
}

TEST_F(PagerSteps, ACompressedBlockThatIsCopiedHasBothItsBuffersHoweverSmallTheBudget) {
  Settings c = config(16 << 20);  // an eighth of it is one buffer
  c.allow_move = false;
  start(c);
  void* at = nullptr;
  RegionSpec what;
  what.size = what.block_size = kHugePage;
  what.codec = store::Codec::lz4;
  ASSERT_TRUE(pager->create(what, &at).ok());
  put(at, 7);
  evict(at, kHugePage);
  EXPECT_LT(space->used(), kHugePage) << "it shrank";
  EXPECT_EQ(get(at), 7u);
}

TEST_F(PagerSteps, ZerosNeedNoRoom) {
  for (size_t block : {kSmall, kHugePage}) {
    start(config());
    std::byte* r = region(1, block);
    put(r, 7);
    evict(r, block);
    EXPECT_EQ(space->used(), block);
    put(r, 0);
    evict(r, block);
    EXPECT_EQ(space->used(), 0u);
    EXPECT_EQ(ssd(r, block), 0u);
    const uint64_t reads = engine->count(Io::Op::read);
    EXPECT_EQ(get(r), 0u);
    EXPECT_EQ(engine->count(Io::Op::read), reads);
    TearDown();
    pager.reset();
  }
}

TEST_F(PagerSteps, SyncKeepsBlocksInPlaceAndASecondOneWritesNothing) {
  for (size_t block : {kSmall, kHugePage}) {
    start(config());
    std::byte* r = region(2, block);
    put(r, 7);
    put(r + block, 8);
    EXPECT_TRUE(pager->sync(r, 2 * block).ok());
    EXPECT_EQ(engine->count(Io::Op::write), 2u);
    EXPECT_EQ(trap->calls("take"), 0u);
    EXPECT_TRUE(pager->sync(r, 2 * block).ok());
    EXPECT_EQ(engine->count(Io::Op::write), 2u);
    put(r, 9);
    EXPECT_TRUE(pager->sync(r, 2 * block).ok());
    EXPECT_EQ(engine->count(Io::Op::write), 3u);
    evict(r, 2 * block);
    EXPECT_EQ(engine->count(Io::Op::write), 3u) << "equal to the store: dropped";
    EXPECT_EQ(get(r), 9u);
    EXPECT_EQ(get(r + block), 8u);
    TearDown();
    pager.reset();
  }
}

TEST_F(PagerSteps, APinnedBlockStaysAndTheProcessGoesOn) {
  start(config());
  std::byte* r = region(2, kHugePage);
  put(r, 7);
  trap->fail_take(EBUSY);
  EXPECT_EQ(pager->evict(r, kHugePage, VMEM_SSD).code(), -EBUSY);
  EXPECT_EQ(get(r), 7u);
  trap->fail_take(0);
  evict(r, kHugePage);
  EXPECT_EQ(get(r), 7u);
}

TEST_F(PagerSteps, AStreamPassesAMarkerAndFindsTheNextWindowRead) {
  Settings c = config(64 << 20);
  c.readahead_bytes = 8 * kSmall;
  start(c);
  constexpr size_t kBlocks = 64;
  std::byte* r = region(kBlocks);
  for (uint64_t i = 0; i < kBlocks; ++i) put(r + i * kSmall, i + 1);
  evict(r, kBlocks * kSmall);
  const uint64_t faults = pager->counters().faults;
  for (uint64_t i = 0; i < kBlocks; ++i) {
    ASSERT_EQ(get(r + i * kSmall), i + 1);
    trap->until_quiet();
    engine->until_idle();
  }
  EXPECT_EQ(engine->count(Io::Op::read), kBlocks) << "each block was read once";
  EXPECT_GT(pager->counters().prefetch_hits, kBlocks / 2);
  EXPECT_LT(pager->counters().faults - faults, kBlocks / 2);
}

TEST_F(PagerSteps, AMarkerIsHeldOutOfSightUntilItIsTouched) {
  Settings c = config(64 << 20);
  c.readahead_bytes = 8 * kHugePage;
  start(c);
  constexpr size_t kBlocks = 16;
  std::byte* r = region(kBlocks, kHugePage);
  for (uint64_t i = 0; i < kBlocks; ++i) put(r + i * kHugePage, i + 1);
  evict(r, kBlocks * kHugePage);
  for (uint64_t i = 0; i < kBlocks; ++i) {
    ASSERT_EQ(get(r + i * kHugePage), i + 1);
    trap->until_quiet();
    engine->until_idle();
  }
  EXPECT_GT(pager->counters().soft_faults, 0u) << "a held block's touch is noticed and costs no read";
  EXPECT_EQ(engine->count(Io::Op::read), kBlocks);
}

TEST_F(PagerSteps, AStaleReportOfAFaultChangesNothing) {
  start(config());
  std::byte* r = region(2);
  put(r, 7);
  trap->report(r, FaultKind::write);
  trap->report(r + kSmall, FaultKind::read);
  trap->report(r, FaultKind::write_protect);
  trap->until_quiet();
  EXPECT_EQ(get(r), 7u);
  evict(r, 2 * kSmall);
  trap->report(r, FaultKind::write_protect);
  trap->until_quiet();
  EXPECT_EQ(get(r), 7u);
  EXPECT_EQ(get(r + kSmall), 0u);
  EXPECT_TRUE(pager->destroy(r, false).ok());
  trap->report(r, FaultKind::read);
  trap->until_quiet();
}

TEST_F(PagerSteps, DroppedContentsAreGoneFromMemoryStoreAndView) {
  for (size_t block : {kSmall, kHugePage}) {
    start(config());
    std::byte* r = region(3, block);
    for (uint64_t i = 0; i < 3; ++i) put(r + i * block, i + 1);
    evict(r, block);
    EXPECT_TRUE(pager->advise(r, 2 * block, VMEM_ADVISE_DONT_NEED, VMEM_HOST).ok());
    EXPECT_EQ(space->used(), 0u);
    EXPECT_EQ(get(r), 0u);
    EXPECT_EQ(get(r + block), 0u);
    EXPECT_EQ(get(r + 2 * block), 3u);
    TearDown();
    pager.reset();
  }
}

TEST_F(PagerSteps, ContentsDroppedWhileAFaultWaitsForMemoryAreGone) {
  start(config());
  std::byte* full = region(16, kHugePage);
  std::byte* r = region(1, kHugePage);
  put(r, 77);
  evict(r, kHugePage);
  space->set_budget(0);
  size_t n = 0;
  std::vector<std::future<void>> writers;
  for (; n < 16; ++n) writers.push_back(putting(full + n * kHugePage, n + 1));
  auto reader = getting(r);
  trap->until_quiet();
  const Status s = pager->advise(r, kHugePage, VMEM_ADVISE_DONT_NEED, VMEM_HOST);
  EXPECT_TRUE(s.ok()) << s.text();
  const uint64_t reads = engine->count(Io::Op::read);
  pager->tunables_update().set_space_budget(UINT64_MAX);
  for (auto& w : writers) w.get();
  reader.get();  // before or after the drop: either value
  EXPECT_EQ(get(r), 0u) << "the drop was acknowledged";
  EXPECT_EQ(engine->count(Io::Op::read), reads);
}

TEST_F(PagerSteps, MemoryStaysWithinTheBudgetUnderManyThreads) {
  for (size_t block : {kSmall, kHugePage}) {
    start(config());
    const size_t blocks = (64 << 20) / block;
    std::byte* r = region(blocks, block);
    std::vector<std::thread> threads;
    std::atomic<uint64_t> wrong{0};
    for (uint64_t t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        for (uint64_t round = 0; round < 2; ++round) {
          for (size_t i = t; i < blocks; i += 4) {
            std::byte* at = r + i * block;
            if (round == 1 && get(at) != i + 1) ++wrong;
            if (round == 0) put(at, i + 1);
          }
        }
      });
    }
    for (std::thread& t : threads) t.join();
    EXPECT_EQ(wrong, 0u);
    EXPECT_LE(stats().host_bytes, stats().host_budget);
    TearDown();
    pager.reset();
  }
}

}  // namespace
}  // namespace vmem::pager::test
