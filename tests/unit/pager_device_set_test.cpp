// The devices in use, on a map and on fake devices: when a budget is settled, what happens when a
// device is lost, and what the check finds.
#include <gtest/gtest.h>

#include <cerrno>

#include "edit_block.h"
#include "pager_device_parts.h"

namespace vmem::pager::test {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

class PagerDeviceSet : public DeviceParts {};

TEST_F(PagerDeviceSet, TheFirstUseSettlesABudgetAndTheNextAsksNobody) {
  ASSERT_TRUE(gpus.use(1).ok());
  ASSERT_TRUE(gpus.use(1).ok());
  EXPECT_EQ(devices.asked_memory, 1u);
  BigLock lock(map.mutex());
  EXPECT_EQ(gpus[1].budget.budget(), 80 * kMiB) << "four fifths of what is free";
  EXPECT_FALSE(gpus[0].budget.begun());
  EXPECT_EQ(gpus.check(), "");
}

TEST_F(PagerDeviceSet, ABudgetThatTheDeviceHasNotIsRefusedAndMayBeAskedForAgain) {
  tunables.device_budget = 90 * kMiB;
  devices.free = 64 * kMiB;
  EXPECT_EQ(gpus.use(0).code(), -ENOMEM);
  {
    BigLock lock(map.mutex());
    EXPECT_FALSE(gpus[0].budget.begun());
  }
  devices.free = 95 * kMiB;
  EXPECT_TRUE(gpus.use(0).ok());
  BigLock lock(map.mutex());
  EXPECT_EQ(gpus[0].budget.budget(), 90 * kMiB);
}

TEST_F(PagerDeviceSet, ALossIsSeenOnceAndCallsTheWorkers) {
  ASSERT_TRUE(gpus.use(0).ok());
  BigLock lock(map.mutex());
  const Status loss = error(EIO, "as the test wants it");
  const uint64_t called = gpus.work().count();
  gpus.saw_loss(0, Status());
  gpus.saw_loss(1, loss);
  EXPECT_FALSE(gpus[0].lost) << "it is well";
  EXPECT_FALSE(gpus[1].lost) << "nobody has used it";
  EXPECT_EQ(gpus.work().count(), called);
  gpus.saw_loss(0, loss);
  EXPECT_TRUE(gpus[0].lost);
  EXPECT_TRUE(gpus[0].rescue);
  EXPECT_EQ(gpus.work().count(), called + 1);
  gpus[0].rescue = false;
  gpus.saw_loss(0, loss);
  EXPECT_FALSE(gpus[0].rescue) << "what could be saved has been";
  EXPECT_EQ(gpus.work().count(), called + 1);
}

TEST_F(PagerDeviceSet, OnlyDevicesInUseAreAskedWhetherTheyAreLost) {
  devices.lost = 1;
  gpus.look_for_loss();
  EXPECT_EQ(devices.probes, 0u);
  EXPECT_EQ(gpus.use(1).code(), -EIO);
  devices.lost = -1;
  ASSERT_TRUE(gpus.use(1).ok());
  devices.lost = 1;
  gpus.look_for_loss();
  gpus.look_for_loss();
  EXPECT_EQ(devices.probes, 1u) << "what is lost is not asked again";
  BigLock lock(map.mutex());
  EXPECT_TRUE(gpus[1].lost);
}

TEST_F(PagerDeviceSet, WhoIsRefusedMemoryLowersTheLimitToWhatIsThere) {
  ASSERT_TRUE(gpus.use(0).ok());
  BigLock lock(map.mutex());
  const uint64_t called = gpus.work().count();
  gpus[0].budget.charge(4 * kHugePage);
  gpus.follow_down(0, kHugePage);
  EXPECT_EQ(gpus[0].budget.limit(), 5 * kHugePage);
  EXPECT_EQ(gpus[0].budget.budget(), 80 * kMiB);
  EXPECT_EQ(gpus.work().count(), called + 1);
  gpus.follow_down(0, 2 * kHugePage);
  EXPECT_EQ(gpus[0].budget.limit(), 5 * kHugePage) << "it never rises by that";
  EXPECT_EQ(gpus.work().count(), called + 1);
  gpus[0].budget.credit(4 * kHugePage);
}

TEST_F(PagerDeviceSet, ItsCheckFindsABlockThatIsChargedNowhere) {
  ASSERT_TRUE(gpus.use(0).ok());
  auto made = std::make_unique<Region>(4, 0);
  Region& r = *made;
  r.block_size = kHugePage;
  r.blocks = 4;
  r.gpu = true;
  ASSERT_TRUE(r.table.create(4).ok());
  BigLock lock(map.mutex());
  map.regions().emplace(uintptr_t{kHugePage}, std::move(made));
  EXPECT_EQ(gpus.check(), "");
  change(r.table, 2, State::unpopulated, State::promoting);
  EXPECT_NE(gpus.check(), "");
  gpus[0].budget.charge(kHugePage);
  EXPECT_EQ(gpus.check(), "");
  gpus[0].budget.count_leases(kHugePage, 0, true);
  EXPECT_NE(gpus.check(), "") << "no table of leases has it";
  gpus[0].budget.count_leases(kHugePage, 0, false);
  gpus[0].budget.credit(kHugePage);
  map.regions().erase(kHugePage);
}

}  // namespace
}  // namespace vmem::pager::test
