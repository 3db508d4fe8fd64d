// Charges of a device's memory: never above its budget; leaving, waiting and leased bytes add up.
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "memory/device_budget.h"

namespace {

using vmem::pager::DeviceBudget;

constexpr uint64_t kBlock = 2 << 20;

uint64_t blocks(uint64_t n) {
  return n * kBlock;
}

class PagerDeviceBudget : public ::testing::Test {
 protected:
  // Charges n blocks that come to the device.
  void charge(uint64_t n) {
    for (uint64_t i = 0; i < n; ++i) {
      ASSERT_TRUE(budget.fits(kBlock));
      budget.charge(kBlock);
    }
  }
  DeviceBudget budget;
};

TEST_F(PagerDeviceBudget, NothingFitsBeforeTheDeviceIsUsed) {
  EXPECT_FALSE(budget.begun());
  EXPECT_FALSE(budget.fits(1));
  EXPECT_TRUE(budget.idle());
  EXPECT_EQ(budget.missing(), 0u);
  EXPECT_EQ(budget.check(0, 0), "");
  budget.begin(blocks(3) + 17, blocks(1));
  EXPECT_TRUE(budget.begun());
  EXPECT_EQ(budget.limit(), blocks(3)) << "whole pieces";
  budget.begin(5, blocks(1));
  EXPECT_EQ(budget.limit(), blocks(1)) << "one at least";
}

TEST_F(PagerDeviceBudget, ChargesStayWithinIt) {
  budget.begin(blocks(4), blocks(1));
  charge(4);
  EXPECT_FALSE(budget.fits(1));
  EXPECT_FALSE(budget.idle());
  EXPECT_EQ(budget.check(blocks(4), 0), "");
  budget.credit(kBlock);
  EXPECT_TRUE(budget.fits(kBlock));
  EXPECT_EQ(budget.charged(), blocks(3));
  EXPECT_EQ(budget.check(blocks(3), 0), "");
}

TEST_F(PagerDeviceBudget, WhatIsFreedIsChargedUntilItIsNobodys) {
  budget.begin(blocks(4), blocks(1));
  charge(4);
  budget.frees(blocks(3));
  EXPECT_FALSE(budget.fits(1));
  EXPECT_EQ(budget.check(blocks(1), 0), "") << "no table has them";
  EXPECT_NE(budget.check(blocks(4), 0), "");
  budget.want(blocks(3));
  EXPECT_EQ(budget.missing(), 0u) << "they make that room";
  budget.freed(blocks(3));
  EXPECT_TRUE(budget.fits(blocks(3)));
  EXPECT_EQ(budget.check(blocks(1), 0), "");
}

TEST_F(PagerDeviceBudget, WhatLeavesIsChargedUntilItHasLeft) {
  budget.begin(blocks(4), blocks(1));
  charge(4);
  budget.count_leaving(kBlock);
  budget.count_leaving(kBlock);
  EXPECT_FALSE(budget.fits(kBlock)) << "its memory is in use";
  budget.stays(kBlock);
  budget.left(kBlock);
  EXPECT_TRUE(budget.fits(kBlock));
  EXPECT_EQ(budget.charged(), blocks(3));
  EXPECT_EQ(budget.check(blocks(3), 0), "");
}

TEST_F(PagerDeviceBudget, WhoWaitsSaysHowMuchIsToLeave) {
  budget.begin(blocks(4), blocks(1));
  charge(3);
  budget.want(blocks(1));
  EXPECT_EQ(budget.missing(), 0u) << "there is room";
  budget.want(blocks(3));
  EXPECT_EQ(budget.missing(), blocks(2));
  budget.count_leaving(kBlock);
  EXPECT_EQ(budget.missing(), blocks(1)) << "that leaves already";
  budget.want(0);
  EXPECT_EQ(budget.missing(), 0u);
  budget.stays(kBlock);
  EXPECT_EQ(budget.check(blocks(3), 0), "");
}

TEST_F(PagerDeviceBudget, ABlockBetweenDevicesIsChargedToBoth) {
  DeviceBudget other;
  budget.begin(blocks(4), blocks(1));
  other.begin(blocks(4), blocks(1));
  charge(2);
  for (int i = 0; i < 2; ++i) {
    budget.count_leaving(kBlock, true);
    other.charge(kBlock);
  }
  // Tables name the device that the block goes to.
  EXPECT_EQ(budget.check(0, 0), "");
  EXPECT_EQ(other.check(blocks(2), 0), "");
  budget.left(kBlock, true);
  EXPECT_EQ(budget.charged(), kBlock);
  budget.stays(kBlock, true);
  other.credit(kBlock);
  EXPECT_EQ(budget.check(kBlock, 0), "");
  EXPECT_EQ(other.check(kBlock, 0), "");
}

TEST_F(PagerDeviceBudget, WhatALoweredBudgetHasNoRoomForIsToLeave) {
  budget.begin(blocks(8), blocks(1));
  charge(6);
  budget.set(blocks(2));
  EXPECT_EQ(budget.limit(), blocks(2));
  EXPECT_FALSE(budget.fits(kBlock));
  EXPECT_TRUE(budget.over());
  EXPECT_EQ(budget.missing(), blocks(4));
  EXPECT_EQ(budget.check(blocks(6), 0), "") << "it says so";
  EXPECT_FALSE(budget.must_trim()) << "blocks first";
  for (int i = 0; i < 4; ++i) budget.count_leaving(kBlock);
  EXPECT_FALSE(budget.over()) << "enough leave";
  EXPECT_EQ(budget.missing(), 0u);
  for (int i = 0; i < 4; ++i) budget.left(kBlock);
  EXPECT_TRUE(budget.must_trim()) << "then what the device keeps for others";
  budget.trimmed(blocks(3));
  EXPECT_TRUE(budget.must_trim()) << "it was lowered again since";
  budget.trimmed(blocks(2));
  EXPECT_FALSE(budget.must_trim());
  EXPECT_EQ(budget.check(blocks(2), 0), "");
}

TEST_F(PagerDeviceBudget, BlocksMakeRoomForOthersWhereTheDeviceHasNoMoreMemory) {
  budget.begin(blocks(8), blocks(1));
  charge(5);
  EXPECT_TRUE(budget.follow_down(0));
  EXPECT_EQ(budget.limit(), blocks(5));
  EXPECT_EQ(budget.budget(), blocks(8)) << "what somebody wants it to be";
  EXPECT_TRUE(budget.is_short());
  EXPECT_FALSE(budget.fits(kBlock));
  budget.want(blocks(2));
  EXPECT_EQ(budget.missing(), blocks(2));
  EXPECT_FALSE(budget.over());
  EXPECT_FALSE(budget.follow_down(0)) << "no less than that";
  EXPECT_TRUE(budget.room_for_lease(blocks(8))) << "others may give their memory back";
  EXPECT_EQ(budget.check(blocks(5), 0), "");
}

TEST_F(PagerDeviceBudget, WhatNoBlockHasIsThereForTheNext) {
  budget.begin(blocks(8), blocks(1));
  charge(3);
  EXPECT_TRUE(budget.follow_down(blocks(2) + 5));
  EXPECT_EQ(budget.limit(), blocks(5));
  EXPECT_FALSE(budget.follow_down(blocks(9)));
  EXPECT_EQ(budget.limit(), blocks(5));
}

TEST_F(PagerDeviceBudget, MemoryThatComesFreeAgainIsForBlocksUpToTheBudget) {
  budget.begin(blocks(8), blocks(1));
  EXPECT_TRUE(budget.follow_down(0));
  EXPECT_EQ(budget.limit(), blocks(1)) << "one at least: it is tried again";
  EXPECT_FALSE(budget.idle()) << "somebody has to look for more";
  EXPECT_FALSE(budget.follow_up(0));
  EXPECT_TRUE(budget.follow_up(blocks(3) + 5));
  EXPECT_EQ(budget.limit(), blocks(3));
  EXPECT_FALSE(budget.follow_up(blocks(2))) << "blocks may be on their way";
  EXPECT_TRUE(budget.follow_up(blocks(100)));
  EXPECT_EQ(budget.limit(), blocks(8));
  EXPECT_FALSE(budget.is_short());
  EXPECT_TRUE(budget.idle());
  EXPECT_FALSE(budget.follow_up(blocks(100)));
  charge(8);
  budget.credit(blocks(4));
  EXPECT_TRUE(budget.follow_down(0));
  budget.set(blocks(6));
  EXPECT_EQ(budget.limit(), blocks(6)) << "tried again";
}

TEST_F(PagerDeviceBudget, LeasesFitNowOrOnceOthersHaveEnded) {
  budget.begin(blocks(8), blocks(1));
  budget.count_leases(blocks(6), 0, true);
  EXPECT_TRUE(budget.room_for_lease(blocks(2)));
  EXPECT_FALSE(budget.room_for_lease(blocks(3)));
  EXPECT_FALSE(budget.room_once_ended(blocks(3)));
  budget.count_leases(0, blocks(4), true);
  EXPECT_EQ(budget.leased(), blocks(6));
  EXPECT_EQ(budget.live(), blocks(2));
  EXPECT_FALSE(budget.room_for_lease(blocks(3)));
  EXPECT_TRUE(budget.room_once_ended(blocks(6)));
  EXPECT_FALSE(budget.room_once_ended(blocks(7)));
  budget.count_leases(blocks(4), blocks(4), false);
  EXPECT_EQ(budget.leased(), blocks(2));
  EXPECT_EQ(budget.live(), blocks(2));
  EXPECT_EQ(budget.check(0, blocks(2)), "");
}

TEST_F(PagerDeviceBudget, ADeviceThatKeepsMemoryIsNotIdle) {
  budget.begin(blocks(8), blocks(1));
  charge(1);
  budget.credit(kBlock);
  EXPECT_TRUE(budget.idle());
  budget.set_keeps(true);
  EXPECT_FALSE(budget.idle());
  budget.set_keeps(false);
  EXPECT_TRUE(budget.idle());
}

TEST_F(PagerDeviceBudget, ADeviceRestsWhenNothingHasComeForAWhile) {
  budget.begin(blocks(8), blocks(1));
  charge(2);
  for (int n = 0; n < 5; ++n) {
    budget.looked();
    EXPECT_FALSE(budget.rests()) << n;
  }
  charge(1);
  budget.looked();
  EXPECT_FALSE(budget.rests()) << "something came meanwhile";
  for (int n = 0; n < 5; ++n) budget.looked();
  EXPECT_TRUE(budget.rests());
  budget.credit(blocks(3));
  charge(1);
  budget.credit(blocks(1));
  budget.looked();
  EXPECT_FALSE(budget.rests()) << "it went just now";
  budget.looked();
  EXPECT_TRUE(budget.rests()) << "nothing is there";
}

TEST_F(PagerDeviceBudget, TheCheckSeesWhatDoesNotAddUp) {
  budget.begin(blocks(2), blocks(1));
  charge(2);
  EXPECT_EQ(budget.check(blocks(1), 0), "used 4194304, counted 2097152; leased 0, counted 0");
  EXPECT_EQ(budget.check(blocks(2), 1), "used 4194304, counted 4194304; leased 0, counted 1");
  budget.charge(kBlock);
  EXPECT_EQ(budget.check(blocks(3), 0), "used 6291456 of a budget of 4194304");
  budget.credit(kBlock);
  budget.count_leaving(blocks(3));
  EXPECT_EQ(budget.check(blocks(2), 0), "0 bytes go to other devices, 0 are freed, 6291456 leave, 4194304 are used");
  budget.stays(blocks(3));
  budget.count_leases(0, 1, true);
  EXPECT_EQ(budget.check(blocks(2), 0), "0 leased, 1 ending");
}

// Blocks come, leave and turn back, and the budget changes, in any order.
TEST_F(PagerDeviceBudget, AddsUpInALongMix) {
  std::mt19937 random(11);
  budget.begin(blocks(32), blocks(1));
  uint64_t there = 0, leaving = 0;
  for (int n = 0; n < 20000; ++n) {
    switch (random() % 7) {
      case 0:
      case 1:
        if (budget.fits(kBlock)) {
          budget.charge(kBlock);
          ++there;
        }
        break;
      case 2:
        if (leaving < there) {
          budget.count_leaving(kBlock);
          ++leaving;
        }
        break;
      case 3:
        if (leaving != 0) {
          budget.left(kBlock);
          --leaving, --there;
        }
        break;
      case 4:
        if (leaving != 0) {
          budget.stays(kBlock);
          --leaving;
        }
        break;
      case 5:
        if (random() % 50 == 0) budget.follow_down(blocks(random() % 3));
        if (random() % 20 == 0) budget.follow_up(blocks(random() % 40));
        break;
      default:
        if (random() % 50 == 0) budget.set(blocks(1 + random() % 40));
        if (budget.must_trim()) budget.trimmed(budget.limit());
    }
    ASSERT_EQ(budget.check(blocks(there), 0), "") << n;
    ASSERT_EQ(budget.over(), blocks(there - leaving) > budget.limit()) << n;
    ASSERT_EQ(budget.missing(), budget.over() ? blocks(there - leaving) - budget.limit() : 0) << n;
  }
}

}  // namespace
