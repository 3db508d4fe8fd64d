// Blocks that wait for memory: each is queued once, faults before acquires, and marked while it
// waits.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "edit_block.h"
#include "pager/host/memory_waits.h"

namespace vmem::pager::test {
namespace {

class PagerMemoryWaitQueue : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(one.table.create(16).ok());
    ASSERT_TRUE(other.table.create(16).ok());
  }
  void TearDown() override { EXPECT_EQ(queue.check(), ""); }
  bool add(BlockIndex b, Urgency urgency, uint64_t since = 1) { return queue.add({&one, b, urgency, since, 0}); }
  bool fault(BlockIndex b, uint64_t since = 1) { return add(b, Urgency::fault, since); }
  bool acquire(BlockIndex b, uint64_t since = 1) { return add(b, Urgency::acquire, since); }
  bool marked(BlockIndex b) { return MemoryWaitQueue::marked(one.table[b]); }
  std::vector<BlockIndex> waiting() {
    std::vector<BlockIndex> blocks;
    for (const MemoryWaiter& s : queue) blocks.push_back(s.block);
    return blocks;
  }
  using Blocks = std::vector<BlockIndex>;

  Region one{16, 4}, other{16, 4};
  MemoryWaitQueue queue;
};

TEST_F(PagerMemoryWaitQueue, FaultsGoBeforeAcquiresAndKeepTheirOrder) {
  EXPECT_TRUE(acquire(1) && fault(2) && acquire(3) && fault(4));
  EXPECT_EQ(waiting(), (Blocks{2, 4, 1, 3}));
  for (const BlockIndex b : {1, 2, 3, 4}) EXPECT_TRUE(marked(b)) << b;
  EXPECT_FALSE(marked(5));
  EXPECT_FALSE(MemoryWaitQueue::marked(other.table[1]));
}

TEST_F(PagerMemoryWaitQueue, ABlockWaitsOnceAndAFaultTakesThePlaceOfAnAcquire) {
  EXPECT_TRUE(acquire(1, 10) && acquire(2, 20));
  EXPECT_TRUE(acquire(2, 30));
  EXPECT_EQ(waiting(), (Blocks{1, 2}));
  EXPECT_EQ(std::next(queue.begin())->since_ns, 20u) << "it waits since it came";
  EXPECT_TRUE(fault(2, 40));
  EXPECT_EQ(waiting(), (Blocks{2, 1}));
  EXPECT_EQ(queue.front().urgency, Urgency::fault);
  EXPECT_TRUE(acquire(2, 50));
  EXPECT_EQ(queue.front().urgency, Urgency::fault) << "an acquire adds nothing to a fault";
  EXPECT_TRUE(marked(2));
}

TEST_F(PagerMemoryWaitQueue, WhoWasServedIsMarkedNoMore) {
  EXPECT_TRUE(fault(1) && fault(2));
  queue.pop();
  EXPECT_EQ(waiting(), Blocks{2});
  EXPECT_FALSE(marked(1));
  EXPECT_TRUE(marked(2));
  EXPECT_TRUE(fault(1)) << "it may come again";
  EXPECT_EQ(waiting(), (Blocks{2, 1}));
}

TEST_F(PagerMemoryWaitQueue, WhoCannotBeServedWaitsFromNowOn) {
  EXPECT_TRUE(fault(1, 10) && fault(2, 20));
  queue.wait_again(99, 7);
  EXPECT_EQ(waiting(), (Blocks{2, 1}));
  const MemoryWaiter& last = *std::next(queue.begin());
  EXPECT_EQ(last.since_ns, 99u);
  EXPECT_EQ(last.mark, 7u);
  EXPECT_EQ(last.urgency, Urgency::fault);
}

TEST_F(PagerMemoryWaitQueue, AFaultThatCannotBeServedStaysBeforeAcquires) {
  EXPECT_TRUE(fault(1) && acquire(2) && acquire(3));
  queue.wait_again(99, 7);
  EXPECT_EQ(waiting(), (Blocks{1, 2, 3}));
  EXPECT_EQ(queue.front().since_ns, 99u);
  EXPECT_EQ(queue.check(), "");
  EXPECT_TRUE(fault(4));
  queue.wait_again(100, 8);
  EXPECT_EQ(waiting(), (Blocks{4, 1, 2, 3}));
}

TEST_F(PagerMemoryWaitQueue, WhatWasTakenOutStaysMarkedSoThatNobodyTriesItMeanwhile) {
  EXPECT_TRUE(fault(1) && fault(2));
  queue.take();
  EXPECT_EQ(waiting(), Blocks{2});
  EXPECT_TRUE(marked(1));
  EXPECT_TRUE(queue.accounts_for(one, 1));
  EXPECT_TRUE(acquire(1)) << "waits for what comes of it";
  EXPECT_EQ(waiting(), Blocks{2});
  queue.unmark(one, 1);
  EXPECT_FALSE(marked(1));
  EXPECT_FALSE(queue.accounts_for(one, 1));
  EXPECT_TRUE(queue.accounts_for(one, 2));
}

TEST_F(PagerMemoryWaitQueue, AnAcquireThatGivesUpLeavesTheOthers) {
  EXPECT_TRUE(acquire(1) && acquire(2));
  queue.give_up_acquire(one, 1);
  EXPECT_EQ(waiting(), Blocks{2});
  EXPECT_FALSE(marked(1));
  EXPECT_TRUE(marked(2));
}

TEST_F(PagerMemoryWaitQueue, AnAcquireThatGivesUpLeavesAFaultOfTheSameBlockMarked) {
  EXPECT_TRUE(acquire(1) && fault(1));
  queue.give_up_acquire(one, 1);
  EXPECT_EQ(waiting(), Blocks{1});
  EXPECT_TRUE(marked(1));
  EXPECT_EQ(queue.check(), "");
  EXPECT_TRUE(acquire(1));
  EXPECT_EQ(waiting(), Blocks{1}) << "no block waits twice";
  queue.take();
  queue.give_up_acquire(one, 1);
  EXPECT_TRUE(marked(1)) << "what comes of the fault is being said";
  queue.unmark(one, 1);
}

TEST_F(PagerMemoryWaitQueue, ARegionThatGoesTakesItsBlocksAlong) {
  EXPECT_TRUE(fault(1) && acquire(2));
  EXPECT_TRUE(queue.add({&other, 1, Urgency::fault, 1, 0}));
  queue.forget(one);
  ASSERT_EQ(queue.size(), 1u);
  EXPECT_EQ(queue.front().region, &other);
  EXPECT_TRUE(queue.accounts_for(other, 1));
}

TEST_F(PagerMemoryWaitQueue, TheCheckSeesAMarkThatIsMissing) {
  EXPECT_TRUE(fault(1));
  edit(one.table, 1).flags = 0;
  EXPECT_EQ(queue.check(), "a block waits for memory, and is not marked");
  EXPECT_TRUE(fault(1)) << "so that it waits twice";
  EXPECT_EQ(queue.check(), "a block waits for memory twice");
  queue.forget(one);
}

}  // namespace
}  // namespace vmem::pager::test
