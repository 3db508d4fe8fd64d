// Pieces of a device's memory: which are kept for the next unit, and which go first.
#include <gtest/gtest.h>

#include <functional>
#include <utility>
#include <vector>

#include "core/step.h"
#include "device/piece_pool.h"

namespace vmem::device {
namespace {

using core::Status;

std::function<void()> at_step;

class PiecePool : public ::testing::Test {
 protected:
  void TearDown() override {
    core::step_hook.store(nullptr);
    at_step = nullptr;
  }
  uint32_t take(size_t size) {
    uint32_t piece = 0;
    const Status s = pools.take(
        size, &piece,
        [this](size_t, uint32_t number, Piece* out) {
          made.push_back(number);
          *out = {number + 1, (number + 1) * uint64_t{4096}};
          return Status();
        },
        destroy);
    EXPECT_TRUE(s.ok()) << s.text();
    return piece;
  }
  void give(size_t size, uint32_t piece) {
    pools.of(size).give(piece, [&](const Piece& p) { return destroy(size, p); });
  }
  PiecePools pools;
  std::vector<uint32_t> made;
  size_t destroyed = 0, tried = 0;
  bool refused = false;  // the unmap of one fails
  PiecePools::Destroy destroy = [this](size_t, const Piece&) {
    ++tried;
    destroyed += refused ? 0 : 1;
    return !refused;
  };
};

TEST_F(PiecePool, IdlePiecesOfOtherSizesGoFirst) {
  give(2 * kUnit, take(2 * kUnit));
  const uint32_t small = take(kUnit);
  EXPECT_EQ(destroyed, 1u);
  EXPECT_EQ(pools.bytes(), kUnit);
  give(kUnit, small);
  EXPECT_EQ(take(kUnit), small) << "it was idle";
  EXPECT_EQ(made.size(), 2u);
}

TEST_F(PiecePool, ThoseOfTheLargestUnitsTakeTheRoomOfAllOthers) {
  EXPECT_EQ(kLargestUnit, 32 * kUnit);
  std::vector<uint32_t> others;
  for (size_t size = kUnit; size < kLargestUnit; size *= 2) others.push_back(take(size));
  for (size_t i = 0; i < others.size(); ++i) give(kUnit << i, others[i]);
  EXPECT_EQ(pools.idle_bytes(), 31 * kUnit);
  const uint32_t largest = take(kLargestUnit);
  EXPECT_EQ(destroyed, 5u) << "one of each size";
  EXPECT_EQ(pools.bytes(), kLargestUnit);
  EXPECT_EQ(&pools.of(kLargestUnit), &pools.of(kLargestUnit + kUnit));
  EXPECT_EQ(pools.of(kLargestUnit).size(), kLargestUnit);
  give(kLargestUnit, largest);
  take(kUnit);
  EXPECT_EQ(destroyed, 6u) << "all of it, for a small one";
  EXPECT_EQ(pools.bytes(), kUnit);
}

TEST_F(PiecePool, NoneGoesForAPieceThatIsNotMade) {
  const uint32_t small = take(kUnit);
  give(2 * kUnit, take(2 * kUnit));
  at_step = [&] { give(kUnit, small); };
  core::step_hook.store([](const char*) {
    if (at_step) std::exchange(at_step, nullptr)();
  });
  EXPECT_EQ(take(kUnit), small) << "somebody has just given it back";
  EXPECT_EQ(destroyed, 0u);
  EXPECT_EQ(pools.bytes(), 3 * kUnit);
}

TEST_F(PiecePool, WhatCannotBeDestroyedStaysAndIsTriedNoFurther) {
  const uint32_t small[] = {take(kUnit), take(kUnit)}, large = take(2 * kUnit);
  for (const uint32_t piece : small) give(kUnit, piece);
  give(2 * kUnit, large);
  refused = true;
  pools.trim(0, destroy);
  EXPECT_EQ(tried, 2u) << "one of each size";
  EXPECT_EQ(pools.bytes(), 4 * kUnit);
  EXPECT_EQ(pools.idle_bytes(), 4 * kUnit);
  give(4 * kUnit, take(4 * kUnit));
  EXPECT_EQ(made.size(), 4u) << "a block gets its piece all the same";
  refused = false;
  EXPECT_EQ(take(2 * kUnit), large) << "as good as it was";
  pools.trim(0, destroy);
  EXPECT_EQ(destroyed, 3u);
  EXPECT_EQ(pools.bytes(), 2 * kUnit);
}

TEST_F(PiecePool, WhatWasSharedIsNobodysNext) {
  const uint32_t mine = take(kUnit), shared = take(kUnit);
  pools.of(kUnit).share(shared);
  give(kUnit, mine);
  give(kUnit, shared);
  EXPECT_EQ(destroyed, 1u);
  EXPECT_EQ(pools.bytes(), kUnit);
  EXPECT_EQ(pools.idle_bytes(), kUnit);
  EXPECT_EQ(take(kUnit), mine);
  EXPECT_EQ(take(kUnit), shared) << "its number, with other memory";
  EXPECT_EQ(made.size(), 3u);
  give(kUnit, shared);
  EXPECT_EQ(destroyed, 1u) << "which nobody else has";
}

TEST_F(PiecePool, WhatWasSharedAndCannotBeDestroyedIsNobodysAndTriedAgain) {
  const uint32_t shared = take(kUnit);
  pools.of(kUnit).share(shared);
  refused = true;
  give(kUnit, shared);
  EXPECT_EQ(pools.bytes(), kUnit);
  EXPECT_EQ(pools.idle_bytes(), 0u);
  const uint32_t other = take(kUnit);
  EXPECT_NE(other, shared);
  pools.trim(0, destroy);
  EXPECT_EQ(pools.bytes(), 2 * kUnit);
  refused = false;
  EXPECT_EQ(take(kUnit), shared) << "who needs memory has tried it again";
  EXPECT_EQ(pools.bytes(), 2 * kUnit);
  EXPECT_EQ(destroyed, 1u);
}

// Giving a piece back must not fail, so it must not allocate: the pool keeps no copy of the
// function.
TEST_F(PiecePool, AFunctionThatCannotBeCopiedDestroysWhatWasShared) {
  struct Once {
    explicit Once(size_t* count) : destroyed(count) {}
    Once(const Once&) = delete;
    Once& operator=(const Once&) = delete;
    bool operator()(const Piece&) const { return ++*destroyed != 0; }
    size_t* destroyed;
  };
  const uint32_t shared = take(kUnit);
  pools.of(kUnit).share(shared);
  size_t count = 0;
  pools.of(kUnit).give(shared, Once(&count));
  EXPECT_EQ(count, 1u);
  EXPECT_EQ(pools.bytes(), 0u);
}

}  // namespace
}  // namespace vmem::device
