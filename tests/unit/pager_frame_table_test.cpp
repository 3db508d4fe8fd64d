// The ids of blocks in memory: each is free or a block's, and a block that was read ahead counts as
// such until it is used.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "pager/block/frame_table.h"

namespace vmem::pager::test {
namespace {

class PagerFrameTable : public ::testing::Test {
 protected:
  PagerFrameTable() {
    small.block_size = 4096;
    large.block_size = 2 << 20;
  }
  Region small{16, 4}, large{16, 4};
  FrameTable all;
};

TEST_F(PagerFrameTable, GrowByAStepAndKeepWhatIsThere) {
  EXPECT_EQ(all.size(), 0u);
  EXPECT_EQ(all.check(), "");
  all.grow();
  EXPECT_EQ(all.size(), FrameTable::kStep);
  EXPECT_EQ(all.free(), FrameTable::kStep);
  std::byte frame{};
  const FrameId id = all.take(small, 7, &frame, kStagingPools);
  const Frame* const at = &all[id];
  all.grow();
  EXPECT_EQ(all.free(), 2 * FrameTable::kStep - 1);
  EXPECT_EQ(all.used(), 1u);
  EXPECT_EQ(&all[id], at) << "references stay good";
  EXPECT_EQ(at->region, &small);
  EXPECT_EQ(at->block, 7u);
  EXPECT_EQ(at->bytes, &frame);
  EXPECT_EQ(at->pool, kStagingPools);
  EXPECT_EQ(all.check(), "");
}

TEST_F(PagerFrameTable, EachNumberIsTakenOnceAndComesBackEmpty) {
  all.grow();
  std::set<FrameId> taken;
  for (size_t i = 0; i < FrameTable::kStep; ++i) {
    const FrameId id = all.take(small, i, nullptr, kHostPool);
    EXPECT_LT(id, FrameTable::kStep);
    EXPECT_TRUE(taken.insert(id).second) << id;
  }
  EXPECT_EQ(all.free(), 0u);
  EXPECT_EQ(all.check(), "");
  Frame& one = all[5];
  one.shadow = 3;
  one.evict_when_stable = one.in_place = true;
  one.dev.copy = 9;
  all.give(5);
  EXPECT_EQ(all.free(), 1u);
  ASSERT_EQ(all.take(large, 1, nullptr, kHostPool), 5u);
  EXPECT_EQ(one.region, &large);
  EXPECT_EQ(one.shadow, 0u);
  EXPECT_FALSE(one.evict_when_stable || one.in_place);
  EXPECT_EQ(one.dev.copy, kNoFrame);
}

TEST_F(PagerFrameTable, WhatWasReadAheadIsCountedUntilItIsUsedOrLeaves) {
  all.grow();
  const FrameId a = all.take(small, 1, nullptr, kHostPool), b = all.take(large, 1, nullptr, kHostPool);
  all.seen(all[a]);
  EXPECT_EQ(all.ahead_bytes(), 0u) << "somebody asked for it";
  all.read_ahead(all[a]);
  all.read_ahead(all[a]);
  all.read_ahead(all[b]);
  EXPECT_EQ(all.ahead_bytes(), 4096u + (2 << 20));
  EXPECT_EQ(all.check(), "");
  all.seen(all[b]);
  all.seen(all[b]);
  EXPECT_EQ(all.ahead_bytes(), 4096u);
  all.give(a);
  EXPECT_EQ(all.ahead_bytes(), 0u);
  EXPECT_EQ(all.check(), "");
}

TEST_F(PagerFrameTable, TheCheckSeesWhatWasChangedBehindItsBack) {
  all.grow();
  const FrameId a = all.take(small, 1, nullptr, kHostPool);
  all[a].ahead = true;
  EXPECT_EQ(all.check(), "bytes that were read ahead and frames disagree");
  all[a].ahead = false;
  EXPECT_EQ(all.check(), "");
  all[a].region = nullptr;
  EXPECT_EQ(all.check(), "a number is not free, and names no block");
  all[a].region = &small;
  all.give(a);
  all[a].region = &small;
  EXPECT_EQ(all.check(), "a number that is free names a block");
  all[a].region = nullptr;
  all[a].dev.copy = a;
  EXPECT_EQ(all.check(), "more numbers are free than are counted");
}

TEST_F(PagerFrameTable, NothingIsLostInALongMix) {
  std::mt19937 random(7);
  std::vector<FrameId> mine;
  for (int n = 0; n < 20000; ++n) {
    if (random() % 2 == 0 || mine.empty()) {
      if (all.free() == 0) all.grow();
      mine.push_back(all.take(random() % 2 == 0 ? small : large, random() % 16, nullptr, kHostPool));
      if (random() % 3 == 0) all.read_ahead(all[mine.back()]);
    } else {
      std::swap(mine[random() % mine.size()], mine.back());
      all.give(mine.back());
      mine.pop_back();
    }
    ASSERT_EQ(all.used(), mine.size());
    if (n % 1000 == 0) {
      ASSERT_EQ(all.check(), "") << n;
    }
  }
  for (const FrameId id : mine) all.give(id);
  EXPECT_EQ(all.used(), 0u);
  EXPECT_EQ(all.ahead_bytes(), 0u);
  EXPECT_EQ(all.check(), "");
}

}  // namespace
}  // namespace vmem::pager::test
