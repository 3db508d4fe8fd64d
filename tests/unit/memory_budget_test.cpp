// The host budget beside idle memory that a test provides.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "memory/host_budget.h"

namespace vmem::memory {
namespace {

// Idle frames and buffers as plain numbers; records who was asked for how much.
class FakeIdle final : public IdleMemory {
 public:
  explicit FakeIdle(HostBudget& budget) : budget_(budget) { budget_.set_idle(this); }
  uint64_t release_frames(uint64_t bytes) override {
    asked_frames += bytes;
    const uint64_t n = std::min(bytes, frames);
    frames -= n;
    budget_.credit(n, Use::idle);
    return n;
  }
  uint64_t release_buffers(uint64_t bytes) override {
    asked_buffers += bytes;
    const uint64_t n = std::min(bytes, buffers);
    buffers -= n;
    budget_.credit(n, Use::buffers);
    return n;
  }
  // Turns a part of the blocks' charge into free frames.
  void put_frames(uint64_t bytes) {
    frames += bytes;
    budget_.credit_idle(bytes);
  }
  bool add_buffers(uint64_t bytes) {
    if (!budget_.charge(bytes, 0, Use::buffers)) return false;
    buffers += bytes;
    return true;
  }

  uint64_t frames = 0, buffers = 0;  // idle
  uint64_t asked_frames = 0, asked_buffers = 0;

 private:
  HostBudget& budget_;
};

class MemoryBudget : public ::testing::Test {
 protected:
  void TearDown() override { EXPECT_EQ(budget.check(), ""); }

  HostBudget budget{1000};
  FakeIdle idle{budget};
};

TEST_F(MemoryBudget, ChargesEndWithTheBudget) {
  EXPECT_TRUE(budget.charge(600, 0));
  EXPECT_TRUE(budget.charge(300, 0, Use::fixed));
  EXPECT_FALSE(budget.charge(101, 0));
  EXPECT_FALSE(budget.charge(101, 0, Use::buffers));
  EXPECT_TRUE(budget.charge(100, 0, Use::buffers));
  EXPECT_EQ(budget.charged(), 1000u);
  EXPECT_EQ(budget.overhead(), 400u);
  EXPECT_EQ(budget.available(), 0u);
  budget.credit(300, Use::fixed);
  EXPECT_EQ(budget.available(), 300u);
  EXPECT_EQ(budget.charged(Use::blocks), 600u);
}

TEST_F(MemoryBudget, AReserveIsKeptFromThoseWhoRespectIt) {
  EXPECT_FALSE(budget.charge(801, 200));
  EXPECT_TRUE(budget.charge(800, 200));
  EXPECT_FALSE(budget.charge(1, 200));
  EXPECT_TRUE(budget.charge(200, 0));
}

TEST_F(MemoryBudget, FreeFramesAndIdleBuffersGiveWay) {
  ASSERT_TRUE(idle.add_buffers(300));
  ASSERT_TRUE(budget.charge(700, 0));
  idle.put_frames(500);
  EXPECT_EQ(budget.in_use(), 500u);
  EXPECT_TRUE(budget.charge(400, 0));
  EXPECT_EQ(idle.frames, 100u) << "of free frames as much went as was needed";
  EXPECT_EQ(idle.buffers, 300u) << "idle buffers went only where frames do not suffice";
  EXPECT_TRUE(budget.charge(300, 0));
  EXPECT_EQ(idle.buffers, 100u);
  EXPECT_EQ(idle.frames, 0u);
  EXPECT_EQ(budget.charged(), 1000u);
  EXPECT_FALSE(budget.charge(200, 0)) << "that is more than is idle";
}

TEST_F(MemoryBudget, AFreeFrameIsHandedOutWithinTheReserveOnly) {
  ASSERT_TRUE(budget.charge(900, 0));
  idle.put_frames(400);
  EXPECT_FALSE(budget.charge_idle(400, 200)) << "500 + 400 + 200";
  EXPECT_TRUE(budget.charge_idle(400, 100));
  EXPECT_EQ(budget.charged(), 900u) << "it was charged before";
  EXPECT_EQ(budget.charged(Use::idle), 0u);
  idle.frames = 0;
}

TEST_F(MemoryBudget, TheSmallestOfBudgetCapAndCeilingIsInForce) {
  budget.set_cap(700);
  EXPECT_TRUE(budget.capped());
  EXPECT_EQ(budget.limit(), 700u);
  budget.set_ceiling(600);
  EXPECT_EQ(budget.limit(), 600u);
  EXPECT_EQ(budget.wanted(), 1000u);
  EXPECT_FALSE(budget.charge(601, 0));
  budget.lift_cap();
  EXPECT_FALSE(budget.capped());
  EXPECT_EQ(budget.limit(), 600u);
  budget.set(500);
  EXPECT_EQ(budget.limit(), 500u);
  budget.set_ceiling(UINT64_MAX);
  budget.set(2000);
  EXPECT_TRUE(budget.charge(2000, 0));
}

TEST_F(MemoryBudget, AfterItWasLoweredNothingIsChargedUntilCreditsHaveCaughtUp) {
  ASSERT_TRUE(budget.charge(1000, 0));
  budget.set_cap(400);
  EXPECT_TRUE(budget.over());
  EXPECT_EQ(budget.available(), 0u);
  EXPECT_FALSE(budget.charge(1, 0));
  EXPECT_FALSE(budget.charge_idle(0, 1));
  EXPECT_EQ(budget.check(), "") << "it was lowered: that is known";
  budget.credit(600);
  EXPECT_FALSE(budget.over());
  EXPECT_FALSE(budget.charge(1, 0));
  budget.credit(1);
  EXPECT_TRUE(budget.charge(1, 0));
}

TEST_F(MemoryBudget, TrimTakesFramesThenBuffers) {
  ASSERT_TRUE(idle.add_buffers(200));
  ASSERT_TRUE(budget.charge(800, 0));
  idle.put_frames(300);
  budget.set(600);
  budget.trim();
  EXPECT_EQ(idle.frames, 0u);
  EXPECT_EQ(idle.buffers, 100u);
  EXPECT_EQ(budget.charged(), 600u);
  idle.asked_frames = idle.asked_buffers = 0;
  budget.trim();
  EXPECT_EQ(idle.asked_frames + idle.asked_buffers, 0u) << "within the budget nobody is asked";
}

TEST_F(MemoryBudget, TablesMakeRoomAmongWhatIsIdleAndMayStandAboveTheBudget) {
  ASSERT_TRUE(budget.charge(1000, 0));
  idle.put_frames(200);
  budget.set_tables(150);
  EXPECT_EQ(idle.frames, 50u);
  EXPECT_EQ(budget.charged(), 1000u);
  budget.set_tables(350);
  EXPECT_EQ(idle.frames, 0u);
  EXPECT_EQ(budget.charged(), 1150u);
  EXPECT_FALSE(budget.charge(1, 0));
  EXPECT_EQ(budget.check(), "");
  budget.set_tables(0);
  EXPECT_EQ(budget.charged(), 800u);
}

TEST_F(MemoryBudget, WithoutIdleMemoryNobodyIsAsked) {
  HostBudget alone(100);
  EXPECT_TRUE(alone.charge(100, 0));
  EXPECT_FALSE(alone.charge(1, 0));
  alone.trim();
  EXPECT_EQ(alone.check(), "");
}

TEST_F(MemoryBudget, TheCheckSeesACreditThatNobodyWasChargedFor) {
  HostBudget wrong(100);
  ASSERT_TRUE(wrong.charge(50, 0));
  wrong.credit(20, Use::fixed);
  EXPECT_NE(wrong.check().find("fixed memory"), std::string::npos) << wrong.check();
}

// Invariants after each of many random calls: charges exceed the budget only after it was lowered,
// and every refusal had a reason.
TEST_F(MemoryBudget, ChargesNeverExceedTheBudgetWhateverHappens) {
  std::mt19937 random(11);
  for (int n = 0; n < 20000; ++n) {
    const uint64_t bytes = random() % 300, reserve = random() % 2 == 0 ? 0 : 100;
    const uint64_t before = budget.charged();
    switch (random() % 6) {
      case 0:
      case 1: {
        const uint64_t room = budget.in_use() - idle.buffers;  // the least charge to compare with: without idle buffers
        const bool charged = budget.charge(bytes, reserve);
        ASSERT_EQ(charged, room + bytes + reserve <= budget.limit()) << n;
        if (charged) {
          ASSERT_LE(budget.charged() + reserve, budget.limit()) << n;
        }
        break;
      }
      case 2:
        budget.credit(std::min(bytes, budget.charged(Use::blocks)));
        break;
      case 3:
        idle.put_frames(std::min(bytes, budget.charged(Use::blocks)));
        break;
      case 4:
        idle.add_buffers(bytes / 4);
        break;
      default:
        if (const uint64_t free = std::min(bytes, idle.frames); budget.charge_idle(free, reserve)) idle.frames -= free;
        break;
    }
    ASSERT_EQ(budget.check(), "") << n;
    ASSERT_EQ(budget.charged(Use::idle), idle.frames) << n;
    ASSERT_LE(budget.charged(), std::max(before, budget.limit())) << n;
  }
}

}  // namespace
}  // namespace vmem::memory
