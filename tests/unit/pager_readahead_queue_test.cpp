// The read-ahead queue: a limit at once, each read counted once, and no reads that no thread waits
// for any more.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "pager/host/readahead.h"

namespace vmem::pager::test {
namespace {

class PagerReadaheadQueue : public ::testing::Test {
 protected:
  PagerReadaheadQueue() { one.block_size = other.block_size = 4096; }
  void TearDown() override { EXPECT_EQ(ahead.check(transitions), ""); }
  // Begins one more transition.
  Transition& move() {
    transitions.push_back(std::make_unique<Transition>());
    transitions.back()->region = &one;
    transitions.back()->begun_ns = 1;
    return *transitions.back();
  }
  bool add(Region& r, BlockIndex next, int64_t stride, uint64_t count, Urgency urgency = Urgency::readahead) {
    return ahead.add({&r, next, stride, count, 0, urgency});
  }

  Region one{1 << 20, 4}, other{16, 4};
  ReadaheadQueue ahead;
  std::vector<std::unique_ptr<Transition>> transitions;
};

TEST_F(PagerReadaheadQueue, EachReadIsCountedOnceUntilItEnds) {
  Transition &a = move(), &b = move(), &fault = move();
  ahead.started(a);
  ahead.started(a);
  ahead.started(b);
  EXPECT_EQ(ahead.in_flight(), 2 * 4096u);
  EXPECT_TRUE(a.read.speculative);
  EXPECT_EQ(ahead.check(transitions), "");
  ahead.ended(fault);
  EXPECT_EQ(ahead.in_flight(), 2 * 4096u) << "that one is not read ahead";
  ahead.ended(a);
  ahead.ended(a);
  EXPECT_EQ(ahead.in_flight(), 4096u);
  EXPECT_TRUE(a.read.speculative) << "what it was for is known until its block is in place";
  ahead.ended(b);
}

TEST_F(PagerReadaheadQueue, SoMuchIsReadAtOnceAndOneBlockInAnyCase) {
  EXPECT_TRUE(ahead.may_start(4096, 100));
  ahead.started(move());
  EXPECT_FALSE(ahead.may_start(4096, 100));
  EXPECT_FALSE(ahead.may_start(4096, 2 * 4096 - 1));
  EXPECT_TRUE(ahead.may_start(4096, 2 * 4096));
}

TEST_F(PagerReadaheadQueue, TheCheckSeesAReadThatEndedAndIsCountedStill) {
  Transition& m = move();
  ahead.started(m);
  m.begun_ns = 0;
  EXPECT_NE(ahead.check(transitions).find("a move is over"), std::string::npos) << ahead.check(transitions);
  m.begun_ns = 1;
  m.read.reads_ahead = false;
  EXPECT_NE(ahead.check(transitions).find("moves have 0"), std::string::npos) << ahead.check(transitions);
  m.read.reads_ahead = true;
}

TEST_F(PagerReadaheadQueue, NoMoreThanKMostWait) {
  for (size_t i = 0; i < ReadaheadQueue::kMost; ++i) ASSERT_TRUE(add(one, i, 1, 1));
  EXPECT_FALSE(add(one, 0, 1, 1));
  ahead.pop();
  EXPECT_TRUE(add(one, 0, 1, 1));
}

TEST_F(PagerReadaheadQueue, AWindowIsTakenBlockByBlockInItsStride) {
  ASSERT_TRUE(add(one, 100, -3, 4));
  ahead.front().advance(1);
  EXPECT_EQ(ahead.front().next, 97u);
  EXPECT_EQ(ahead.front().count, 3u);
  ahead.front().advance(2);
  EXPECT_EQ(ahead.front().next, 91u);
  EXPECT_EQ(ahead.front().count, 1u);
}

TEST_F(PagerReadaheadQueue, WhatAReaderHasPassedIsNotReadAnyMore) {
  ASSERT_TRUE(add(one, 100, 1, 50));
  ahead.forget(one, {100, 1, 20});
  EXPECT_EQ(ahead.front().next, 120u);
  EXPECT_EQ(ahead.front().count, 30u);
  ahead.forget(one, {110, 1, 10});
  EXPECT_EQ(ahead.front().next, 120u) << "it ends before what is left";
  ahead.forget(one, {100, 1, 1000});
  EXPECT_EQ(ahead.front().count, 0u) << "all of it";
}

TEST_F(PagerReadaheadQueue, OtherStridesOtherRegionsAndPrefetchesAreLeft) {
  ASSERT_TRUE(add(one, 100, 2, 50));
  ASSERT_TRUE(add(one, 100, 1, 50, Urgency::prefetch));
  ASSERT_TRUE(add(other, 100, 1, 50));
  ahead.forget(one, {100, 1, 20});
  ahead.forget(one, {101, 2, 20});
  ahead.forget(one, {100, 1, 0});
  for (; !ahead.empty(); ahead.pop()) {
    EXPECT_EQ(ahead.front().next, 100u);
    EXPECT_EQ(ahead.front().count, 50u);
  }
}

TEST_F(PagerReadaheadQueue, ARegionThatGoesTakesItsWindowsAlong) {
  ASSERT_TRUE(add(one, 1, 1, 1));
  ASSERT_TRUE(add(other, 2, 1, 1));
  ASSERT_TRUE(add(one, 3, 1, 1));
  ahead.forget(one);
  ASSERT_EQ(ahead.size(), 1u);
  EXPECT_EQ(ahead.front().region, &other);
}

}  // namespace
}  // namespace vmem::pager::test
