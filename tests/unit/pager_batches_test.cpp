// Work on many blocks, counted in calls: one call protects, drops, writes or reads neighbours, and
// frames of a freed region serve the next one.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "pager_steps.h"

namespace vmem::pager::test {
namespace {

class PagerBatches : public PagerSteps {};

TEST_F(PagerBatches, NeighboursThatLeaveAreProtectedAndDroppedTogether) {
  start(config());
  constexpr size_t kBlocks = 16;
  std::byte* r = shared(kBlocks * kSmall);
  for (size_t i = 0; i < kBlocks; ++i) put(r + i * kSmall, i + 1);
  engine->until_idle();  // the last block is in place, and the table says so
  const size_t protects = trap->calls("protect");
  evict(r, kBlocks * kSmall);
  EXPECT_EQ(trap->calls("protect") - protects, 1u);
  for (size_t i = 0; i < kBlocks; ++i) EXPECT_EQ(in_file(i * kSmall), i + 1);
  for (size_t i = 0; i < kBlocks; ++i) EXPECT_EQ(get(r + i * kSmall), i + 1);
  engine->until_idle();
  const size_t drops = trap->calls("drop of a range");
  evict(r, kBlocks * kSmall);  // unchanged
  EXPECT_EQ(trap->calls("drop of a range") - drops, 1u);
  for (size_t i = 0; i < kBlocks; ++i) EXPECT_EQ(get(r + i * kSmall), i + 1);
}

TEST_F(PagerBatches, WhatLiesBetweenNeighboursIsLeftAlone) {
  start(config());
  std::byte* r = shared(16 * kSmall);
  for (size_t i : {2, 3, 4, 8, 9, 10}) put(r + i * kSmall, i + 1);
  engine->until_idle();
  const size_t protects = trap->calls("protect");
  evict(r, 16 * kSmall);
  EXPECT_EQ(trap->calls("protect") - protects, 2u);
  for (size_t i : {2, 3, 4, 8, 9, 10}) EXPECT_EQ(get(r + i * kSmall), i + 1);
}

TEST_F(PagerBatches, ChangedBlocksOfAFileAreWrittenInTheOrderOfTheirAddresses) {
  start(config(8 << 20));
  constexpr size_t kBlocks = 256;
  std::byte* r = shared(kBlocks * kSmall);
  for (size_t i = kBlocks; i-- > 0;) put(r + i * kSmall, i + 1);
  ASSERT_TRUE(pager->sync(r, kBlocks * kSmall).ok());
  size_t together = 0;
  for (const auto& offsets : engine->asked(Io::Op::write)) {
    EXPECT_TRUE(std::is_sorted(offsets.begin(), offsets.end()));
    together = std::max(together, offsets.size());
  }
  EXPECT_GT(together, 1u);
  for (size_t i = 0; i < kBlocks; ++i) EXPECT_EQ(in_file(i * kSmall), i + 1);
}

TEST_F(PagerBatches, APrefetchAsksForManyBlocksAtATime) {
  start(config(256 << 20));
  constexpr size_t kBlocks = 256;
  std::byte* r = region(kBlocks);
  for (size_t i = 0; i < kBlocks; ++i) put(r + i * kSmall, i + 1);
  evict(r, kBlocks * kSmall);
  ASSERT_TRUE(pager->prefetch(r, kBlocks * kSmall, VMEM_HOST).ok());
  engine->until_count(Io::Op::read, kBlocks);
  EXPECT_LE(engine->asked(Io::Op::read).size(), kBlocks / 8);
  for (size_t i = 0; i < kBlocks; ++i) EXPECT_EQ(get(r + i * kSmall), i + 1);
}

TEST_F(PagerBatches, BlocksThatAreStoredToInTurnTrapOnceOrNotAtAll) {
  Settings c = config(64 << 20);
  c.readahead_bytes = 16 * kSmall;
  start(c);
  constexpr size_t kBlocks = 128;
  std::byte* r = shared(kBlocks * kSmall);
  const size_t unprotects = trap->calls("unprotect");
  for (size_t i = 0; i < kBlocks; ++i) {
    put(r + i * kSmall, i + 1);
    trap->until_quiet();
    engine->until_idle();
  }
  EXPECT_GT(pager->counters().prefetched_blocks, kBlocks / 2);
  EXPECT_LE(trap->calls("unprotect") - unprotects, 16u);
  evict(r, kBlocks * kSmall);
  EXPECT_EQ(pager->counters().prefetch_wasted, 0u) << "all of them were stored to";
  for (size_t i = 0; i < kBlocks; ++i) EXPECT_EQ(in_file(i * kSmall), i + 1);
}

TEST_F(PagerBatches, BlocksThatAreLoadedInTurnStayProtected) {
  Settings c = config(64 << 20);
  c.readahead_bytes = 16 * kSmall;
  start(c);
  constexpr size_t kBlocks = 64;
  std::byte* r = shared(kBlocks * kSmall);
  for (size_t i = 0; i < 8; ++i) put(r + i * kSmall, i + 1);
  for (size_t i = 0; i < kBlocks; ++i) {
    get(r + i * kSmall);
    trap->until_quiet();
    engine->until_idle();
  }
  evict(r, 8 * kSmall);
  const size_t protects = trap->calls("protect");
  evict(r + 48 * kSmall, 16 * kSmall);
  EXPECT_EQ(trap->calls("protect"), protects) << "what is protected leaves without a look at its bytes";
}

TEST_F(PagerBatches, FramesOfAFreedRegionServeTheNextOne) {
  Settings c = config(64 << 20);
  c.keep_ms = 1u << 30;
  start(c);
  constexpr size_t kBlocks = 8;
  std::byte* first = region(kBlocks, kHugePage);
  for (size_t i = 0; i < kBlocks; ++i) put(first + i * kHugePage, i + 1);
  ASSERT_TRUE(pager->destroy(first, false).ok());
  EXPECT_EQ(pager->check(), "");
  const uint64_t kept = stats().host_bytes;
  EXPECT_GE(kept, kBlocks * kHugePage);
  std::byte* second = region(kBlocks, kHugePage);
  for (size_t i = 0; i < kBlocks; ++i) EXPECT_EQ(get(second + i * kHugePage), 0u) << "and nothing of its contents";
  EXPECT_LT(stats().host_bytes, kept + kHugePage) << "no frame was asked for";
  EXPECT_EQ(trap->calls("release"), 0u);
}

TEST_F(PagerBatches, KeptFramesThatNobodyAsksForGoBack) {
  Settings c = config(64 << 20);
  c.keep_ms = 1;
  start(c);
  std::byte* r = region(8, kHugePage);
  for (size_t i = 0; i < 8; ++i) put(r + i * kHugePage, i + 1);
  ASSERT_TRUE(pager->destroy(r, false).ok());
  while (stats().host_bytes >= kHugePage) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(trap->calls("release"), 8u);
  EXPECT_EQ(pager->check(), "");
}

TEST_F(PagerBatches, AFrameThatIsPinnedWhenItsRegionGoesIsNotKept) {
  Settings c = config(64 << 20);
  c.keep_ms = 1u << 30;
  start(c);
  std::byte* r = region(4, kHugePage);
  for (size_t i = 0; i < 4; ++i) put(r + i * kHugePage, i + 1);
  trap->fail_take(EBUSY);
  ASSERT_TRUE(pager->destroy(r, false).ok());
  trap->fail_take(0);
  EXPECT_EQ(pager->check(), "");
  EXPECT_LT(stats().host_bytes, kHugePage);
}

}  // namespace
}  // namespace vmem::pager::test
