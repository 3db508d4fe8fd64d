// The classes that begin transitions in host memory, on the classes below and on fakes: the store
// reader, read-ahead, the reclaim threads, and the fault handler. The last two run their threads.
#include <gtest/gtest.h>

#include <cerrno>
#include <vector>

#include "common/patience.h"
#include "edit_block.h"
#include "pager/host/readahead.h"
#include "pager/threads/fault_threads.h"
#include "pager/threads/reclaim_threads.h"
#include "pager_parts.h"
#include "store/digest.h"

namespace vmem::pager::test {
namespace {

using vmem::test::eventually;

class Services : public PagerParts {
 protected:
  void tunables_changed() override { ++told_of_tunables; }
  void TearDown() override {
    {
      BigLock lock(map.mutex());
      EXPECT_EQ(requests.check(), "");
      EXPECT_EQ(speculation.check(map.transitions().all()), "");
    }
    PagerParts::TearDown();
  }
  std::atomic<size_t> told_of_tunables = 0;
};

// ---- reads, and whether the bytes are those that were written

class PagerStoreReader : public Services, protected IoEnd {
 protected:
  void io_ended(Transition*) override { ++ended; }
  // Reads the block into `image`; the read has ended.
  void read_into(Region& r, BlockIndex b, Transition* m) {
    m->region = &r;
    m->block = b;
    m->image = reinterpret_cast<std::byte*>(image.data());
    m->io.transferred = r.block_size;
  }
  size_t ended = 0;
  std::vector<uint64_t> image = std::vector<uint64_t>(kBlock / sizeof(uint64_t), 5);
};

TEST_F(PagerStoreReader, WhatTheStoreHasNotIsReadFromTheFileWhereTheRegionBegins) {
  Region& r = region(4, Backing::file_private);
  r.source.id = 3;
  r.source.offset = 5 * core::kPage;
  Transition m;
  read_into(r, 2, &m);
  BigLock lock(map.mutex());
  reader.prepare_read(&m, Urgency::acquire, *this);
  EXPECT_EQ(m.io.op, store::Io::Op::read);
  EXPECT_EQ(m.io.file, 3u);
  EXPECT_EQ(m.io.offset, 5 * core::kPage + 2 * kBlock);
  EXPECT_EQ(m.io.size, kBlock);
  EXPECT_TRUE(m.io.short_read_is_zero) << "behind the end of the file are zeros";
  m.io.done(m.io);
  EXPECT_EQ(ended, 1u) << "who asked goes on with it";
}

TEST_F(PagerStoreReader, BytesWithAnotherDigestAreRefusedUnlessNobodyWantsThemVerified) {
  Region& r = region(1);
  Transition m;
  read_into(r, 0, &m);
  edit(r.table, 0).extent = core::Extent::make(0, 0, kBlock, 0);
  edit(r.table, 0).digest = store::digest(m.image, kBlock);
  reader.verify_read(&m);
  EXPECT_TRUE(m.status.ok());
  image[7] ^= 1;
  reader.verify_read(&m);
  EXPECT_EQ(m.status.code(), -EIO);
  EXPECT_EQ(counters.checksum_errors, 1u);
  m.status = {};
  reader.set_verify(false);
  reader.verify_read(&m);
  EXPECT_TRUE(m.status.ok());
  r.checksum = 1;
  reader.verify_read(&m);
  EXPECT_EQ(m.status.code(), -EIO) << "the region says otherwise";
  edit(r.table, 0).extent = {};
}

// Reads part by part: the image has each byte only after its part arrived.
class PagerStoreReaderInParts : public PagerStoreReader {
 protected:
  static constexpr size_t kStep = kBlock / 8;
  Region& stored(Backing backing = Backing::anonymous) {
    Region& r = region(1, backing);
    if (backing == Backing::anonymous) {
      for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 7 + i / kStep);
      edit(r.table, 0).extent = core::Extent::make(0, 0, kBlock, 0);
      edit(r.table, 0).digest = store::digest(bytes.data(), kBlock);
    }
    return r;
  }
  void begin(Region& r, Transition* m) {
    read_into(r, 0, m);
    std::fill(image.begin(), image.end(), 0x5a);
    BigLock lock(map.mutex());
    reader.prepare_read(m, Urgency::acquire, *this);
  }
  void come(Transition* m, size_t from, size_t to) {
    memcpy(m->image + from, bytes.data() + from, to - from);
    if (m->io.progress != nullptr && to < kBlock) m->io.progress(m->io, to);
  }
  void read(Region& r, Transition* m, size_t to = kBlock) {
    begin(r, m);
    for (size_t at = 0; at < to; at += kStep) come(m, at, at + kStep);
  }
  std::vector<std::byte> bytes = std::vector<std::byte>(kBlock);
};

TEST_F(PagerStoreReaderInParts, TheDigestIsThatOfTheWholeBlock) {
  Region& r = stored();
  Transition m;
  read(r, &m);
  EXPECT_EQ(m.read.digested, kBlock - kStep) << "the last part is left";
  reader.verify_read(&m);
  EXPECT_TRUE(m.status.ok()) << m.status.text();
  EXPECT_EQ(m.read.digester, nullptr);
  edit(r.table, 0).extent = {};
}

TEST_F(PagerStoreReaderInParts, AFlippedBitInAnyPartIsFound) {
  Region& r = stored();
  for (size_t at = 0; at < kBlock; at += kStep / 2) {
    bytes[at] ^= std::byte{16};
    Transition m;
    read(r, &m);
    reader.verify_read(&m);
    EXPECT_EQ(m.status.code(), -EIO) << at;
    bytes[at] ^= std::byte{16};
  }
  EXPECT_EQ(counters.checksum_errors, 16u);
  Transition m;
  read(r, &m);
  reader.verify_read(&m);
  EXPECT_TRUE(m.status.ok()) << "of what was read before nothing is left";
  edit(r.table, 0).extent = {};
}

TEST_F(PagerStoreReaderInParts, ReadsThatFailGiveBackWhatTheyTookAndBlocksWithoutAreDigestedAtTheEnd) {
  Region& r = stored();
  for (int n = 0; n < 100; ++n) {
    Transition m;
    read(r, &m, kBlock / 2);
    EXPECT_NE(m.read.digester, nullptr) << n;
    m.io.result = -EIO;
    reader.verify_read(&m);
    EXPECT_EQ(m.status.code(), -EIO);
  }
  std::array<Transition, 40> many;
  size_t without = 0;
  for (Transition& m : many) {
    read(r, &m);
    without += m.read.digester == nullptr;
  }
  EXPECT_GT(without, 0u);
  EXPECT_LT(without, many.size());
  for (Transition& m : many) {
    reader.verify_read(&m);
    EXPECT_TRUE(m.status.ok()) << m.status.text();
  }
  edit(r.table, 0).extent = {};
}

TEST_F(PagerStoreReaderInParts, AFileThatIsWrittenHasItsDigestTakenSo) {
  Region& r = stored(Backing::file_private);
  for (const size_t from_file : {kBlock, kBlock / 2 + 100}) {
    std::fill(bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(from_file), std::byte{3});
    std::fill(bytes.begin() + static_cast<ptrdiff_t>(from_file), bytes.end(), std::byte{});
    Transition m;
    read(r, &m, kBlock / 2);
    memcpy(m.image + kBlock / 2, bytes.data() + kBlock / 2, kBlock / 2);  // with the zeros beyond the end
    reader.verify_read(&m);
    EXPECT_TRUE(m.status.ok());
    EXPECT_EQ(m.digest, store::digest(bytes.data(), kBlock));
  }
}

TEST_F(PagerStoreReaderInParts, NobodyIsToldWhereNoDigestOfTheImageIsWanted) {
  Region& r = stored();
  Transition m;
  begin(r, &m);
  EXPECT_NE(m.io.progress, nullptr);
  r.checksum = -1;
  Transition unverified;
  begin(r, &unverified);
  EXPECT_EQ(unverified.io.progress, nullptr);
  r.checksum = 1;
  Transition coded;
  coded.coded = bytes.data();
  begin(r, &coded);
  EXPECT_EQ(coded.io.progress, nullptr) << "what comes is not the image";
  edit(r.table, 0).extent = {};
}

TEST_F(PagerStoreReader, AFileThatBecameShorterIsSaidAndAReadThatFailedToo) {
  Region& r = region(2, Backing::file_private);
  Transition m;
  read_into(r, 1, &m);
  m.io.transferred = core::kPage;
  reader.verify_read(&m);
  EXPECT_TRUE(m.cut);
  EXPECT_EQ(m.status.code(), -EIO);
  Transition bad;
  read_into(r, 0, &bad);
  bad.io.result = -ENXIO;
  reader.verify_read(&bad);
  EXPECT_FALSE(bad.cut);
  EXPECT_EQ(bad.status.code(), -ENXIO);
  EXPECT_EQ(counters.io_errors, 1u);
}

// ---- read-ahead

class PagerReadahead : public Services {
 protected:
  // Blocks that only the store has.
  void put_away(Region& r, BlockIndex first, BlockIndex last) {
    for (BlockIndex b = first; b <= last; ++b) Services::put_away(r, b, 100 + b);
  }
  void pump() {
    DeferredWork after;
    {
      BigLock lock(map.mutex());
      read_ahead.pump_speculative(after);
    }
    page_in.run(after);
    engine.until_idle();
  }
};

TEST_F(PagerReadahead, APrefetchIsReadAndCountsAsWorthItWhenItIsUsed) {
  Region& r = region(8);
  put_away(r, 0, 4);
  {
    BigLock lock(map.mutex());
    read_ahead.speculate(r, policy::Window{1, 1, 3, UINT64_MAX}, Urgency::prefetch);
  }
  pump();
  EXPECT_EQ(state(r, 0), State::stored);
  for (const BlockIndex b : {1, 2, 3}) EXPECT_EQ(state(r, b), State::resident);
  EXPECT_EQ(state(r, 4), State::stored);
  EXPECT_EQ(counters.prefetched_blocks, 3u);
  EXPECT_EQ(counters.prefetch_hits, 0u);
  BigLock lock(map.mutex());
  read_ahead.used(r, 3);
  EXPECT_EQ(counters.prefetch_hits, 3u) << "and those of its stream before it";
  read_ahead.used(r, 3);
  EXPECT_EQ(counters.prefetch_hits, 3u);
}

TEST_F(PagerReadahead, ZerosAreNotReadAheadForTheyAreMadeFaster) {
  Region& r = region(2);
  {
    BigLock lock(map.mutex());
    read_ahead.speculate(r, policy::Window{0, 1, 2, UINT64_MAX}, Urgency::prefetch);
  }
  pump();
  EXPECT_EQ(state(r, 0), State::unpopulated);
  EXPECT_EQ(counters.prefetched_blocks, 0u);
  EXPECT_TRUE(speculation.empty());
}

TEST_F(PagerReadahead, WithoutRoomNothingIsReadAheadAndWithRoomItGoesOn) {
  Region& r = region(4);
  put_away(r, 0, 1);
  uint64_t all = 0;
  {
    BigLock lock(map.mutex());
    all = budget.available();
    ASSERT_TRUE(budget.charge(all, 0));
    read_ahead.speculate(r, policy::Window{0, 1, 2, UINT64_MAX}, Urgency::prefetch);
  }
  pump();
  EXPECT_EQ(state(r, 0), State::stored);
  EXPECT_EQ(speculation.in_flight(), 0u);
  {
    BigLock lock(map.mutex());
    budget.credit(all);
  }
  pump();
  EXPECT_EQ(state(r, 0), State::resident);
  EXPECT_EQ(state(r, 1), State::resident);
}

// ---- eviction

class PagerReclaim : public Services {
 protected:
  void stop() {
    {
      BigLock lock(map.mutex());
      reclaimers.stop();
    }
    reclaimers.join();
  }
  ReclaimThreads reclaimers{ctx, host};
};

TEST_F(PagerReclaim, BlocksThatAreAskedToTheSsdLeaveButLeasedOnesStay) {
  Region& r = region(4);
  for (BlockIndex b = 0; b < 3; ++b) bring(r, b);
  put(r, 0, 7);
  {
    BigLock lock(map.mutex());
    ASSERT_TRUE(r.leases.prepare(1, 1, nullptr));
    r.leases.acquire(1, 1, VMEM_HOST, nullptr, VMEM_READ);
    map.match_hold(r, 1);
    ASSERT_TRUE(requests.add({&r, 0, 3}, false));
  }
  ASSERT_TRUE(reclaimers.start(1).ok());
  EXPECT_TRUE(eventually([&] { return state(r, 0) == State::stored && state(r, 2) == State::unpopulated; }));
  stop();
  EXPECT_EQ(state(r, 1), State::resident);
  EXPECT_TRUE(requests.empty());
}

TEST_F(PagerReclaim, WhoWaitsForMemoryGetsWhatOthersCanDoWithout) {
  Region& r = region(kBudget / kBlock + 8);
  BlockIndex last = 0;
  for (bool room = true; room; last += room ? 1 : 0) {
    {
      BigLock lock(map.mutex());
      room = budget.available() >= 8 * kBlock;
    }
    if (room) bring(r, last);
  }
  uint64_t rest = 0;
  {
    BigLock lock(map.mutex());
    rest = budget.available();
    ASSERT_TRUE(budget.charge(rest, 0));
    ASSERT_TRUE(waits.starve_fault(r, last));
    pressure.wake_all_reclaim();
  }
  ASSERT_TRUE(reclaimers.start(1).ok());
  EXPECT_TRUE(eventually([&] {
    BigLock lock(map.mutex());
    return budget.available() >= kBlock;
  }));
  stop();
  EXPECT_GT(counters.evictions, 0u);
  EXPECT_GE(freed, 1u) << "those above heard of it";
  BigLock lock(map.mutex());
  waits.queue().forget(r);
  budget.credit(rest);
}

TEST_F(PagerReclaim, WhatIsAskedAgainIsAskedOnceForABlockAtRestAndNotForOneThatMoves) {
  Region& r = region(2);
  bring(r, 0);
  BigLock lock(map.mutex());
  reclaim.evict_after_transition(r, 1);
  EXPECT_TRUE(requests.empty()) << "it is not in memory";
  reclaim.evict_after_transition(r, 0);
  ASSERT_FALSE(requests.empty());
  EXPECT_EQ(requests.first().span.first, 0u);
  requests.forget(r);
}

// ---- faults

class PagerFaultHandler : public Services {
 protected:
  void SetUp() override { ASSERT_TRUE(threads.start().ok()); }
  void TearDown() override {
    {
      BigLock lock(map.mutex());
      threads.stop_renewing();
    }
    threads.stop();
    Services::TearDown();
  }
  FaultThreads threads{ctx, host.faults};
};

TEST_F(PagerFaultHandler, ALoadOfABlockThatIsNotPresentSeesItsBytesAndAStoreStays) {
  Region& r = region(2);
  uint64_t value = 1;
  ASSERT_TRUE(trap.load(r.address(0), &value));
  EXPECT_EQ(value, 0u);
  EXPECT_TRUE(eventually([&] { return state(r, 0) == State::resident; })) << "the thread may go on before that";
  EXPECT_EQ(state(r, 1), State::unpopulated);
  ASSERT_TRUE(trap.store(r.address(1), 7));
  ASSERT_TRUE(trap.load(r.address(1), &value));
  EXPECT_EQ(value, 7u);
  EXPECT_TRUE(eventually([&] { return state(r, 1) == State::resident; }));
  EXPECT_EQ(flags(r, 1, core::kProtected), 0) << "it was brought to be stored to";
  EXPECT_EQ(counters.faults, 2u);
}

TEST_F(PagerFaultHandler, AFaultThatThereIsNoMemoryForIsMarkedAndWaits) {
  Region& r = region(1);
  BigLock lock(map.mutex());
  const uint64_t all = budget.available();
  ASSERT_TRUE(budget.charge(all, 0));
  lock.unlock();
  trap.report(r.base, trap::FaultKind::read);
  trap.until_quiet();
  lock.lock();
  EXPECT_TRUE(waits.queue().marked(r.table[0]));
  EXPECT_EQ(r.table[0].state, State::unpopulated);
  waits.queue().forget(r);
  edit(r.table, 0).flags = 0;
  budget.credit(all);
}

TEST_F(PagerFaultHandler, AReportOfAnAccessThatNobodyMakesAnyMoreChangesNothing) {
  Region& r = region(1);
  bring(r, 0);
  put(r, 0, 5);
  trap.report(r.base, trap::FaultKind::read);
  trap.until_quiet();
  EXPECT_EQ(state(r, 0), State::resident);
  uint64_t value = 0;
  ASSERT_TRUE(trap.load(r.base, &value));
  EXPECT_EQ(value, 5u);
}

TEST_F(PagerFaultHandler, WhatAnAdministratorChangedIsToldToThoseAbove) {
  trap.tell_tunables();
  EXPECT_EQ(told_of_tunables, 1u);
}

}  // namespace
}  // namespace vmem::pager::test
