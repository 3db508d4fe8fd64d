// Leases as they are granted, counted and ended, and their budgets.
#include <gtest/gtest.h>

#include <cerrno>
#include <list>

#include "pager_device_parts.h"

namespace vmem::pager::test {
namespace {

class PagerLeaseManager : public DeviceParts {
 protected:
  // Releases the span for the stream, with room to note that many devices.
  core::Status release(BigLock& lock, const BlockSpan& span, void* stream, size_t devices_noted) VMEM_LOCKED {
    pending.resize(devices_noted);
    for (PendingRelease& e : pending) e.spans.reserve(4);
    return lease_manager.release(lock, {&span, 1}, nullptr, stream, &pending);
  }
  void* const a = &stream_a;
  std::list<PendingRelease> pending;

 private:
  int stream_a = 0;
};

TEST_F(PagerLeaseManager, WhatIsLeasedInHostMemoryIsPinnedUntilItIsReleased) {
  Region& r = region(8);
  BigLock lock(map.mutex());
  ASSERT_TRUE(lease_manager.grant({&r, 0, 3}, VMEM_READ, VMEM_HOST, nullptr).ok());
  ASSERT_TRUE(lease_manager.grant({&r, 2, 5}, VMEM_READ, VMEM_HOST, nullptr).ok());
  EXPECT_EQ(reserve.pinned(), 6 * kBlock) << "each block once";
  EXPECT_EQ(lease_manager.check(), "");
  ASSERT_TRUE(release(lock, {&r, 0, 3}, nullptr, 0).ok());
  EXPECT_EQ(reserve.pinned(), 4 * kBlock);
  EXPECT_EQ(lease_manager.check(), "");
  lease_manager.take_back({&r, 2, 5}, VMEM_READ, VMEM_HOST, nullptr);
  EXPECT_EQ(reserve.pinned(), 0u);
}

TEST_F(PagerLeaseManager, ALeaseThatDoesNotFitTheHostBudgetIsRefusedAndNothingIsLeased) {
  Region& r = region(2 * kBudget / kBlock);
  BigLock lock(map.mutex());
  const uint64_t tables_before = budget.charged(memory::Use::tables);
  EXPECT_EQ(lease_manager.grant({&r, 0, r.blocks - 1}, VMEM_READ, VMEM_HOST, nullptr).code(), -ENOMEM);
  EXPECT_TRUE(r.leases.empty());
  EXPECT_EQ(reserve.pinned(), 0u);
  EXPECT_EQ(budget.charged(memory::Use::tables), tables_before);
}

TEST_F(PagerLeaseManager, ARangeThatIsLeasedElsewhereIsRefusedAsAWhole) {
  Region& r = device_region(4);
  ASSERT_TRUE(gpus.use(1).ok());
  BigLock lock(map.mutex());
  ASSERT_TRUE(lease_manager.grant({&r, 3, 3}, VMEM_READ, 1, a).ok());
  EXPECT_EQ(lease_manager.grant({&r, 0, 3}, VMEM_READ, VMEM_HOST, nullptr).code(), -EBUSY);
  EXPECT_EQ(r.leases.blocks(), 1u);
  EXPECT_EQ(reserve.pinned(), 0u);
  EXPECT_NE(lease_manager.holders().find("2 MiB"), core::OwnString::npos) << lease_manager.holders();
  lease_manager.take_back({&r, 3, 3}, VMEM_READ, 1, a);
  EXPECT_EQ(lease_manager.holders(), "none");
}

TEST_F(PagerLeaseManager, ALeaseAtADeviceIsEndingFromItsReleaseUntilTheStreamGetsThere) {
  Region& r = device_region(4);
  ASSERT_TRUE(gpus.use(0).ok());
  BigLock lock(map.mutex());
  ASSERT_TRUE(lease_manager.grant({&r, 0, 3}, VMEM_WRITE, 0, a).ok());
  EXPECT_EQ(gpus[0].budget.live(), 4 * kUnit);
  ASSERT_TRUE(release(lock, {&r, 0, 3}, a, 1).ok());
  EXPECT_EQ(gpus[0].budget.live(), 0u);
  EXPECT_EQ(gpus[0].budget.leased(), 4 * kUnit);
  ASSERT_EQ(pending.front().spans.size(), 1u);
  EXPECT_EQ(pending.front().device, 0);
  EXPECT_EQ(gpus.check(), "");
  lease_manager.revive(pending.front());
  EXPECT_EQ(gpus[0].budget.live(), 4 * kUnit) << "it was not to be";
  ASSERT_TRUE(release(lock, {&r, 0, 3}, a, 1).ok());
  lease_manager.end(pending.back());
  EXPECT_EQ(gpus[0].budget.leased(), 0u);
  EXPECT_TRUE(r.leases.empty());
}

TEST_F(PagerLeaseManager, AReleaseThatCannotBeAllChangesNothing) {
  Region& r = device_region(8);
  ASSERT_TRUE(gpus.use(0).ok());
  BigLock lock(map.mutex());
  ASSERT_TRUE(lease_manager.grant({&r, 0, 3}, VMEM_READ, 0, a).ok());
  EXPECT_EQ(release(lock, {&r, 0, 4}, a, 1).code(), -EINVAL) << "block 4 is not leased";
  EXPECT_EQ(release(lock, {&r, 0, 3}, a, 0).code(), -ENOBUFS) << "there is no room to note it";
  EXPECT_EQ(gpus[0].budget.live(), 4 * kUnit);
  EXPECT_EQ(gpus.check(), "");
  lease_manager.take_back({&r, 0, 3}, VMEM_READ, 0, a);
  EXPECT_EQ(gpus[0].budget.leased(), 0u);
}

TEST_F(PagerLeaseManager, ARegionThatGoesTakesItsLeasesWithIt) {
  Region& r = device_region(4);
  ASSERT_TRUE(gpus.use(0).ok());
  BigLock lock(map.mutex());
  ASSERT_TRUE(lease_manager.grant({&r, 0, 1}, VMEM_READ, VMEM_HOST, nullptr).ok());
  ASSERT_TRUE(lease_manager.grant({&r, 2, 3}, VMEM_READ, 0, a).ok());
  const auto gone = std::move(map.regions().extract(reinterpret_cast<uintptr_t>(r.base)).mapped());
  lease_manager.forget(lock, *gone);
  metadata_charges.credit(*gone);
  reserve.remove_region(kUnit);
  EXPECT_EQ(reserve.pinned(), 0u);
  EXPECT_EQ(gpus[0].budget.leased(), 0u);
}

}  // namespace
}  // namespace vmem::pager::test
