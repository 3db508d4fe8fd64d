// When a wait for memory ends: only time in which the library ran without progress counts.
#include <gtest/gtest.h>

#include "pager/block/stall_clock.h"

namespace {

using vmem::pager::StallClock;

constexpr uint64_t kMs = 1000000, kHour = 3600000 * kMs, kLimit = 1000 * kMs;

TEST(PagerStallClock, TimeWithoutProgressEndsAWait) {
  StallClock p;
  const uint64_t mark = p.look(kHour, false);
  for (uint64_t t = 50; t < 1000; t += 50) {
    p.look(kHour + t * kMs, false);
    EXPECT_FALSE(p.over(mark, kLimit)) << t;
  }
  p.look(kHour + 1000 * kMs, false);
  EXPECT_TRUE(p.over(mark, kLimit));
}

TEST(PagerStallClock, AStoppedMachineIsOneSlice) {
  StallClock p;
  const uint64_t mark = p.look(kHour, false);
  p.look(2 * kHour, false);
  p.look(3 * kHour, false);
  EXPECT_FALSE(p.over(mark, kLimit));
  EXPECT_EQ(p.waited(mark), 2 * StallClock::kSlice);
}

TEST(PagerStallClock, WhatWentOnMeanwhileBeginsTheWaitAgain) {
  StallClock p;
  const uint64_t mark = p.look(0, false);
  uint64_t now = 0;
  for (int round = 0; round < 5; ++round) {
    for (int i = 0; i < 9; ++i) p.look(now += 100 * kMs, false);
    EXPECT_FALSE(p.over(mark, kLimit));
    p.made();
  }
  for (int i = 0; i < 10; ++i) p.look(now += 100 * kMs, false);
  EXPECT_TRUE(p.over(mark, kLimit));
}

TEST(PagerStallClock, TimeInWhichAMoveIsUnderWayDoesNotCount) {
  StallClock p;
  const uint64_t mark = p.look(0, false);
  uint64_t now = 0;
  for (int i = 0; i < 100; ++i) p.look(now += 100 * kMs, true);
  EXPECT_FALSE(p.over(mark, kLimit));
  p.look(now += 50 * kMs, false);
  EXPECT_EQ(p.waited(mark), 50 * kMs);
}

TEST(PagerStallClock, SeveralWhoLookCountATimeOnce) {
  StallClock p;
  const uint64_t mark = p.look(0, false);
  for (int i = 0; i < 4; ++i) p.look(50 * kMs, false);
  p.look(40 * kMs, false);  // read its clock earlier, took the lock later
  EXPECT_EQ(p.waited(mark), 50 * kMs);
  const uint64_t later = p.look(60 * kMs, false);
  EXPECT_EQ(p.waited(later), 0u);
}

}  // namespace
