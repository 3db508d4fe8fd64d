// The bookkeeping of vmem::pool, compared with a plain array of each granule's owner.
#include "vmem/pool_granules.hpp"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace {

using Map = vmem::detail::granule_map;

TEST(PoolGranules, TakesWhatFitsUntilNothingIsLeftAndJoinsWhatComesBack) {
  Map map(100);
  EXPECT_EQ(map.take(101), Map::none);
  const auto a = map.take(60), b = map.take(40);
  ASSERT_NE(a, Map::none);
  ASSERT_NE(b, Map::none);
  EXPECT_EQ(map.free_count(), 0u);
  EXPECT_EQ(map.largest_free(), 0u);
  EXPECT_EQ(map.take(1), Map::none);
  EXPECT_EQ(map.used_runs(), 2u);
  map.give(a);
  EXPECT_EQ(map.check(), "");
  EXPECT_EQ(map.largest_free(), 60u);
  map.give(b);
  EXPECT_EQ(map.check(), "");
  EXPECT_EQ(map.largest_free(), 100u) << "neighbours are one run again";
  EXPECT_EQ(map.take(100), 0u);
}

TEST(PoolGranules, JoinsWithBothNeighbours) {
  Map map(3);
  for (Map::index g = 0; g < 3; ++g) ASSERT_EQ(map.take(1), g);
  map.give(0);
  map.give(2);
  EXPECT_EQ(map.take(2), Map::none) << "two single granules are no run of two";
  map.give(1);
  EXPECT_EQ(map.check(), "");
  EXPECT_EQ(map.largest_free(), 3u);
}

TEST(PoolGranules, AlignedRunsBeginAtThePhaseOrAMultipleAfterIt) {
  Map map(1000);
  ASSERT_EQ(map.take(3), 0u);
  const auto at = map.take(10, 64, 7);
  ASSERT_NE(at, Map::none);
  EXPECT_EQ((at - 7) % 64, 0u);
  EXPECT_EQ(map.check(), "");
  EXPECT_EQ(map.take(990, 1), Map::none);
  EXPECT_EQ(map.take(1, 1024, 1000), Map::none) << "the first aligned granule is beyond the end";
  EXPECT_EQ(map.take(1, uint64_t{1} << 50, (uint64_t{1} << 50) - 1), Map::none);
  EXPECT_EQ(map.take(1, 512, 511), 511u);
  EXPECT_EQ(map.check(), "");
}

TEST(PoolGranules, KnowsTheRunThatAGranuleIsIn) {
  Map map(50);
  ASSERT_EQ(map.take(5), 0u);
  ASSERT_EQ(map.take(20), 5u);
  EXPECT_EQ(map.used_at(5), 20u);
  EXPECT_EQ(map.used_at(6), 0u);
  EXPECT_EQ(map.used_at(25), 0u);
  const auto inside = map.run_of(24), free = map.run_of(49);
  EXPECT_TRUE(inside.used);
  EXPECT_EQ(inside.begin, 5u);
  EXPECT_EQ(inside.length, 20u);
  EXPECT_FALSE(free.used);
  EXPECT_EQ(free.begin, 25u);
  map.give(5);
  EXPECT_EQ(map.used_at(5), 0u) << "given back is not there to be given again";
}

TEST(PoolGranules, RandomTakesAndGivesNeverOverlapAndTheTagsStayTrue) {
  constexpr Map::index kCount = 4096;
  Map map(kCount);
  std::mt19937_64 random(7);
  std::vector<int> owner(kCount, 0);
  struct Taken {
    Map::index begin, length;
  };
  std::vector<Taken> live;
  unsigned refused = 0;
  for (int n = 1; n <= 30000; ++n) {
    if (random() % 100 < 52 || live.empty()) {
      const auto length = static_cast<Map::index>(1 + random() % (random() % 8 == 0 ? 700 : 40));
      const uint64_t align = uint64_t{1} << random() % (random() % 4 == 0 ? 8 : 1);
      const uint64_t phase = random() % align;
      const auto at = map.take(length, align, phase);
      if (at == Map::none) {
        ++refused;
        continue;
      }
      ASSERT_GE(at, phase);
      ASSERT_EQ((at - phase) % align, 0u);
      ASSERT_LE(at + length, kCount);
      for (auto g = at; g < at + length; ++g) {
        ASSERT_EQ(owner[g], 0) << "granule " << g << " was taken twice";
        owner[g] = n;
      }
      live.push_back({at, length});
    } else {
      const size_t i = random() % live.size();
      ASSERT_EQ(map.used_at(live[i].begin), live[i].length);
      map.give(live[i].begin);
      std::fill_n(owner.begin() + live[i].begin, live[i].length, 0);
      live[i] = live.back();
      live.pop_back();
    }
    ASSERT_EQ(map.used_runs(), live.size());
    if (n % 50 == 0) {
      ASSERT_EQ(map.check(), "") << "after step " << n;
      ASSERT_EQ(map.free_count(), std::count(owner.begin(), owner.end(), 0));
      Map::index longest = 0, now = 0, visited = 0;
      for (const int o : owner) longest = std::max(longest, now = o == 0 ? now + 1 : 0);
      ASSERT_EQ(map.largest_free(), longest);
      map.for_each_free([&](Map::index, Map::index length) { visited += length; });
      ASSERT_EQ(visited, map.free_count());
    }
  }
  EXPECT_GT(refused, 100u) << "it was full now and then";
  for (const Taken& t : live) map.give(t.begin);
  EXPECT_EQ(map.check(), "");
  EXPECT_EQ(map.largest_free(), kCount);
}

}  // namespace
