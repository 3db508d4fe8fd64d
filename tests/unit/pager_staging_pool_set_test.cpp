// Staging frames of several sizes share one part of the budget; frames that no region needs are
// freed.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cerrno>
#include <memory>

#include "device/sim/sim_device.h"
#include "memory/host_budget.h"
#include "pager/account/staging_pool_set.h"

namespace vmem::pager::test {
namespace {

using memory::HostBudget;
using memory::Staging;
using memory::Use;

constexpr uint64_t kMiB = 1 << 20;

class PagerStagingPoolSet : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(device::make_sim_devices({}, &devices).ok()); }
  // Addresses only: no thread stores to them.
  void add(StagingPool& pool, size_t frames) {
    ASSERT_TRUE(pool.frames.reserve(frames, 0));
    const size_t size = frames * pool.frames.frame();
    void* at = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    ASSERT_NE(at, MAP_FAILED);
    pool.frames.add_slab(*devices, {static_cast<std::byte*>(at), size, nullptr});
  }

  std::unique_ptr<device::SimDevices> devices;
  HostBudget budget{256 * kMiB};
  StagingPoolSet pools{budget, 50};
  StagingPool& small = pools.of(2 * kMiB);
  StagingPool& large = pools.of(8 * kMiB);
};

TEST_F(PagerStagingPoolSet, TheyShareTheirPartOfTheBudget) {
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

TEST_F(PagerStagingPoolSet, FramesThatNoRegionNeedsGiveWay) {
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
TEST_F(PagerStagingPoolSet, AddressesThatCannotBeUnpinnedAreGivenToNobody) {
  const size_t size = 2 * kMiB;
  for (const bool refused : {true, false}) {
    void* const at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(at, MAP_FAILED);
    ASSERT_TRUE(devices->pin(at, size).ok());
    devices->set_hook([refused](device::SimOp op, int, uintptr_t, size_t) {
      return refused && op == device::SimOp::unpin ? core::error(EIO, "as the test wants") : Status();
    });
    Staging::end_slab(*devices, {static_cast<std::byte*>(at), size, nullptr});
    devices->set_hook(nullptr);
    void* const again = mmap(at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    EXPECT_EQ(again == MAP_FAILED, refused);
    EXPECT_EQ(devices->unpin(at).ok(), refused) << "it is known as pinned";
    munmap(at, size);
  }
}

TEST_F(PagerStagingPoolSet, SizesThatHaveNoneAreLeftRoomForTheFirst) {
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

TEST_F(PagerStagingPoolSet, TheLargestBlocksNeedFourFramesAsAllDo) {
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

TEST_F(PagerStagingPoolSet, FramesThatNobodyUsesCountAsRoomUntilKernelsAsk) {
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

TEST_F(PagerStagingPoolSet, TheLargestBlockIsThatOfARegion) {
  EXPECT_EQ(pools.largest_block(), 0u);
  small.regions = 1;
  EXPECT_EQ(pools.largest_block(), 2 * kMiB);
  large.regions = 2;
  EXPECT_EQ(pools.largest_block(), 8 * kMiB);
  large.regions = 0;
  EXPECT_EQ(pools.largest_block(), 2 * kMiB);
}

TEST_F(PagerStagingPoolSet, EverySizeHasAPoolThatIsThere) {
  for (const size_t block : {size_t{0}, size_t{4096}, size_t{kMiB}}) EXPECT_EQ(&pools.of(block), &small) << block;
  EXPECT_EQ(&pools.of(8 * kMiB), &large);
  EXPECT_EQ(&pools.of(64 * kMiB), &*(pools.end() - 1));
  for (size_t block = 2 * kMiB; block <= core::kMaxBlock; block *= 2) EXPECT_EQ(pools.of(block).frames.frame(), block);
}

}  // namespace
}  // namespace vmem::pager::test
