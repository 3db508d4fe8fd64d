// Freeing regions: which users delay it, that no part is used afterwards, and that all memory comes
// back.
#include <gtest/gtest.h>

#include <cerrno>
#include <thread>

#include "pager/calls/region_create.h"
#include "pager/calls/region_free.h"
#include "pager_device_parts.h"

namespace vmem::pager::test {
namespace {

class PagerRegionFree : public PromotionParts {
 protected:
  Region& made(size_t count, size_t block_size = kBlock) {
    RegionSpec what;
    what.size = count * block_size;
    what.block_size = block_size;
    what.host_only = true;
    void* at = nullptr;
    const Status s = maker.create(what, &at);
    EXPECT_TRUE(s.ok()) << s.text();
    BigLock lock(map.mutex());
    return *map.find(reinterpret_cast<uintptr_t>(at));
  }
  void change(Region& r, BlockIndex b) {
    bring(r, b);
    put(r, b, 7);
  }
  bool is_there(const void* at) {
    BigLock lock(map.mutex());
    return map.find(reinterpret_cast<uintptr_t>(at)) != nullptr;
  }
  uint64_t charged_for_blocks() {
    BigLock lock(map.mutex());
    return budget.charged(memory::Use::blocks);
  }

  RegionCreate& maker = calls.region_create;
  RegionFree& teardown = calls.region_free;
  StagingLoans& staging_loans = tier.staging_loans;
};

TEST_F(PagerRegionFree, AllThatARegionHadComesBack) {
  Region& r = made(4);
  void* const at = r.base;
  change(r, 0);
  change(r, 1);
  {
    Transition* m = nullptr;
    BigLock lock(map.mutex());
    map.withdraw(r.table[1].aux);
    m = isolator.begin_take(r, 1, false, false);
    ASSERT_NE(m, nullptr);
    lock.unlock();
    write_back.evict_batch({&m, 1});
    engine.until_idle();
    lock.lock();
  }
  ASSERT_EQ(space.extents(), 1u);
  ASSERT_EQ(charged_for_blocks(), kBlock);
  const size_t told = freed;
  ASSERT_TRUE(teardown.destroy(at, false).ok());
  EXPECT_FALSE(is_there(at));
  EXPECT_EQ(space.extents(), 0u);
  EXPECT_EQ(charged_for_blocks(), 0u);
  EXPECT_EQ(trap.calls("detach"), 1u);
  EXPECT_EQ(trap.calls("unmap"), 1u);
  EXPECT_GT(freed, told) << "who waits for memory is served";
  BigLock lock(map.mutex());
  EXPECT_EQ(ctx.totals.reserved_blocks, 0u);
  EXPECT_EQ(reserve.bytes(), 0u);
}

TEST_F(PagerRegionFree, WhatIsNoRegionIsRefusedAndSaidWhereItIs) {
  Region& r = made(2);
  const Status inside = teardown.destroy(r.base + kBlock, false);
  EXPECT_EQ(inside.code(), -EINVAL);
  EXPECT_NE(inside.text().find("65536 bytes inside"), std::string_view::npos) << inside.text();
  EXPECT_EQ(teardown.destroy(this, false).code(), -EINVAL);
  void* const at = r.base;
  ASSERT_TRUE(teardown.destroy(at, false).ok());
  EXPECT_EQ(teardown.destroy(at, false).code(), -EINVAL) << "it was freed";
}

TEST_F(PagerRegionFree, WhoLeasesItOrIsAboutToKeepsItUnlessItGoesByForce) {
  Region& r = made(2);
  void* const at = r.base;
  lease(r, 1, VMEM_READ);
  EXPECT_EQ(teardown.destroy(at, false).code(), -EBUSY);
  {
    BigLock lock(map.mutex());
    lease_manager.take_back({&r, 1, 1}, VMEM_READ, VMEM_HOST, nullptr);
    r.counts.asked = 1;
  }
  EXPECT_EQ(teardown.destroy(at, false).code(), -EBUSY);
  {
    BigLock lock(map.mutex());
    r.counts.asked = 0;
    r.counts.kernels = 1;
  }
  EXPECT_EQ(teardown.destroy(at, false).code(), -EBUSY);
  EXPECT_FALSE(r.dying);
  r.counts.kernels = 0;
  lease(r, 0, VMEM_WRITE);
  ASSERT_TRUE(teardown.destroy(at, true).ok());
  EXPECT_FALSE(is_there(at));
  BigLock lock(map.mutex());
  EXPECT_EQ(reserve.pinned(), 0u) << "its leases went with it";
}

TEST_F(PagerRegionFree, WhatIsUnderWayEndsBeforeItGoes) {
  Region& r = made(2);
  void* const at = r.base;
  change(r, 0);
  Transition* m = nullptr;
  {
    BigLock lock(map.mutex());
    map.withdraw(r.table[0].aux);
    m = isolator.begin_take(r, 0, false, false);
  }
  ASSERT_NE(m, nullptr);
  engine.hold(Io::Op::write, true);
  write_back.evict_batch({&m, 1});
  engine.until_held(1);
  Status result = core::error(EIO, "not yet");
  std::thread frees([&] { result = teardown.destroy(at, false); });
  trap.until_called("wake", 1);  // it is dying
  EXPECT_EQ(trap.calls("detach"), 0u);
  EXPECT_TRUE(is_there(at));
  engine.hold(Io::Op::write, false);
  engine.let_go();
  frees.join();
  EXPECT_TRUE(result.ok());
  EXPECT_EQ(space.extents(), 0u);
}

TEST_F(PagerRegionFree, NothingThatWaitsInAQueueNamesItAnyMore) {
  Region& r = made(2);
  void* const at = r.base;
  {
    BigLock lock(map.mutex());
    ASSERT_TRUE(queues.promotion_requests.push_back({&r, 0, 1, 0, Urgency::prefetch, nullptr}));
    ASSERT_TRUE(queues.demotion_requests.push_back({&r, 0, 0, 1, true}));
    queues.stream_hints.emplace_back().region = &r;
    ASSERT_TRUE(evictions.add({&r, 0, 1}, false));
    ASSERT_TRUE(waits.starve(r, 0, Urgency::acquire));
  }
  ASSERT_TRUE(teardown.destroy(at, true).ok());
  BigLock lock(map.mutex());
  EXPECT_TRUE(queues.promotion_requests.empty());
  EXPECT_TRUE(queues.demotion_requests.empty());
  ASSERT_EQ(queues.stream_hints.size(), 1u) << "its ticket ends without the lock";
  EXPECT_EQ(queues.stream_hints.front().region, nullptr);
  EXPECT_TRUE(evictions.empty());
  EXPECT_TRUE(waits.queue().empty());
}

TEST_F(PagerRegionFree, FramesThatWereMovedServeTheNextRegion) {
  {
    BigLock lock(map.mutex());
    budget.set(uint64_t{64} << 20);
    reserve.follow_budget();
  }
  Region& r = made(2, core::kHugePage);
  ASSERT_EQ(r.transfer, trap::Transfer::move);
  bring(r, 0);
  ASSERT_TRUE(teardown.destroy(r.base, false).ok());
  EXPECT_EQ(trap.calls("take"), 1u) << "out of its addresses";
  BigLock lock(map.mutex());
  EXPECT_EQ(budget.charged(memory::Use::blocks), 0u);
}

TEST_F(PagerRegionFree, AllGoWhoeverHoldsThem) {
  Region& a = made(1);
  made(1);
  lease(a, 0, VMEM_READ);
  teardown.destroy_all();
  BigLock lock(map.mutex());
  EXPECT_TRUE(map.regions().empty());
}

}  // namespace
}  // namespace vmem::pager::test
