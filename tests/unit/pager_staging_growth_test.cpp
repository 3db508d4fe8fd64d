// Staging frames are made while their share of the budget has room, by one thread at a time; a
// refusal is retried later.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <memory>
#include <vector>

#include "device/sim/sim_device.h"
#include "memory/host_budget.h"
#include "memory/staging.h"
#include "pager/account/staging_growth.h"

namespace vmem::pager::test {
namespace {

using memory::HostBudget;
using memory::Staging;

constexpr uint64_t kMiB = 1 << 20, kNow = 1000000000;
constexpr uint64_t kFrame = 2 * kMiB;

class PagerStagingGrowth : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(device::make_sim_devices({}, &devices).ok());
    staging = std::make_unique<Staging>(budget, kFrame);
    growth = std::make_unique<StagingGrowth>(*staging, budget, 50);
  }
  void TearDown() override { EXPECT_EQ(growth->check(kNow), ""); }
  // Addresses only: no thread stores to them.
  void add(size_t frames) {
    ASSERT_TRUE(staging->reserve(frames, 0));
    void* at = mmap(nullptr, frames * kFrame, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    ASSERT_NE(at, MAP_FAILED);
    staging->add_slab(*devices, {static_cast<std::byte*>(at), frames * kFrame, nullptr});
  }
  // Takes all frames but `frames`.
  void leave(size_t frames) {
    while (staging->free() > frames) taken.push_back(staging->get(0));
    while (staging->free() < frames) {
      staging->put(taken.back());
      taken.pop_back();
    }
  }

  std::unique_ptr<device::SimDevices> devices;
  HostBudget budget{256 * kMiB};
  std::unique_ptr<Staging> staging;
  std::unique_ptr<StagingGrowth> growth;
  std::vector<std::byte*> taken;
};

TEST_F(PagerStagingGrowth, TheShareOfTheBudgetIsTheMost) {
  EXPECT_EQ(growth->take(1000), staging->slab_frames()) << "so many at once";
  EXPECT_EQ(growth->take(3), 3u);
  add(50);
  EXPECT_EQ(growth->take(1000), 14u) << "128 MiB are 64 frames";
  EXPECT_TRUE(growth->has_room());
  add(11);
  EXPECT_EQ(growth->take(1000), 3u);
  EXPECT_FALSE(growth->has_room()) << "a few at least, or it is not worth it";
  growth->set_share(90);
  EXPECT_TRUE(growth->has_room());
  growth->set_share(10);
  EXPECT_EQ(growth->take(1000), 0u) << "they have more than that already";
  EXPECT_FALSE(growth->has_room());
}

TEST_F(PagerStagingGrowth, ALoweredBudgetLeavesTheCpuItsPart) {
  growth->set_share(90);
  budget.set(40 * kMiB);
  EXPECT_EQ(growth->take(1000), 12u) << "16 MiB are for the CPU, whatever the share";
  budget.set(20 * kMiB);
  EXPECT_EQ(growth->take(1000), 5u) << ".. or half of what there is";
}

TEST_F(PagerStagingGrowth, FramesAreMadeWhenSomebodyFoundNone) {
  EXPECT_FALSE(growth->due(kNow));
  growth->want();
  EXPECT_TRUE(growth->due(kNow));
  EXPECT_TRUE(growth->grows());
  EXPECT_EQ(growth->take(4), 4u);
  EXPECT_FALSE(growth->due(kNow)) << "they are being seen to";
  growth->begin();
  growth->want();
  EXPECT_FALSE(growth->due(kNow)) << "one at a time";
  EXPECT_EQ(growth->take(4), 0u);
  growth->want();
  growth->end(true, kNow);
  EXPECT_TRUE(growth->due(kNow)) << "one more was wanted meanwhile";
}

// The last frames of the share are charged before they exist.
TEST_F(PagerStagingGrowth, NobodyGivesUpAFrameWhileMoreAreMade) {
  add(32);
  leave(0);
  growth->want();
  const size_t last = growth->take(1000);
  ASSERT_EQ(last, 32u);
  ASSERT_TRUE(staging->reserve(last, 0));
  growth->begin();
  EXPECT_FALSE(growth->has_room());
  EXPECT_TRUE(growth->grows()) << "who finds none waits for these";
  EXPECT_FALSE(growth->blocks_must_leave(0));
  staging->unreserve(last);
  growth->end(false, kNow);
  EXPECT_FALSE(growth->grows()) << "they could not be made";
  growth->want();
  EXPECT_TRUE(growth->blocks_must_leave(0));
}

TEST_F(PagerStagingGrowth, WhatTheBudgetRefusedIsTriedAgainSoon) {
  growth->want();
  ASSERT_NE(growth->take(4), 0u);
  growth->no_room(kNow);
  EXPECT_FALSE(growth->grows());
  EXPECT_TRUE(growth->has_room()) << "the share has, the budget had not";
  EXPECT_FALSE(growth->due(kNow + StagingGrowth::kAgain - 1));
  EXPECT_FALSE(growth->may_try_again(kNow + StagingGrowth::kAgain - 1));
  EXPECT_TRUE(growth->due(kNow + StagingGrowth::kAgain)) << "it is wanted still";
  EXPECT_TRUE(growth->may_try_again(kNow + StagingGrowth::kAgain));
}

TEST_F(PagerStagingGrowth, WhatTheMachineRefusedIsTriedAgainLater) {
  growth->want();
  ASSERT_NE(growth->take(4), 0u);
  growth->begin();
  growth->end(false, kNow);
  EXPECT_FALSE(growth->growing() || growth->grows());
  EXPECT_FALSE(growth->due(kNow + StagingGrowth::kLater)) << "nobody wants any";
  growth->want();
  EXPECT_FALSE(growth->due(kNow + StagingGrowth::kLater - 1));
  EXPECT_TRUE(growth->due(kNow + StagingGrowth::kLater));
  growth->begin();
  growth->end(true, kNow + StagingGrowth::kLater);
  EXPECT_TRUE(growth->grows());
  EXPECT_EQ(growth->check(kNow - 1), "staging frames are made later than they may be");
}

TEST_F(PagerStagingGrowth, SomeAreKeptForTheWayOut) {
  EXPECT_EQ(growth->reserve(), 2u) << "also before there are any";
  add(20);
  EXPECT_EQ(growth->reserve(), 5u);
  growth->set_share(90);
  add(80);
  EXPECT_EQ(growth->reserve(), 16u) << "a batch";
}

TEST_F(PagerStagingGrowth, BlocksLeaveStagingFramesWhenFewAreFreeAndNoMoreCome) {
  EXPECT_FALSE(growth->blocks_must_leave(0)) << "there are none that anybody could leave";
  add(60);
  leave(0);
  EXPECT_FALSE(growth->blocks_must_leave(0)) << "more can be made";
  growth->want();
  growth->no_room(kNow);
  EXPECT_TRUE(growth->blocks_must_leave(0)) << "they could not";
  add(2);
  growth->end(true, kNow);
  leave(0);
  EXPECT_TRUE(growth->blocks_must_leave(0)) << "the share is used up";
  const uint64_t low = 2 * growth->reserve();
  leave(low);
  EXPECT_FALSE(growth->blocks_must_leave(0));
  leave(low - 1);
  EXPECT_TRUE(growth->blocks_must_leave(0));
  EXPECT_FALSE(growth->blocks_must_leave(kFrame)) << "one leaves already";
}

}  // namespace
}  // namespace vmem::pager::test
