// Heat: where a region's faults are; parts, growth and cooling.
#include <gtest/gtest.h>

#include <numeric>

#include "policy/heat.h"

namespace {

using vmem::policy::Heat;

constexpr uint64_t kStart = 1000 * Heat::kHalving;

unsigned sum(const Heat::Levels& levels) {
  return std::accumulate(levels.begin(), levels.end(), 0u);
}

TEST(PolicyHeat, AFaultWarmsItsPartAlone) {
  Heat heat;
  EXPECT_EQ(sum(heat.levels(kStart)), 0u);
  heat.note(0, 6400, kStart);
  heat.note(199, 6400, kStart);
  heat.note(200, 6400, kStart);
  heat.note(6399, 6400, kStart);
  const Heat::Levels levels = heat.levels(kStart);
  EXPECT_EQ(levels[0], 2);  // two faults
  EXPECT_EQ(levels[1], 1);
  EXPECT_EQ(levels[31], 1);
  EXPECT_EQ(sum(levels), 4u);
}

TEST(PolicyHeat, EveryBlockOfEverySizeHasAPart) {
  for (const uint64_t blocks : {1ul, 2ul, 31ul, 32ul, 33ul, 1000ul, 1ul << 40}) {
    Heat heat;
    for (const uint64_t block : {uint64_t{0}, blocks / 2, blocks - 1}) heat.note(block, blocks, kStart);
    EXPECT_GE(sum(heat.levels(kStart)), 2u) << blocks;
  }
}

TEST(PolicyHeat, ALevelIsTwiceTheFaultsOfTheOneBelow) {
  Heat heat;
  for (int i = 0; i < 1024; ++i) heat.note(5, 32, kStart);
  for (int i = 0; i < 512; ++i) heat.note(6, 32, kStart);
  EXPECT_EQ(heat.levels(kStart)[5], 11);
  EXPECT_EQ(heat.levels(kStart)[6], 10);
}

TEST(PolicyHeat, WhatIsLeftAloneCools) {
  Heat heat;
  for (int i = 0; i < 1024; ++i) heat.note(5, 32, kStart);
  EXPECT_EQ(heat.levels(kStart + Heat::kHalving - 1)[5], 11);
  EXPECT_EQ(heat.levels(kStart + Heat::kHalving)[5], 10);
  EXPECT_EQ(heat.levels(kStart + Heat::kHalving)[5], 10) << "looking cools nothing";
  EXPECT_EQ(heat.levels(kStart + 4 * Heat::kHalving)[5], 7);
  EXPECT_EQ(heat.levels(kStart + 1000 * Heat::kHalving)[5], 0);
}

TEST(PolicyHeat, AClockThatIsBehindCoolsNothing) {
  Heat heat;
  heat.note(5, 32, kStart);
  EXPECT_EQ(heat.levels(kStart - 500)[5], 1);
}

}  // namespace
