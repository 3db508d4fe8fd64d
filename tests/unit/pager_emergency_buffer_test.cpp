#include <gtest/gtest.h>

#include <array>
#include <cerrno>

#include "edit_block.h"
#include "pager/host/emergency_buffer.h"
#include "pager_parts.h"

namespace vmem::pager::test {
namespace {

using core::BigMutex;

struct SpareCopyTest : testing::Test {
  bool take(Transition* m) {
    const BigLock lock(mutex);
    return spare.take(m);
  }
  bool idle() {
    const BigLock lock(mutex);
    return spare.idle();
  }
  BigMutex mutex;
  EmergencyBuffer spare;
};

TEST_F(SpareCopyTest, OneHasItAndOthersFollowInOrder) {
  Transition first, second, third;
  EXPECT_TRUE(take(&first));
  EXPECT_FALSE(take(&second));
  EXPECT_FALSE(take(&third));
  std::byte* const at = spare.memory(4096);
  ASSERT_NE(at, nullptr);
  EXPECT_EQ(spare.pass(mutex), &second);
  EXPECT_FALSE(idle());
  EXPECT_EQ(spare.memory(4096), at) << "the same memory serves the next block of its size";
  EXPECT_EQ(spare.pass(mutex), &third);
  std::byte* const larger = spare.memory(65536);
  ASSERT_NE(larger, nullptr);
  larger[65535] = std::byte{1};
  EXPECT_EQ(spare.pass(mutex), nullptr);
  EXPECT_TRUE(idle());
  EXPECT_TRUE(take(&first));
  EXPECT_EQ(spare.pass(mutex), nullptr) << "it may be given back without memory ever";
}

TEST_F(SpareCopyTest, MoreThanTheKernelHasIsRefused) {
  Transition m;
  EXPECT_TRUE(take(&m));
  EXPECT_EQ(spare.memory(size_t{1} << 60), nullptr);
  EXPECT_NE(spare.memory(4096), nullptr);
  EXPECT_EQ(spare.pass(mutex), nullptr);
  EXPECT_TRUE(idle());
}

TEST_F(SpareCopyTest, WhoeverNeedsItNoMoreIsNotInTheWay) {
  std::array<Transition, 4> transitions;
  EXPECT_TRUE(take(&transitions[0]));
  for (size_t i = 1; i < transitions.size(); ++i) EXPECT_FALSE(take(&transitions[i]));
  {
    const BigLock lock(mutex);
    auto out = spare.give_up([&](const Transition& m) { return &m != &transitions[2]; });
    EXPECT_EQ(out.pop(), &transitions[1]);
    EXPECT_EQ(out.pop(), &transitions[3]);
    EXPECT_TRUE(out.empty());
  }
  EXPECT_EQ(spare.pass(mutex), &transitions[2]);
  EXPECT_EQ(spare.pass(mutex), nullptr);
}

class SpareCopies : public PagerParts {};

TEST_F(SpareCopies, ABlockThatSomebodyWantsDoesNotWaitForTheTurnOfOthers) {
  auto& r = region(64);
  std::array<Transition*, 3> batch = {};
  for (size_t b = 0; b < batch.size(); ++b) {
    bring(r, b);
    put(r, b, 7 + b);
  }
  engine.hold(Io::Op::write, true);
  engine.fail(Io::Op::write, EFAULT);
  {
    BigLock lock(map.mutex());
    budget.set(budget.charged());  // no frame for a copy
    for (size_t b = 0; b < batch.size(); ++b) {
      map.withdraw(r.table[b].aux);
      batch[b] = isolator.begin_take(r, b, false, false);
      ASSERT_NE(batch[b], nullptr);
    }
  }
  write_back.evict_batch(batch);
  engine.until_held(3);
  engine.let_go();
  engine.until_held(1);  // the first, from its copy
  engine.until_count(Io::Op::write, 3);
  engine.fail(Io::Op::write, 0);
  {
    BigLock lock(map.mutex());
    edit(r.table, 2).flags |= core::kFaultPending;
  }
  engine.let_go();
  engine.until_count(Io::Op::write, 4);
  engine.until_held(1);  // the second
  EXPECT_EQ(state(r, 0), State::stored);
  EXPECT_EQ(state(r, 1), State::writing_back);
  EXPECT_EQ(state(r, 2), State::resident);
  engine.hold(Io::Op::write, false);
  engine.let_go();
  engine.until_idle();
  EXPECT_EQ(state(r, 1), State::stored);
  uint64_t value = 0;
  ASSERT_TRUE(trap.load(r.address(2), &value));
  EXPECT_EQ(value, 9u);
  BigLock lock(map.mutex());
  budget.set(kBudget);
  writeback_throttle.has_room();
}

}  // namespace
}  // namespace vmem::pager::test
