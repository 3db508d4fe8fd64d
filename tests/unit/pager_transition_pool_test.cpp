// Transitions: each is free or a block's, and there are as many as were requested.
#include <gtest/gtest.h>

#include <set>

#include "pager/block/transition_pool.h"

namespace vmem::pager::test {
namespace {

class PagerTransitionPool : public ::testing::Test {
 protected:
  void TearDown() override { EXPECT_EQ(pool.check(), ""); }
  TransitionPool pool;
  Region region{8, 4};
};

TEST_F(PagerTransitionPool, AMoveIsOneBlocksUntilItIsGivenBack) {
  EXPECT_FALSE(pool.in_flight());
  ASSERT_TRUE(pool.reserve(2));
  EXPECT_EQ(pool.size(), 2u);
  Transition* const a = pool.take(region, 3, 7);
  Transition* const b = pool.take(region, 4, 8);
  EXPECT_NE(a, b);
  EXPECT_EQ(a->region, &region);
  EXPECT_EQ(a->block, 3u);
  EXPECT_EQ(a->begun_ns, 7u);
  EXPECT_TRUE(pool.in_flight());
  EXPECT_EQ(pool.free(), 0u);
  EXPECT_EQ(pool.check(), "");
  a->write.keep = true;
  a->status = core::Status(EIO, "");
  pool.give(a);
  EXPECT_TRUE(pool.in_flight()) << "the other is";
  EXPECT_EQ(a->begun_ns, 0u);
  EXPECT_TRUE(a->status.ok()) << "its words are nobody's any more";
  EXPECT_EQ(pool.take(region, 5, 9), a);
  EXPECT_FALSE(a->write.keep) << "nothing is left of the move before";
  pool.give(a);
  pool.give(b);
  EXPECT_FALSE(pool.in_flight());
}

TEST_F(PagerTransitionPool, OnesThatAreFreeNeedNoMoreMemory) {
  ASSERT_TRUE(pool.reserve(3));
  EXPECT_EQ(pool.grows_to(3), 0u);
  EXPECT_TRUE(pool.reserve(1));
  EXPECT_EQ(pool.size(), 3u);
  pool.take(region, 1, 1);
  ASSERT_TRUE(pool.reserve(3));
  EXPECT_EQ(pool.size(), 4u);
  EXPECT_EQ(pool.free(), 3u);
}

TEST_F(PagerTransitionPool, WhatHasRoomForAllHearsHowManyThereMayBe) {
  const size_t room = pool.grows_to(1);
  ASSERT_GE(room, 1u);
  ASSERT_TRUE(pool.reserve(room));
  EXPECT_LE(pool.size(), room);
  EXPECT_GT(pool.grows_to(room + 1), room);
}

TEST_F(PagerTransitionPool, MovesStayWhereTheyAre) {
  std::set<const Transition*> before;
  ASSERT_TRUE(pool.reserve(4));
  for (const auto& m : pool.all()) before.insert(m.get());
  ASSERT_TRUE(pool.reserve(400));
  size_t found = 0;
  for (const auto& m : pool.all()) found += before.count(m.get());
  EXPECT_EQ(found, 4u);
  EXPECT_EQ(pool.size(), 400u);
}

TEST_F(PagerTransitionPool, TheCheckFindsAMoveThatIsOverAndNotFree) {
  ASSERT_TRUE(pool.reserve(1));
  Transition* const m = pool.take(region, 1, 1);
  m->begun_ns = 0;
  EXPECT_NE(pool.check(), "");
  m->begun_ns = 1;
  pool.give(m);
  m->begun_ns = 1;
  EXPECT_NE(pool.check(), "");
  m->begun_ns = 0;
}

}  // namespace
}  // namespace vmem::pager::test
