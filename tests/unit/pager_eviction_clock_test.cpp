// Stamps of blocks that left memory, and how much has left since.
#include <gtest/gtest.h>

#include "pager/block/eviction_clock.h"

namespace {

using vmem::pager::EvictionClock;

constexpr uint64_t kUnit = 64 << 10;  // bytes between two stamps

TEST(PagerEvictionClock, AgeIsWhatHasLeftSinceTheStamp) {
  EvictionClock clock;
  clock.left(10 * kUnit);
  const uint32_t stamp = clock.stamp();
  EXPECT_EQ(clock.age(stamp), 0u);
  clock.left(kUnit);
  EXPECT_EQ(clock.age(stamp), 16u) << "pages";
  for (int i = 0; i < 16; ++i) clock.left(4096);
  EXPECT_EQ(clock.age(stamp), 32u);
  EXPECT_EQ(clock.pages(), 12u * 16);
}

TEST(PagerEvictionClock, AStampIsNeverTheOneOfABlockThatNeverLeft) {
  EvictionClock clock;
  EXPECT_NE(clock.stamp(), 0u);
  clock.left(4096);
  EXPECT_NE(clock.stamp(), 0u);
  clock.left((uint64_t{1} << 32) * kUnit - 4096);  // where 32 bits begin anew
  EXPECT_NE(clock.stamp(), 0u);
}

TEST(PagerEvictionClock, WhatComesBackAtOnceIsNotOldBeforeMuchHasLeft) {
  EvictionClock clock;
  EXPECT_EQ(clock.age(clock.stamp()), 0u);
  clock.left(4096);
  EXPECT_EQ(clock.age(clock.stamp()), 0u);
}

TEST(PagerEvictionClock, AgesAreRightWhereStampsBeginAnew) {
  EvictionClock clock;
  clock.left(((uint64_t{1} << 32) - 2) * kUnit);
  const uint32_t stamp = clock.stamp();
  clock.left(5 * kUnit);
  EXPECT_LT(clock.stamp(), stamp);
  EXPECT_EQ(clock.age(stamp), 5u * 16);
}

}  // namespace
