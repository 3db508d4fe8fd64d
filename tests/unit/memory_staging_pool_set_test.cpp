// Staging frames of several sizes share one part of the budget; frames that no region needs are
// freed. More are made while the share has room, by one thread at a time; a refusal is retried
// later.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cerrno>
#include <memory>
#include <vector>

#include "device/sim/sim_device.h"
#include "memory/host_budget.h"
#include "memory/staging.h"
#include "memory/staging_pool_set.h"

namespace {

using vmem::core::Status;
using vmem::memory::HostBudget;
using vmem::memory::Staging;
using vmem::memory::StagingGrowth;
using vmem::memory::StagingPool;
using vmem::memory::StagingPoolSet;
using vmem::memory::Use;

constexpr uint64_t kMiB = 1 << 20, kNow = 1000000000;
constexpr uint64_t kFrame = 2 * kMiB;

// Adds frames that are addresses only: no thread stores to them.
void add_to(vmem::device::SimDevices& devices, Staging& to, size_t frames) {
  ASSERT_TRUE(to.reserve(frames, 0));
  const size_t size = frames * to.frame();
  void* at = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(at, MAP_FAILED);
  to.add_slab(devices, {static_cast<std::byte*>(at), size, nullptr});
}

class MemoryStagingPoolSet : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(vmem::device::make_sim_devices({}, &devices).ok()); }
  void add(StagingPool& pool, size_t frames) { add_to(*devices, pool.frames, frames); }

  std::unique_ptr<vmem::device::SimDevices> devices;
  HostBudget budget{256 * kMiB};
  StagingPoolSet pools{budget, 50};
  StagingPool& small = pools.of(2 * kMiB);
  StagingPool& large = pools.of(8 * kMiB);
};

TEST_F(MemoryStagingPoolSet, TheyShareTheirPartOfTheBudget) {
  small.regions = large.regions = 1;
  EXPECT_EQ(large.growth.take(1000), large.frames.slab_frames());
  add(small, 48);
  EXPECT_TRUE(large.growth.has_room()) << "32 of 128 MiB";
  EXPECT_EQ(large.growth.take(1000), 4u);
  add(small, 2);
  EXPECT_FALSE(large.growth.has_room());
  EXPECT_FALSE(pools.can_serve(8 * kMiB));
  EXPECT_TRUE(pools.can_serve(4 * kMiB));
  EXPECT_TRUE(pools.can_serve(2 * kMiB));
  EXPECT_EQ(small.growth.take(1000), 6u) << "16 of 28 MiB are for the first frames of 4 MiB";
}

TEST_F(MemoryStagingPoolSet, FramesThatNoRegionNeedsGiveWay) {
  small.regions = large.regions = 1;
  add(small, 30);
  add(small, 30);
  EXPECT_EQ(pools.unused(), nullptr);
  EXPECT_FALSE(pools.can_serve(8 * kMiB));
  small.regions = 0;
  EXPECT_TRUE(pools.can_serve(8 * kMiB));
  for (size_t left : {30u, 0u}) {
    ASSERT_EQ(pools.unused(), &small);
    const Staging::Slab slab = small.frames.take_slab();
    EXPECT_EQ(slab.size, 60 * kMiB);
    Staging::end_slab(*devices, slab);
    small.frames.unreserve(slab.size / small.frames.frame());
    EXPECT_EQ(small.frames.total(), left);
    EXPECT_EQ(small.frames.free(), left);
    EXPECT_EQ(budget.charged(Use::staging), left * 2 * kMiB);
  }
  EXPECT_EQ(pools.unused(), nullptr);
  EXPECT_EQ(small.frames.take_slab().at, nullptr);
  EXPECT_TRUE(large.growth.has_room());
}

// The driver may still copy to those addresses, whatever is mapped there.
TEST_F(MemoryStagingPoolSet, AddressesThatCannotBeUnpinnedAreGivenToNobody) {
  const size_t size = 2 * kMiB;
  for (const bool refused : {true, false}) {
    void* const at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(at, MAP_FAILED);
    ASSERT_TRUE(devices->pin(at, size).ok());
    devices->set_hook([refused](vmem::device::SimOp op, int, uintptr_t, size_t) {
      return refused && op == vmem::device::SimOp::unpin ? vmem::core::error(EIO, "as the test wants") : Status();
    });
    Staging::end_slab(*devices, {static_cast<std::byte*>(at), size, nullptr});
    devices->set_hook(nullptr);
    void* const again = mmap(at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    EXPECT_EQ(again == MAP_FAILED, refused);
    EXPECT_EQ(devices->unpin(at).ok(), refused) << "it is known as pinned";
    munmap(at, size);
  }
}

TEST_F(MemoryStagingPoolSet, SizesThatHaveNoneAreLeftRoomForTheFirst) {
  EXPECT_EQ(pools.kept(small.frames), 16 * kMiB) << "of 4 MiB; those of 8 would not fit in an eighth of 128";
  EXPECT_EQ(pools.kept(large.frames), 8 * kMiB) << "small ones first";
  add(large, 15);
  EXPECT_FALSE(large.growth.has_room());
  EXPECT_EQ(large.growth.take(1000), 0u) << "8 MiB are left, for others";
  EXPECT_TRUE(small.growth.has_room());
  EXPECT_EQ(small.growth.take(1000), 4u) << "which may have what is left for them";
  StagingPoolSet alone{budget, 50, 2 * kMiB};
  EXPECT_EQ(alone.kept(alone.of(2 * kMiB).frames), 0u) << "no region has other blocks";
}

TEST_F(MemoryStagingPoolSet, TheLargestBlocksNeedFourFramesAsAllDo) {
  budget.set(512 * kMiB);
  StagingPool& largest = pools.of(64 * kMiB);
  EXPECT_EQ(largest.frames.slab_frames(), 4u);
  EXPECT_EQ(largest.frames.batch(), 2u);
  EXPECT_TRUE(largest.growth.has_room()) << "256 of 256 MiB";
  EXPECT_EQ(largest.growth.take(1000), 4u);
  budget.set(510 * kMiB);
  EXPECT_FALSE(largest.growth.has_room());
  // The part kept for sizes without frames is bounded by an eighth, long before these.
  budget.set(uint64_t{8} << 30);
  EXPECT_EQ(pools.kept(small.frames), (16 + 32 + 64 + 128 + 256) * kMiB) << "of 512 MiB";
  budget.set(uint64_t{4} << 30);
  EXPECT_EQ(pools.kept(small.frames), (16 + 32 + 64 + 128) * kMiB) << "of 256 MiB";
}

TEST_F(MemoryStagingPoolSet, FramesThatNobodyUsesCountAsRoomUntilKernelsAsk) {
  small.regions = large.regions = 1;
  add(large, 4);
  add(small, 44);
  EXPECT_FALSE(large.growth.has_room());
  large.growth.want();
  EXPECT_FALSE(large.growth.due(1));
  small.regions = 0;
  EXPECT_TRUE(large.growth.has_room() && large.growth.grows());
  EXPECT_TRUE(large.growth.due(1));
  EXPECT_FALSE(large.growth.fits()) << "they have to go first";
  EXPECT_FALSE(large.growth.blocks_must_leave(0));
  pools.kernel_ranges = 1;
  EXPECT_EQ(pools.unused(), nullptr);
  EXPECT_FALSE(large.growth.has_room() || large.growth.due(1));
  pools.kernel_ranges = 0;
  EXPECT_EQ(pools.unused(), &small);
}

TEST_F(MemoryStagingPoolSet, TheLargestBlockIsThatOfARegion) {
  EXPECT_EQ(pools.largest_block(), 0u);
  small.regions = 1;
  EXPECT_EQ(pools.largest_block(), 2 * kMiB);
  large.regions = 2;
  EXPECT_EQ(pools.largest_block(), 8 * kMiB);
  large.regions = 0;
  EXPECT_EQ(pools.largest_block(), 2 * kMiB);
}

TEST_F(MemoryStagingPoolSet, EverySizeHasAPoolThatIsThere) {
  for (const size_t block : {size_t{0}, size_t{4096}, size_t{kMiB}}) EXPECT_EQ(&pools.of(block), &small) << block;
  EXPECT_EQ(&pools.of(8 * kMiB), &large);
  EXPECT_EQ(&pools.of(64 * kMiB), &*(pools.end() - 1));
  for (size_t block = 2 * kMiB; block <= vmem::core::kMaxBlock; block *= 2)
    EXPECT_EQ(pools.of(block).frames.frame(), block);
}

class MemoryStagingGrowth : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(vmem::device::make_sim_devices({}, &devices).ok());
    staging = std::make_unique<Staging>(budget, kFrame);
    growth = std::make_unique<StagingGrowth>(*staging, budget, 50);
  }
  void TearDown() override { EXPECT_EQ(growth->check(kNow), ""); }
  void add(size_t frames) { add_to(*devices, *staging, frames); }
  // Takes all frames but `frames`.
  void leave(size_t frames) {
    while (staging->free() > frames) taken.push_back(staging->get(0));
    while (staging->free() < frames) {
      staging->put(taken.back());
      taken.pop_back();
    }
  }

  std::unique_ptr<vmem::device::SimDevices> devices;
  HostBudget budget{256 * kMiB};
  std::unique_ptr<Staging> staging;
  std::unique_ptr<StagingGrowth> growth;
  std::vector<std::byte*> taken;
};

TEST_F(MemoryStagingGrowth, TheShareOfTheBudgetIsTheMost) {
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

TEST_F(MemoryStagingGrowth, ALoweredBudgetLeavesTheCpuItsPart) {
  growth->set_share(90);
  budget.set(40 * kMiB);
  EXPECT_EQ(growth->take(1000), 12u) << "16 MiB are for the CPU, whatever the share";
  budget.set(20 * kMiB);
  EXPECT_EQ(growth->take(1000), 5u) << ".. or half of what there is";
}

TEST_F(MemoryStagingGrowth, FramesAreMadeWhenSomebodyFoundNone) {
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
TEST_F(MemoryStagingGrowth, NobodyGivesUpAFrameWhileMoreAreMade) {
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

TEST_F(MemoryStagingGrowth, WhatTheBudgetRefusedIsTriedAgainSoon) {
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

TEST_F(MemoryStagingGrowth, WhatTheMachineRefusedIsTriedAgainLater) {
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

TEST_F(MemoryStagingGrowth, SomeAreKeptForTheWayOut) {
  EXPECT_EQ(growth->reserve(), 2u) << "also before there are any";
  add(20);
  EXPECT_EQ(growth->reserve(), 5u);
  growth->set_share(90);
  add(80);
  EXPECT_EQ(growth->reserve(), 16u) << "a batch";
}

TEST_F(MemoryStagingGrowth, BlocksLeaveStagingFramesWhenFewAreFreeAndNoMoreCome) {
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
