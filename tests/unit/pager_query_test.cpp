// Information about blocks and devices, and settings, on fakes.
#include <gtest/gtest.h>

#include <cerrno>

#include "pager/calls/query.h"
#include "pager/calls/tunables_update.h"
#include "pager/host/fault_handler.h"
#include "pager_device_parts.h"

namespace vmem::pager::test {
namespace {

// Devices whose driver has a page of host memory for each block that a query visits.
class PagedDevices final : public FakeDevices {
 public:
  Status host_resident_bytes(device::Range, uint64_t* out) override {
    *out = 4096;
    return {};
  }
};

class PagerQuery : public PromotionParts {
 protected:
  PagerQuery() : PromotionParts(std::make_unique<PagedDevices>()) {}
  Query& queries = calls.query;
};

TEST_F(PagerQuery, EachByteOfARangeIsInOneTier) {
  Region& r = region(4);
  bring(r, 0);
  PagerParts::put_away(r, 1, 7);
  vmem_residency where = {};
  ASSERT_TRUE(queries.query(r.base, r.size, &where).ok());
  EXPECT_EQ(where.host_bytes, kBlock);
  EXPECT_EQ(where.ssd_bytes, kBlock);
  EXPECT_EQ(where.zero_bytes, 2 * kBlock);
  EXPECT_EQ(where.block_size, kBlock);
  ASSERT_TRUE(queries.query(r.address(0) + 4096, kBlock, &where).ok());
  EXPECT_EQ(where.host_bytes, kBlock - 4096);
  EXPECT_EQ(where.ssd_bytes, 4096u);
  EXPECT_EQ(queries.query(r.base, 2 * r.size, &where).code(), -EINVAL);
  EXPECT_EQ(r.counts.in_flight, 0u);
}

TEST_F(PagerQuery, TheCensusAgreesWithThem) {
  Region& r = device_region(3);
  r.name = "table";
  {
    BigLock lock(map.mutex());
    place(r, 0, 1);
  }
  bring_with(r, 1, 5);
  Snapshot census;
  queries.census(8, &census);
  ASSERT_EQ(census.regions.size(), 1u);
  vmem_residency where = {};
  ASSERT_TRUE(queries.query(r.base, r.size, &where).ok());
  EXPECT_EQ(census.regions[0].device_bytes, where.device_bytes);
  EXPECT_EQ(census.regions[0].device_bytes, kUnit);
  EXPECT_EQ(census.regions[0].host_bytes, where.host_bytes);
  EXPECT_EQ(census.regions[0].zero_bytes, where.zero_bytes);
  EXPECT_STREQ(census.regions[0].name, "table");
  ASSERT_EQ(census.devices.size(), 2u);
  EXPECT_EQ(census.devices[1].used, kUnit);
  Snapshot small;
  queries.census(0, &small);
  EXPECT_TRUE(small.regions.empty());
  EXPECT_EQ(small.regions_total, 1u);
  BigLock lock(map.mutex());
  remove(r, 0);
}

TEST_F(PagerQuery, ADeviceTellsOfItselfAndOfWhatItsDriverHasOfTheHost) {
  Region& r = device_region(3);
  {
    BigLock lock(map.mutex());
    place(r, 0, 0);
    place(r, 2, 0);
  }
  struct vmem_device_stats stats = {};
  ASSERT_TRUE(queries.device_stats(0, &stats).ok());
  EXPECT_EQ(stats.budget, 4 * kUnit);
  EXPECT_EQ(stats.used_bytes, 2 * kUnit);
  EXPECT_EQ(stats.driver_host_bytes, 2 * 4096u);
  EXPECT_EQ(queries.device_stats(2, &stats).code(), -ENODEV);
  EXPECT_EQ(queries.device_stats(VMEM_HOST, &stats).code(), -ENODEV);
  struct vmem_stats all = {};
  queries.stats(&all);
  EXPECT_EQ(all.device_bytes, 2 * kUnit);
  EXPECT_EQ(all.regions, 1u);
  EXPECT_EQ(r.counts.in_flight, 0u);
  BigLock lock(map.mutex());
  remove(r, 0);
  remove(r, 2);
}

class PagerTunablesUpdate : public PromotionParts {
 protected:
  PagerTunablesUpdate()
      : PromotionParts(std::make_unique<FakeDevices>(), std::make_unique<FakeTrap>(true, true, true)) {}
  uint64_t host_budget() {
    BigLock lock(map.mutex());
    return budget.limit();
  }
  uint64_t device_budget() {
    BigLock lock(map.mutex());
    return gpus[0].budget.limit();
  }
  FakeTrap& module = trap;  // like the module's: it has something to report
  TunablesUpdate& update = calls.tunables_update;
};

TEST_F(PagerTunablesUpdate, TheLeastThatWasSetOrSaidIsInForce) {
  module.set_knobs({.readahead_bytes = 1 << 20, .fault_timeout_ms = 50});
  update.set_readahead(8 << 20);
  update.set_fault_timeout(20);
  EXPECT_EQ(tunables.readahead_bytes, 1u << 20);
  EXPECT_EQ(tunables.fault_timeout_ms, 20u);
  module.set_knobs({.readahead_bytes = 64 << 20, .fault_timeout_ms = 10});
  update.follow_module();
  EXPECT_EQ(tunables.readahead_bytes, 8u << 20) << "as it was set";
  EXPECT_EQ(tunables.fault_timeout_ms, 10u);
}

TEST_F(PagerTunablesUpdate, HostMemoryThatLiveLeasesHoldStays) {
  Region& r = region(64);
  for (BlockIndex b = 0; b < 48; ++b) {
    bring(r, b);
    lease(r, b, VMEM_READ);
  }
  const uint64_t before = host_budget();
  EXPECT_EQ(update.set_host_budget(32 * kBlock).code(), -EBUSY);
  EXPECT_EQ(host_budget(), before);
  EXPECT_TRUE(update.set_host_budget(2 * before).ok());
  EXPECT_EQ(host_budget(), 2 * before);
  EXPECT_NE(freed, 0u) << "whoever waits for memory is served";
  for (BlockIndex b = 0; b < 48; ++b) end_lease(r, b, VMEM_READ);
}

TEST_F(PagerTunablesUpdate, ADevicesBudgetHoldsItsLeasesAndIsNoMoreThanItHas) {
  Region& r = device_region(2);
  {
    BigLock lock(map.mutex());
    place(r, 0, 0);
    place(r, 1, 0);
    ASSERT_TRUE(lease_manager.grant({&r, 0, 1}, VMEM_READ, 0, this).ok());
  }
  EXPECT_EQ(update.set_device_budget(kUnit).code(), -EBUSY);
  EXPECT_EQ(update.set_device_budget(uint64_t{1} << 40).code(), -ENOMEM);
  EXPECT_EQ(update.set_device_budget(kUnit / 2).code(), -EINVAL) << "it holds no block";
  EXPECT_EQ(device_budget(), 4 * kUnit);
  ASSERT_TRUE(update.set_device_budget(2 * kUnit).ok());
  EXPECT_EQ(device_budget(), 2 * kUnit);
  EXPECT_EQ(tunables.device_budget, 2 * kUnit) << "of those that are used later, too";
  BigLock lock(map.mutex());
  lease_manager.take_back({&r, 0, 1}, VMEM_READ, 0, this);
  map.match_holds(lock, {&r, 0, 1});
  remove(r, 0);
  remove(r, 1);
}

}  // namespace
}  // namespace vmem::pager::test
