// Placement advice by block: if ranges overlap, the last advice for each block counts.
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

#include "core/os_allocator.h"
#include "pager/block/advice.h"
#include "pager/block/placement_advice.h"
#include "vmem/vmem.h"

namespace {

using vmem::pager::PlacementAdvice;
using Said = PlacementAdvice::Said;

TEST(PagerPlacementAdvice, NothingIsSaidAtFirst) {
  const PlacementAdvice advice;
  EXPECT_TRUE(advice.empty());
  EXPECT_EQ(advice.at(0), Said());
  EXPECT_EQ(advice.same_until(3, 9), 9u);
}

TEST(PagerPlacementAdvice, TheLastWordOnABlockCountsAndTheTwoKindsAreApart) {
  PlacementAdvice advice;
  ASSERT_TRUE(advice.prefer(2, 9, 1));
  ASSERT_TRUE(advice.prefer(4, 5, VMEM_HOST));
  ASSERT_TRUE(advice.set_read_mostly(5, 11, true));
  EXPECT_EQ(advice.at(1), Said());
  EXPECT_EQ(advice.at(3), (Said{1, false}));
  EXPECT_EQ(advice.at(4), (Said{VMEM_HOST, false}));
  EXPECT_EQ(advice.at(5), (Said{VMEM_HOST, true}));
  EXPECT_EQ(advice.at(9), (Said{1, true}));
  EXPECT_EQ(advice.at(11), (Said{PlacementAdvice::kNowhere, true}));
  EXPECT_EQ(advice.at(12), Said());
  EXPECT_EQ(advice.same_until(0, 20), 1u);
  EXPECT_EQ(advice.same_until(6, 20), 9u);
  EXPECT_EQ(advice.same_until(6, 8), 8u);
  EXPECT_EQ(advice.same_until(12, 20), 20u);
  ASSERT_TRUE(advice.prefer(0, 20, PlacementAdvice::kNowhere));
  EXPECT_EQ(advice.ranges(), 1u) << "what says the same is one";
  ASSERT_TRUE(advice.set_read_mostly(0, 20, false));
  EXPECT_TRUE(advice.empty());
}

TEST(PagerPlacementAdvice, SoManyRangesAreKeptAndWhatMakesThemFewerIsAlwaysTaken) {
  PlacementAdvice advice;
  for (uint64_t i = 0; i < PlacementAdvice::kMost; ++i) ASSERT_TRUE(advice.prefer(3 * i, 3 * i, 0)) << i;
  EXPECT_FALSE(advice.prefer(10000, 10000, 0));
  EXPECT_EQ(advice.at(10000), Said());
  EXPECT_TRUE(advice.prefer(1, 1, 0)) << "beside another that says so";
  EXPECT_TRUE(advice.prefer(0, 2, 1));
  EXPECT_TRUE(advice.prefer(0, 20000, PlacementAdvice::kNowhere));
  EXPECT_TRUE(advice.empty());
}

TEST(PagerPlacementAdvice, WithoutMemoryNothingChanges) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizer has it";
#endif
  PlacementAdvice advice;
  ASSERT_TRUE(advice.prefer(2, 3, 1));
  vmem::core::memory_hook.store([] { return true; });
  EXPECT_THROW(advice.prefer(3, 4, 0), std::bad_alloc);
  vmem::core::memory_hook.store(nullptr);
  EXPECT_EQ(advice.at(3), (Said{1, false}));
  EXPECT_EQ(advice.at(4), Said());
}

TEST(PagerPlacementAdvice, WhateverIsSaidEachBlockHasItsOwn) {
  constexpr uint64_t kBlocks = 40;
  std::mt19937 random(7);
  PlacementAdvice advice;
  std::vector<Said> expected(kBlocks);
  for (int turn = 0; turn < 2000; ++turn) {
    const uint64_t first = random() % kBlocks, last = first + random() % (kBlocks - first);
    const bool mostly = random() % 2 != 0, on = random() % 2 != 0;
    const auto where =
        static_cast<int16_t>(random() % 3 == 0 ? PlacementAdvice::kNowhere : static_cast<int>(random() % 3) - 1);
    ASSERT_TRUE(mostly ? advice.set_read_mostly(first, last, on) : advice.prefer(first, last, where));
    for (uint64_t b = first; b <= last; ++b)
      mostly ? void(expected[b].read_mostly = on) : void(expected[b].preferred = where);
    size_t runs = 0;
    for (uint64_t b = 0; b < kBlocks; ++b) {
      ASSERT_EQ(advice.at(b), expected[b]) << "turn " << turn << ", block " << b;
      runs += expected[b] != Said() && (b == 0 || expected[b - 1] != expected[b]) ? 1 : 0;
    }
    ASSERT_EQ(advice.ranges(), runs) << turn;
    for (uint64_t b = 0; b < kBlocks;) {
      const uint64_t end = advice.same_until(b, kBlocks - 1);
      for (uint64_t i = b; i <= end; ++i) ASSERT_EQ(expected[i], expected[b]);
      b = end + 1;
    }
  }
}

// Effects of the advice on the order in which blocks leave.
TEST(PagerAdvice, ABlockStaysWhereItIsBestAndLeavesAnotherDeviceFirst) {
  using vmem::pager::temperature_in;
  using vmem::policy::Temperature;
  constexpr uint8_t kHost = vmem::pager::kHostPool, kStaging = vmem::pager::kStagingPools;
  constexpr uint8_t kDevice0 = vmem::pager::kDevicePools, kDevice1 = kDevice0 + 1;
  vmem::pager::Region r(8, 1);
  ASSERT_TRUE(r.advice.places.prefer(1, 1, 1));
  ASSERT_TRUE(r.advice.places.prefer(2, 2, VMEM_HOST));
  ASSERT_TRUE(r.advice.places.set_read_mostly(3, 3, true));
  const auto in = [&](uint64_t b) {
    std::vector<Temperature> all;
    for (const uint8_t pool : {kHost, kStaging, kDevice0, kDevice1}) {
      bool pinned = true;
      all.push_back(temperature_in(r, b, pool, &pinned));
      EXPECT_FALSE(pinned);
    }
    return all;
  };
  constexpr Temperature normal = Temperature::normal, hot = Temperature::hot, cold = Temperature::cold;
  EXPECT_EQ(in(0), (std::vector{normal, normal, normal, normal}));
  EXPECT_EQ(in(1), (std::vector{normal, normal, cold, hot}));
  EXPECT_EQ(in(2), (std::vector{hot, hot, cold, cold}));
  EXPECT_EQ(in(3), (std::vector{normal, hot, normal, normal}));
  r.advice.advised.push_back({1, 1, cold, false});
  EXPECT_EQ(in(1), (std::vector{cold, cold, cold, cold})) << "what was said of it comes first";
  EXPECT_EQ(vmem::pager::copy_temperature(r, 1), normal);
  EXPECT_EQ(vmem::pager::copy_temperature(r, 2), hot);
  EXPECT_EQ(vmem::pager::copy_temperature(r, 3), hot);
  EXPECT_EQ(vmem::pager::home_of(r, 1), 1);
  EXPECT_EQ(vmem::pager::home_of(r, 2), -1);
  EXPECT_EQ(vmem::pager::home_of(r, 3), -1);
}

}  // namespace
