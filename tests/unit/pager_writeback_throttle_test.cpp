// Evictions are counted once, failed writes are retried ever more rarely, and a failure is reported
// once.
#include <gtest/gtest.h>

#include <cerrno>
#include <memory>
#include <vector>

#include "pager/account/writeback_throttle.h"
#include "pager/block/region.h"
#include "pager/block/transition.h"

namespace vmem::pager::test {
namespace {

constexpr uint64_t kMs = 1000000, kNow = 3600000 * kMs;

class PagerWritebackThrottle : public ::testing::Test {
 protected:
  PagerWritebackThrottle() {
    small.block_size = 4096;
    large.block_size = 2 << 20;
  }
  // Begins one more transition.
  Transition& move(Region& r) {
    transitions.push_back(std::make_unique<Transition>());
    transitions.back()->region = &r;
    transitions.back()->begun_ns = kNow;
    return *transitions.back();
  }
  void count_leaving(Transition& m, bool staging = false) {
    write_back.count_leaving(m.write.leaving, m.region->block_size, staging ? kStagingPools : kHostPool);
  }
  std::string check(uint64_t now = kNow) { return write_back.check(transitions, now); }

  WritebackThrottle write_back;
  Region small{16, 4}, large{16, 4};
  std::vector<std::unique_ptr<Transition>> transitions;
};

TEST_F(PagerWritebackThrottle, WhatLeavesIsCountedByWhoseMemoryItIs) {
  Transition &a = move(small), &b = move(large), &c = move(large);
  count_leaving(a);
  count_leaving(b);
  count_leaving(c, true);
  EXPECT_EQ(write_back.leaving(), 4096u + (2 << 20));
  EXPECT_EQ(write_back.leaving(kStagingPools), 2u << 20);
  EXPECT_EQ(check(), "");
  write_back.settled(b.write.leaving);
  EXPECT_EQ(write_back.leaving(), 4096u);
  write_back.settled(c.write.leaving);
  EXPECT_EQ(write_back.leaving(kStagingPools), 0u);
  EXPECT_EQ(check(), "");
}

TEST_F(PagerWritebackThrottle, AMoveIsCountedOnceAndSettledOnce) {
  Transition& m = move(large);
  write_back.settled(m.write.leaving);
  EXPECT_EQ(write_back.leaving(), 0u) << "a block that is synced or probed was never said to leave";
  count_leaving(m);
  count_leaving(m);
  EXPECT_EQ(write_back.leaving(), 2u << 20);
  count_leaving(m, true);
  EXPECT_EQ(write_back.leaving(), 0u);
  EXPECT_EQ(write_back.leaving(kStagingPools), 2u << 20);
  write_back.settled(m.write.leaving);
  write_back.settled(m.write.leaving);
  EXPECT_EQ(write_back.leaving() + write_back.leaving(kStagingPools), 0u);
  EXPECT_EQ(check(), "");
}

TEST_F(PagerWritebackThrottle, TheCheckSeesAMoveThatEndedAndLeavesStill) {
  Transition& m = move(large);
  count_leaving(m);
  EXPECT_EQ(check(), "");
  m.begun_ns = 0;
  EXPECT_NE(check().find("a move is over"), std::string::npos) << check();
}

TEST_F(PagerWritebackThrottle, TheCheckSeesAMoveThatWasForgotten) {
  count_leaving(move(large));
  transitions.clear();
  EXPECT_NE(check().find("said to leave, moves have 0"), std::string::npos) << check();
}

TEST_F(PagerWritebackThrottle, TheCheckSeesABlockOfAnotherSize) {
  Transition& m = move(large);
  count_leaving(m);
  m.region = &small;
  EXPECT_NE(check().find("another size"), std::string::npos) << check();
}

TEST_F(PagerWritebackThrottle, EachFailureInARowWaitsLongerUpToALimit) {
  uint64_t before = 0, now = kNow;
  for (int n = 1; n <= 10; ++n) {
    now += before;
    write_back.failed(error(EIO, "no"), false, now);
    const uint64_t pause = write_back.pause(now);
    if (n <= 6) {
      EXPECT_EQ(pause, WritebackThrottle::kShortestPause << n) << n;
    }
    EXPECT_GE(pause, before) << n;
    EXPECT_LE(pause, WritebackThrottle::kLongestPause) << n;
    EXPECT_EQ(check(now), "") << n;
    before = pause;
  }
  EXPECT_EQ(write_back.pause(now + before - 1), 1u);
  EXPECT_EQ(write_back.pause(now + before), 0u);
  EXPECT_EQ(write_back.pause(now + before + kMs), 0u);
  EXPECT_EQ(check(now - kMs), "write-back waits longer than it may");
}

// Otherwise one failed batch would pause writes of all other blocks as long as a disk that fails
// altogether.
TEST_F(PagerWritebackThrottle, BlocksThatFailTogetherAreOneFailure) {
  for (uint64_t i = 0; i < 32; ++i) write_back.failed(error(EIO, "no"), false, kNow + i);
  EXPECT_EQ(write_back.pause(kNow), 2 * WritebackThrottle::kShortestPause);
  const uint64_t next = kNow + 2 * WritebackThrottle::kShortestPause;
  for (uint64_t i = 0; i < 32; ++i) write_back.failed(error(EIO, "no"), false, next + i);
  EXPECT_EQ(write_back.pause(next), 4 * WritebackThrottle::kShortestPause) << "the second try";
}

// A program pins a block while the disk refuses all writes: the disk must not be asked more often.
TEST_F(PagerWritebackThrottle, APinnedBlockShortensNoPause) {
  uint64_t now = kNow;
  for (unsigned n = 1; n <= 6; ++n) {
    write_back.pinned(now);
    write_back.failed(error(EIO, "no"), false, now + 1);
    EXPECT_GE(write_back.pause(now + 1), WritebackThrottle::kShortestPause << n) << n;
    write_back.pinned(now + 2);
    EXPECT_GE(write_back.pause(now + 2) + 1, WritebackThrottle::kShortestPause << n) << n;
    now += 1 + write_back.pause(now + 1);
  }
}

TEST_F(PagerWritebackThrottle, AWriteThatWorksBeginsTheRowAnewAndEndsNoPause) {
  for (int n = 0; n < 5; ++n) write_back.failed(error(EIO, "no"), false, kNow);
  write_back.succeeded();
  EXPECT_NE(write_back.pause(kNow), 0u) << "another one's success says little of the block that failed";
  write_back.failed(error(EIO, "no"), false, kNow);
  EXPECT_EQ(write_back.pause(kNow), 2 * WritebackThrottle::kShortestPause);
}

TEST_F(PagerWritebackThrottle, RoomEndsThePauseOfWhoWaitsForIt) {
  EXPECT_FALSE(write_back.has_room()) << "nobody waits";
  write_back.failed(error(ENOSPC, "full"), false, kNow);
  EXPECT_TRUE(write_back.has_room());
  EXPECT_EQ(write_back.pause(kNow), 0u);
  EXPECT_FALSE(write_back.has_room());
  write_back.pinned(kNow);
  EXPECT_EQ(write_back.pause(kNow), WritebackThrottle::kPinnedPause);
  EXPECT_TRUE(write_back.error().code() == -ENOSPC) << "a pause is no failure, and its end does not undo one";
}

TEST_F(PagerWritebackThrottle, TheSameFailureIsSaidOnceAMinute) {
  EXPECT_TRUE(write_back.failed(error(EIO, "no"), false, kNow));
  EXPECT_FALSE(write_back.failed(error(EIO, "no"), false, kNow + kMs)) << "in a row";
  write_back.succeeded();
  EXPECT_FALSE(write_back.failed(error(EIO, "no"), false, kNow + 2 * kMs)) << "said a moment ago";
  write_back.succeeded();
  EXPECT_TRUE(write_back.failed(error(ENOSPC, "full"), false, kNow + 3 * kMs)) << "that is another";
  write_back.succeeded();
  EXPECT_FALSE(write_back.failed(error(ENOSPC, "full"), false, kNow + 2 * kMs + WritebackThrottle::kSayAgain));
  write_back.succeeded();
  EXPECT_TRUE(write_back.failed(error(ENOSPC, "full"), false, kNow + 3 * kMs + WritebackThrottle::kSayAgain));
}

TEST_F(PagerWritebackThrottle, TheFirstFailureThatNobodyHeardOfIsKeptUntilItIsTaken) {
  EXPECT_TRUE(write_back.error().ok());
  write_back.failed(error(EIO, "a sync says so"), true, kNow);
  EXPECT_TRUE(write_back.error().ok()) << "who waits for the write has it from there";
  write_back.failed(error(ENOSPC, "first"), false, kNow);
  write_back.failed(error(EIO, "second"), false, kNow);
  EXPECT_EQ(write_back.error().code(), -ENOSPC);
  const Status taken = write_back.take_error();
  EXPECT_EQ(taken.code(), -ENOSPC);
  EXPECT_EQ(taken.text(), "first");
  EXPECT_TRUE(write_back.error().ok());
  EXPECT_TRUE(write_back.take_error().ok()) << "told once";
}

}  // namespace
}  // namespace vmem::pager::test
