// What many blocks do together, counted in calls: neighbours are protected, dropped, written and read by one, and
// frames of a region that is freed serve the next.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "pager_steps.h"

namespace {

using vmem::core::kHugePage;
using vmem::pager::Config;
using vmem::pager::test::kSmall;
using vmem::pager::test::PagerSteps;
using vmem::store::Io;

class PagerBatches : public PagerSteps {};

TEST_F(PagerBatches, NeighboursThatLeaveAreProtectedAndDroppedTogether) {
  start(config());
  constexpr size_t kBlocks = 16;
  std::byte* r = shared(kBlocks * kSmall);
  for (size_t i = 0; i < kBlocks; ++i) put(r + i * kSmall, i + 1);
  const size_t protects = trap->calls("protect");
  evict(r, kBlocks * kSmall);
  EXPECT_LE(trap->calls("protect") - protects, 2u) << "two turns of the walk at most";
  for (size_t i = 0; i < kBlocks; ++i) EXPECT_EQ(in_file(i * kSmall), i + 1);
  for (size_t i = 0; i < kBlocks; ++i) EXPECT_EQ(get(r + i * kSmall), i + 1);
  const size_t drops = trap->calls("drop of a range");
  evict(r, kBlocks * kSmall);  // unchanged
  EXPECT_LE(trap->calls("drop of a range") - drops, 2u);
  for (size_t i = 0; i < kBlocks; ++i) EXPECT_EQ(get(r + i * kSmall), i + 1);
}

TEST_F(PagerBatches, WhatLiesBetweenNeighboursIsLeftAlone) {
  start(config());
  std::byte* r = shared(16 * kSmall);
  for (size_t i : {2, 3, 4, 8, 9, 10}) put(r + i * kSmall, i + 1);
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

}  // namespace
