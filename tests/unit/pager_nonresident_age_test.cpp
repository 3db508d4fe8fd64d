// Stamps of blocks that left memory, and how much has left since.
#include <gtest/gtest.h>

#include "pager/block/nonresident_age.h"

namespace {

using vmem::pager::NonresidentAge;

constexpr uint64_t kUnit = 64 << 10;  // bytes between two shadows

TEST(PagerNonresidentAge, AgeIsWhatHasLeftSinceTheStamp) {
  NonresidentAge age;
  age.left(10 * kUnit);
  const uint32_t shadow = age.shadow();
  EXPECT_EQ(age.age(shadow), 0u);
  age.left(kUnit);
  EXPECT_EQ(age.age(shadow), 16u) << "pages";
  for (int i = 0; i < 16; ++i) age.left(4096);
  EXPECT_EQ(age.age(shadow), 32u);
  EXPECT_EQ(age.pages(), 12u * 16);
}

TEST(PagerNonresidentAge, AStampIsNeverTheOneOfABlockThatNeverLeft) {
  NonresidentAge age;
  EXPECT_NE(age.shadow(), 0u);
  age.left(4096);
  EXPECT_NE(age.shadow(), 0u);
  age.left((uint64_t{1} << 32) * kUnit - 4096);  // where 32 bits wrap around
  EXPECT_NE(age.shadow(), 0u);
}

TEST(PagerNonresidentAge, WhatComesBackAtOnceIsNotOldBeforeMuchHasLeft) {
  NonresidentAge age;
  EXPECT_EQ(age.age(age.shadow()), 0u);
  age.left(4096);
  EXPECT_EQ(age.age(age.shadow()), 0u);
}

TEST(PagerNonresidentAge, AgesAreRightWhereStampsBeginAnew) {
  NonresidentAge age;
  age.left(((uint64_t{1} << 32) - 2) * kUnit);
  const uint32_t shadow = age.shadow();
  age.left(5 * kUnit);
  EXPECT_LT(age.shadow(), shadow);
  EXPECT_EQ(age.age(shadow), 5u * 16);
}

}  // namespace
