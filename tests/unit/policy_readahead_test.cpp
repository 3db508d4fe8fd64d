#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <vector>

#include "policy/readahead.h"

namespace vmem::policy {
namespace {

using core::BlockIndex;

// A pager without limits: requested blocks are present at once; absent blocks trap, and markers
// trap once.
class Reader {
 public:
  Reader(uint64_t blocks, uint32_t max) : blocks_(blocks), readahead(blocks, max) {}

  void touch(BlockIndex b) {
    const bool marker = markers_.erase(b) != 0;
    if (unread_.erase(b) != 0) ++hits;
    if (present_.count(b) != 0 && !marker) return;
    if (!marker) ++misses;
    present_.insert(b);
    last = readahead.on_fault(b, marker);
    if (!last) return;
    ASSERT_GT(last->count, 0u);
    largest = std::max(largest, last->count);
    bool has_marker = false;
    for (uint32_t i = 0; i < last->count; ++i) {
      const int64_t at = static_cast<int64_t>(last->first) + static_cast<int64_t>(i) * last->stride;
      ASSERT_GE(at, 0);
      ASSERT_LT(at, static_cast<int64_t>(blocks_));
      ASSERT_NE(at, static_cast<int64_t>(b)) << "the window contains the block that faulted";
      has_marker |= static_cast<BlockIndex>(at) == last->marker;
      if (present_.insert(static_cast<BlockIndex>(at)).second) {
        ++asked;
        unread_.insert(static_cast<BlockIndex>(at));
        if (static_cast<BlockIndex>(at) == last->marker) markers_.insert(last->marker);
      }
    }
    ASSERT_TRUE(has_marker);
  }
  uint64_t waste() const { return unread_.size(); }

 private:
  uint64_t blocks_;
  std::set<BlockIndex> present_, unread_, markers_;

 public:
  ReadAhead readahead;
  std::optional<Window> last;
  uint64_t hits = 0, misses = 0, asked = 0;
  uint32_t largest = 0;
};

TEST(PolicyReadAhead, SequentialForwardMissesOnlyAtTheStart) {
  Reader r(1000, 32);
  for (BlockIndex b = 0; b < 1000; ++b) r.touch(b);
  EXPECT_EQ(r.misses, 2u);
  EXPECT_EQ(r.hits, 998u);
  EXPECT_EQ(r.largest, 32u);
  EXPECT_EQ(r.waste(), 0u);
}

TEST(PolicyReadAhead, SequentialBackwardMissesOnlyAtTheStart) {
  Reader r(1000, 32);
  for (BlockIndex b = 1000; b-- > 0;) r.touch(b);
  EXPECT_EQ(r.misses, 2u);
  EXPECT_EQ(r.waste(), 0u);
}

TEST(PolicyReadAhead, WindowStartsSmallAndDoubles) {
  ReadAhead ra(1000, 32);
  EXPECT_FALSE(ra.on_fault(10, false));
  auto w = ra.on_fault(11, false);
  ASSERT_TRUE(w);
  EXPECT_EQ(w->first, 12u);
  for (const uint32_t size : {4u, 8u, 16u, 32u, 32u}) {
    ASSERT_TRUE(w);
    EXPECT_EQ(w->count, size);
    EXPECT_EQ(w->stride, 1);
    w = ra.on_fault(w->marker, true);
  }
}

TEST(PolicyReadAhead, NextWindowIsAskedForWhileThreeQuartersAreUnread) {
  ReadAhead ra(10000, 32);
  ra.on_fault(0, false);
  auto w = ra.on_fault(1, false);
  for (int i = 0; i < 10; ++i) {
    const BlockIndex end = w->first + w->count;
    const BlockIndex marker = w->marker;
    EXPECT_GE((end - marker) * 4, uint64_t{w->count} * 3);
    w = ra.on_fault(marker, true);
    ASSERT_TRUE(w);
    EXPECT_EQ(w->first, end) << "no gap, no overlap";
  }
}

TEST(PolicyReadAhead, StridesAreFollowed) {
  for (const int64_t stride : {2, 7, 100, -3}) {
    Reader r(20000, 16);
    const int64_t from = stride > 0 ? 5 : 19990;
    uint64_t touches = 0;
    for (int64_t b = from; b >= 0 && b < 20000 && touches < 150; b += stride, ++touches) {
      r.touch(static_cast<BlockIndex>(b));
    }
    EXPECT_EQ(r.misses, 4u) << stride;
    EXPECT_LE(r.waste(), 32u) << stride;
  }
}

TEST(PolicyReadAhead, EightInterleavedStreams) {
  Reader r(8000, 32);
  for (BlockIndex i = 0; i < 1000; ++i) {
    for (BlockIndex s = 0; s < 8; ++s) r.touch(s % 2 == 0 ? s * 1000 + i : s * 1000 + 999 - i);
  }
  EXPECT_LE(r.misses, 8u * 3);
  EXPECT_LE(r.waste(), 8u * 4);
}

TEST(PolicyReadAhead, EightInterleavedStridedStreams) {
  Reader r(80000, 32);
  for (BlockIndex i = 0; i < 200; ++i) {
    for (BlockIndex s = 0; s < 8; ++s) r.touch(s * 10000 + i * (5 + s));
  }
  EXPECT_LE(r.misses, 8u * 8);
}

TEST(PolicyReadAhead, RandomAccessReadsAlmostNothing) {
  for (const uint64_t blocks : {1000, 10000, 1000000}) {
    std::mt19937_64 random(1);
    ReadAhead ra(blocks, 32);
    uint64_t asked = 0;
    uint32_t largest = 0;
    for (int i = 0; i < 20000; ++i) {
      if (const auto w = ra.on_fault(random() % blocks, false)) {
        asked += w->count;
        largest = std::max(largest, w->count);
      }
    }
    EXPECT_LE(asked, 20000u / 50) << blocks;
    EXPECT_LE(largest, 8u) << blocks;
  }
}

TEST(PolicyReadAhead, RandomNoiseDoesNotBreakAStream) {
  Reader r(100000, 32);
  std::mt19937_64 random(2);
  for (BlockIndex b = 0; b < 2000; ++b) {
    r.touch(b);
    r.touch(50000 + random() % 50000);
  }
  EXPECT_GE(r.hits, 1990u);
}

TEST(PolicyReadAhead, AdviceSequentialStartsAtTheFullWindow) {
  ReadAhead ra(1000, 32);
  ra.set_access(Access::sequential);
  const auto w = ra.on_fault(100, false);
  ASSERT_TRUE(w);
  EXPECT_EQ(w->first, 101u);
  EXPECT_EQ(w->count, 32u);
}

TEST(PolicyReadAhead, AdviceSequentialTurnsAroundForABackwardReader) {
  ReadAhead ra(1000, 32);
  ra.set_access(Access::sequential);
  ra.on_fault(500, false);
  const auto w = ra.on_fault(499, false);
  ASSERT_TRUE(w);
  EXPECT_EQ(w->first, 498u);
  EXPECT_EQ(w->stride, -1);
  EXPECT_EQ(w->count, 32u);
}

TEST(PolicyReadAhead, AdviceRandomAndSizeZeroTurnItOff) {
  Reader random(1000, 32), off(1000, 0);
  random.readahead.set_access(Access::random);
  for (BlockIndex b = 0; b < 1000; ++b) {
    random.touch(b);
    off.touch(b);
  }
  EXPECT_EQ(random.asked, 0u);
  EXPECT_EQ(off.asked, 0u);
}

TEST(PolicyReadAhead, SmallestWindowsWork) {
  for (const uint32_t max : {1u, 2u, 3u}) {
    Reader r(500, max);
    for (BlockIndex b = 0; b < 500; ++b) r.touch(b);
    EXPECT_EQ(r.misses, 2u) << max;
    EXPECT_EQ(r.largest, max);
    EXPECT_EQ(r.waste(), 0u) << max;
  }
}

TEST(PolicyReadAhead, RegionsOfAFewBlocksWork) {
  for (uint64_t blocks = 1; blocks <= 8; ++blocks) {
    Reader r(blocks, 32);
    for (BlockIndex b = 0; b < blocks; ++b) r.touch(b);
    for (BlockIndex b = blocks; b-- > 0;) r.touch(b);
    EXPECT_FALSE(r.readahead.on_fault(blocks, false)) << "outside the region";
  }
}

TEST(PolicyReadAhead, WasteHalvesTheWindowAndEndsTheStream) {
  ReadAhead ra(10000, 32);
  ra.on_fault(0, false);
  auto w = ra.on_fault(1, false);
  for (int i = 0; i < 4; ++i) w = ra.on_fault(w->marker, true);
  ASSERT_EQ(w->count, 32u);
  for (uint32_t i = 0; i < 16; ++i) ra.on_waste(w->first + 31 - i);
  w = ra.on_fault(w->first + w->count, false);
  ASSERT_TRUE(w);
  EXPECT_EQ(w->count, 16u);
  for (uint32_t i = 0; i < 40; ++i) ra.on_waste(w->first + w->count - 1);
  EXPECT_FALSE(ra.on_fault(w->marker, true)) << "nothing is left of the stream";
}

TEST(PolicyReadAhead, TheWindowGrowsBackSlowlyAfterWaste) {
  ReadAhead ra(100000, 32);
  ra.on_fault(0, false);
  auto w = ra.on_fault(1, false);
  for (int i = 0; i < 4; ++i) w = ra.on_fault(w->marker, true);
  for (uint32_t i = 0; i < 16; ++i) ra.on_waste(w->first + 31 - i);
  uint32_t windows = 0;
  for (w = ra.on_fault(w->first + w->count, false); w->count < 32; ++windows) w = ra.on_fault(w->marker, true);
  EXPECT_GE(windows, 64u);
  EXPECT_LE(windows, 200u);
}

TEST(PolicyReadAhead, DroppedBlocksAreAskedForAgain) {
  ReadAhead ra(10000, 32);
  ra.on_fault(0, false);
  auto w = ra.on_fault(1, false);
  ASSERT_EQ(w->count, 4u);
  ra.on_dropped(2);  // 4 and 5 were not started
  w = ra.on_fault(4, false);
  ASSERT_TRUE(w);
  EXPECT_EQ(w->first, 5u);
}

TEST(PolicyReadAhead, CutBlocksOfAnyStreamAreAskedForAgain) {
  ReadAhead ra(10000, 32);
  ra.set_access(Access::sequential);
  const auto first = ra.on_fault(0, false);
  const auto second = ra.on_fault(5000, false);
  ASSERT_TRUE(first && second);
  ra.on_cut({first->first + 10, 1, first->count - 10});
  const auto w = ra.on_fault(11, false);
  ASSERT_TRUE(w);
  EXPECT_EQ(w->first, 12u);
  EXPECT_EQ(ra.on_fault(second->marker, true)->first, second->first + second->count);
}

TEST(PolicyReadAhead, ReadersOfAPartEachShareTheRoomAndStayInTheirParts) {
  constexpr uint64_t kBlocks = 4096, kParts = 8;
  ReadAhead ra(kBlocks, 1024);
  ra.set_access(Access::sequential);
  for (uint64_t part = 0; part < kParts; ++part) ra.on_fault(part * kBlocks / kParts, false, {128, 0});
  std::set<BlockIndex> asked;
  for (BlockIndex at = 1; at < kBlocks / kParts; ++at) {
    for (uint64_t part = 0; part < kParts; ++part) {
      const BlockIndex end = (part + 1) * kBlocks / kParts;
      const auto w = ra.on_fault(part * kBlocks / kParts + at, false, {128, 0});
      if (!w) continue;
      EXPECT_EQ(w->stride, 1);
      EXPECT_LE(w->count, 128 / 2 / kParts);
      if (part + 1 < kParts) {
        EXPECT_LE(w->first + w->count, end);
      }
      for (uint32_t i = 0; i < w->count; ++i) EXPECT_TRUE(asked.insert(w->first + i).second) << w->first + i;
    }
  }
}

TEST(PolicyReadAhead, SaysWhatAReaderHasPassed) {
  for (const int64_t stride : {1, -1}) {
    ReadAhead ra(10000, 32);
    ra.set_access(Access::sequential);
    const auto at = [stride](int64_t n) { return static_cast<BlockIndex>((stride > 0 ? 0 : 9999) + n * stride); };
    std::set<BlockIndex> passed;
    uint64_t behind = 0;
    auto w = ra.on_fault(at(0), false);
    EXPECT_EQ(ra.passed().count, 0u);
    for (int i = 0; i < 40; ++i) {
      ASSERT_TRUE(w);
      ASSERT_EQ(w->stride, stride);
      const BlockIndex marker = w->marker;
      w = ra.on_fault(marker, true);
      const auto run = ra.passed();
      ASSERT_EQ(run.stride, stride);
      for (uint64_t k = 0; k < run.count; ++k) passed.insert(run.first + k * static_cast<uint64_t>(stride));
      EXPECT_EQ(passed.count(marker), 0u);
      const uint64_t before = stride > 0 ? marker : 9999 - marker;
      EXPECT_EQ(passed.size(), before) << "every block before the reader";
      const auto left = ra.leave_behind(16);
      if (left.count == 0) continue;
      EXPECT_EQ(left.first, at(static_cast<int64_t>(behind))) << "each block once";
      behind += left.count;
      EXPECT_EQ(behind + 16, before);
    }
    EXPECT_GT(behind, 0u);
  }
}

TEST(PolicyReadAhead, AStreamThatNobodyReadsIsGivenUp) {
  ReadAhead ra(100000, 32);
  ra.set_access(Access::sequential);
  const auto w = ra.on_fault(0, false, {1024, 5});
  ASSERT_TRUE(w);
  ra.on_fault(50000, false, {1024, 9});
  EXPECT_EQ(ra.give_up(5).count, 0u);
  const auto run = ra.give_up(6);
  EXPECT_EQ(run.first, 0u);
  EXPECT_EQ(run.count, 1u + w->count);
  EXPECT_EQ(ra.give_up(6).count, 0u);
  // With too many streams, the least recently used one goes, too.
  for (uint64_t i = 1; i < ReadAhead::kStreams; ++i) ra.on_fault(50000 + i * 1000, false, {1024, 10});
  EXPECT_EQ(ra.given_up().count, 0u);
  ra.on_fault(99000, false, {1024, 10});
  EXPECT_EQ(ra.given_up().first, 50000u);
  EXPECT_GT(ra.given_up().count, 1u);
}

TEST(PolicyReadAhead, GapsInASequentialStreamAreJumped) {
  Reader r(4000, 32);
  for (BlockIndex b = 0; b < 4000; ++b) {
    if (b % 50 < 47) r.touch(b);
  }
  EXPECT_LE(r.misses, 40u);
}

TEST(PolicyReadAhead, ShrinkingTheSettingTakesEffect) {
  ReadAhead ra(10000, 32);
  ra.on_fault(0, false);
  auto w = ra.on_fault(1, false);
  for (int i = 0; i < 4; ++i) w = ra.on_fault(w->marker, true);
  ra.set_max(2);
  for (BlockIndex b = w->first; b < 1000; ++b) {
    const auto next = ra.on_fault(b, false);
    if (next) {
      EXPECT_LE(next->count, 2u);
    }
  }
  ra.set_max(0);
  EXPECT_FALSE(ra.on_fault(9000, false));
}

}  // namespace
}  // namespace vmem::policy
