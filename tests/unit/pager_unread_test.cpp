// Reads that the disk refuses. Waiting threads get SIGBUS, and later accesses read the block again.
// Until a read succeeds, calls that ask whether its bytes are safe report the error.
#include <chrono>

#include "common/patience.h"
#include "core/os_allocator.h"
#include "edit_block.h"
#include "pager_parts.h"
#include "pager_steps.h"

namespace vmem::pager::test {
namespace {

using core::kHugePage;
using core::State;
using core::Status;
using store::Io;

class PagerUnread : public PagerSteps {
 protected:
  // Returns blocks of values 7, 8, .. that only the SSD has.
  std::byte* on_ssd(size_t blocks, size_t size = kSmall) {
    start(config());
    std::byte* r = region(blocks, size);
    for (size_t i = 0; i < blocks; ++i) put(r + i * size, 7 + i);
    evict(r, blocks * size);
    return r;
  }
  Status acquire(std::byte* at, size_t size) {
    const vmem_range all = range(at, size);
    Status s = pager->acquire({&all, 1}, VMEM_HOST, nullptr);
    if (s.ok()) s = pager->release({&all, 1}, nullptr);
    return s;
  }
  // Repeats the access as a program whose SIGBUS handler returns: ten times a second at most.
  void read_seldom(std::byte* r) {
    const auto begun = std::chrono::steady_clock::now();
    const uint64_t before = engine->count(Io::Op::read);
    EXPECT_TRUE(vmem::test::eventually(
        [&] {
          for (int i = 0; i < 1000; ++i) EXPECT_TRUE(bus(r));
          return engine->count(Io::Op::read) - before >= 3;
        },
        std::chrono::seconds(20), std::chrono::milliseconds(0)));
    const uint64_t reads = engine->count(Io::Op::read) - before;
    const auto passed = std::chrono::steady_clock::now() - begun;
    EXPECT_LE(reads - 1, static_cast<uint64_t>(passed / std::chrono::nanoseconds(FailedBlocks::kSlice)));
  }
};

TEST_F(PagerUnread, ALaterAccessReadsAgain) {
  for (const size_t size : {kSmall, kHugePage}) {
    std::byte* r = on_ssd(2, size);
    engine->fail(Io::Op::read, EIO);
    EXPECT_TRUE(bus(r));
    engine->fail(Io::Op::read, 0);
    EXPECT_TRUE(vmem::test::eventually([&] { return !bus(r); })) << size;
    EXPECT_EQ(get(r), 7u);
    EXPECT_EQ(get(r + size), 8u);
    TearDown();
    pager.reset();
  }
}

TEST_F(PagerUnread, ALaterAccessOfAFileReadsAgain) {
  start(config());
  std::byte* r = shared(2 * kSmall);
  engine->fail(Io::Op::read, EIO);
  EXPECT_TRUE(bus(r));
  engine->fail(Io::Op::read, 0);
  EXPECT_TRUE(vmem::test::eventually([&] { return !bus(r); }));
  put(r, 7);
  EXPECT_TRUE(pager->sync(r, 2 * kSmall).ok());
  EXPECT_EQ(in_file(0), 7u);
}

TEST_F(PagerUnread, AnAccessThatIsMadeAgainAndAgainReadsTenTimesASecondAtMost) {
  std::byte* r = on_ssd(1);
  engine->fail(Io::Op::read, EIO);
  read_seldom(r);
}

// Each acquire read the block, and its failure must again be one that an access retries.
TEST_F(PagerUnread, SoItIsAfterAcquiresThatFailed) {
  std::byte* r = on_ssd(1);
  engine->fail(Io::Op::read, EIO);
  EXPECT_TRUE(bus(r));
  for (int i = 0; i < 100; ++i) EXPECT_EQ(acquire(r, kSmall).code(), -EIO);
  read_seldom(r);
}

TEST_F(PagerUnread, CallsSaySoUntilItHasBeenRead) {
  std::byte* r = on_ssd(2);
  engine->fail(Io::Op::read, EIO);
  EXPECT_TRUE(bus(r));
  engine->fail(Io::Op::read, 0);
  trap->until_called("unfail", 1);  // the next access would read it
  for (int i = 0; i < 2; ++i) {
    const Status s = pager->sync(r, 2 * kSmall);
    EXPECT_EQ(s.code(), -EIO);
    EXPECT_NE(s.text().find("region 1, block 0"), std::string_view::npos) << s.text();
    EXPECT_EQ(pager->evict(r, kSmall, VMEM_SSD).code(), -EIO);
    EXPECT_EQ(pager->evict(r, kSmall, VMEM_HOST).code(), -EIO);
  }
  EXPECT_TRUE(pager->sync(r + kSmall, kSmall).ok());
  EXPECT_EQ(get(r), 7u);
  EXPECT_TRUE(pager->sync(r, 2 * kSmall).ok());
  EXPECT_TRUE(pager->evict(r, 2 * kSmall, VMEM_SSD).ok());
}

TEST_F(PagerUnread, CallsSayNothingMoreWhenItsContentsWereDropped) {
  std::byte* r = on_ssd(1);
  engine->fail(Io::Op::read, EIO);
  EXPECT_TRUE(bus(r));
  trap->until_called("unfail", 1);
  EXPECT_TRUE(pager->advise(r, kSmall, VMEM_ADVISE_DONT_NEED, VMEM_HOST).ok());
  EXPECT_TRUE(pager->sync(r, kSmall).ok());
  EXPECT_EQ(get(r), 0u);
}

TEST_F(PagerUnread, AnAcquireReadsItAtOnce) {
  std::byte* r = on_ssd(1);
  engine->fail(Io::Op::read, EIO);
  EXPECT_TRUE(bus(r));
  EXPECT_EQ(acquire(r, kSmall).code(), -EIO);
  EXPECT_EQ(pager->sync(r, kSmall).code(), -EIO);
  engine->fail(Io::Op::read, 0);
  EXPECT_TRUE(acquire(r, kSmall).ok());
  EXPECT_TRUE(pager->sync(r, kSmall).ok());
  EXPECT_EQ(get(r), 7u);
}

// The bytes are not those that were written: that is not an error of the disk.
TEST_F(PagerUnread, WrongBytesAreNotReadAgainByAnAccess) {
  std::byte* r = on_ssd(2);
  engine->flip_stored_bits();
  EXPECT_TRUE(bus(r));
  engine->fail(Io::Op::read, EIO);
  EXPECT_TRUE(bus(r + kSmall));
  engine->fail(Io::Op::read, 0);
  engine->flip_stored_bits();
  trap->until_called("unfail", 1);  // of the one that came later
  EXPECT_EQ(get(r + kSmall), 8u);
  EXPECT_TRUE(bus(r));
  EXPECT_EQ(pager->sync(r, kSmall).code(), -EIO);
  EXPECT_TRUE(acquire(r, kSmall).ok());
  EXPECT_EQ(get(r), 7u);
  EXPECT_TRUE(pager->sync(r, 2 * kSmall).ok());
}

TEST_F(PagerUnread, WhatTheTrapDoesNotTakeBackIsTriedAgain) {
  std::byte* r = on_ssd(1);
  engine->fail(Io::Op::read, EIO);
  trap->refuse_unfail(2);
  EXPECT_TRUE(bus(r));
  engine->fail(Io::Op::read, 0);
  EXPECT_TRUE(vmem::test::eventually([&] { return !bus(r); }));
  EXPECT_EQ(trap->calls("unfail refused"), 2u);
  EXPECT_EQ(get(r), 7u);
}

TEST_F(PagerUnread, WhatTheTrapRefusedToFailIsReadAgain) {
  std::byte* r = on_ssd(1);
  engine->fail(Io::Op::read, EIO);
  trap->refuse_fail(2);
  EXPECT_TRUE(bus(r));
  engine->fail(Io::Op::read, 0);
  EXPECT_TRUE(vmem::test::eventually([&] { return !bus(r); }));
  EXPECT_EQ(get(r), 7u);
}

TEST_F(PagerUnread, ARegionMayGoMeanwhile) {
  std::byte* r = on_ssd(2);
  engine->fail(Io::Op::read, EIO);
  EXPECT_TRUE(bus(r));
  EXPECT_TRUE(bus(r + kSmall));
  EXPECT_TRUE(pager->destroy(r, false).ok());
}

class PagerUnreadParts : public PagerParts {
 protected:
  void refuse(Region& r, core::BlockIndex b) {
    DeferredWork after;
    {
      core::BigLock lock(map.mutex());
      ASSERT_TRUE(page_in.start_fill(r, b, core::Urgency::fault, after));
      edit(r.table, b).flags |= core::kFaultPending;
    }
    page_in.run(after);
    engine.until_idle();
    ASSERT_EQ(state(r, b), State::poisoned);
  }
};

TEST_F(PagerUnreadParts, WhereThereIsNoMemoryToKnowOneMoreTheOldestIsReadAgainSooner) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizer has it";
#endif
  Region& r = region(3);
  for (core::BlockIndex b = 0; b < 3; ++b) put_away(r, b, b + 1);
  {
    core::BigLock lock(map.mutex());
    ASSERT_TRUE(failed.reserve(2));
  }
  engine.fail(Io::Op::read, EIO);
  refuse(r, 0);
  refuse(r, 1);
  core::memory_hook.store([] { return true; });
  {
    core::BigLock lock(map.mutex());
    change(r.table, 2, State::stored, State::poisoned);
    failed.mark_unread(r, 2);
    failed.fail_accesses(r, 2);
  }
  core::memory_hook.store(nullptr);
  EXPECT_EQ(state(r, 0), State::stored);
  EXPECT_EQ(state(r, 1), State::poisoned);
  EXPECT_EQ(state(r, 2), State::poisoned);
  core::BigLock lock(map.mutex());
  EXPECT_EQ(r.counts.unread, 3u);
  const uint64_t due = failed.next_ns();
  EXPECT_FALSE(failed.ask_again(lock, due - 1)) << "not before its time";
  EXPECT_TRUE(failed.ask_again(lock, due));
  EXPECT_EQ(r.table[1].state, State::stored);
  EXPECT_TRUE(failed.ask_again(lock, failed.next_ns()));
  EXPECT_EQ(r.table[2].state, State::stored);
  EXPECT_EQ(failed.next_ns(), UINT64_MAX);
  edit(r.table, 2).flags &= static_cast<uint16_t>(~core::kUnread);
  EXPECT_NE(failed.check(), "") << "one is counted and is none";
  edit(r.table, 2).flags |= core::kUnread;
}

}  // namespace
}  // namespace vmem::pager::test
