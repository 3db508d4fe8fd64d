// Prefetches: what each requests, when it takes effect, and that a refused one has begun nothing.
#include <gtest/gtest.h>

#include <cerrno>

#include "edit_block.h"
#include "pager/calls/prefetch.h"
#include "pager_device_parts.h"

namespace {

using vmem::core::BigLock;
using vmem::core::BlockIndex;
using vmem::core::State;
using vmem::core::Status;
using vmem::core::Urgency;
using vmem::pager::DeviceQueues;
using vmem::pager::Region;
namespace core = vmem::core;

class PagerPrefetch : public vmem::pager::test::PromotionParts {
 protected:
  Status prefetch(Region& r, BlockIndex first, BlockIndex last, int location, void* on = nullptr) {
    Status s = hints.prefetch(r.address(first), (last - first + 1) * r.block_size, location, on);
    engine.until_idle();
    return s;
  }
  bool serve_streams() {
    BigLock lock(map.mutex());
    return hints.serve_stream_hints(lock);
  }
  bool serve_demotion() {
    BigLock lock(map.mutex());
    return hints.serve_demotion(lock);
  }
  size_t asked_to_device() {
    BigLock lock(map.mutex());
    return queues.promotion_requests.size();
  }
  size_t asked_from_device() {
    BigLock lock(map.mutex());
    return queues.demotion_requests.size();
  }
  bool wait_for_streams() {
    BigLock lock(map.mutex());
    return hints.hints_wait_for_streams();
  }
  void dirty_on_device(Region& r, BlockIndex b) {
    BigLock lock(map.mutex());
    place(r, b, 0);
    edit(r.table, b).flags |= core::kDirty;
  }
  // Fills the device so that no request begins.
  void fill_device() {
    BigLock lock(map.mutex());
    filled_ = gpus[0].budget.limit();
    gpus[0].budget.charge(filled_);
  }
  void TearDown() override {
    {
      BigLock lock(map.mutex());
      gpus[0].budget.credit(filled_);
      queues.promotion_requests.erase_if([](const auto&) { return true; });
    }
    PromotionParts::TearDown();
  }
  void* const stream = this;
  vmem::pager::Prefetch& hints = calls.prefetch;

 private:
  uint64_t filled_ = 0;
};

TEST_F(PagerPrefetch, WhatIsWantedInHostMemoryIsRead) {
  Region& r = region(4);
  for (const BlockIndex b : {0, 1, 2}) put_away(r, b, b + 1);
  ASSERT_TRUE(prefetch(r, 0, 1, VMEM_HOST).ok());
  for (const BlockIndex b : {0, 1}) EXPECT_TRUE(core::in_memory(state(r, b))) << b;
  EXPECT_EQ(state(r, 2), State::stored);
}

TEST_F(PagerPrefetch, WhatIsWantedOnADeviceIsAskedForAndNoMoreThanItHolds) {
  Region& r = device_region(8);
  fill_device();
  ASSERT_TRUE(prefetch(r, 1, 7, 0).ok());
  BigLock lock(map.mutex());
  ASSERT_EQ(queues.promotion_requests.size(), 1u);
  const auto& request = queues.promotion_requests.front();
  EXPECT_EQ(request.device, 0);
  EXPECT_EQ(request.last, 4u) << "the device has four blocks";
  EXPECT_EQ(request.owner, nullptr);
}

TEST_F(PagerPrefetch, ADeviceThatHoldsNoBlockIsRefusedAndSoIsARegionWithoutADeviceTier) {
  Region& r = device_region(1);
  Region& host_only = region(1);
  EXPECT_EQ(prefetch(host_only, 0, 0, 0).code(), -EINVAL);
  EXPECT_EQ(prefetch(r, 0, 0, 2).code(), -ENODEV);
  EXPECT_EQ(prefetch(r, 0, 0, -7).code(), -EINVAL);
  Region& large = region(1, vmem::pager::Backing::anonymous, 8 * kUnit);
  large.gpu = true;
  EXPECT_EQ(prefetch(large, 0, 0, 0).code(), -ENOMEM);
  EXPECT_EQ(asked_to_device(), 0u);
}

TEST_F(PagerPrefetch, WhatIsAskedElsewhereIsForgottenInOlderHints) {
  Region& r = device_region(4);
  fill_device();
  ASSERT_TRUE(prefetch(r, 0, 3, 0).ok());
  EXPECT_EQ(asked_to_device(), 1u);
  ASSERT_TRUE(prefetch(r, 0, 3, VMEM_SSD).ok());
  EXPECT_EQ(asked_to_device(), 0u);
  EXPECT_EQ(asked_from_device(), 1u);
}

TEST_F(PagerPrefetch, AHintThatFindsItsQueueFullIsDropped) {
  Region& r = device_region(2);
  fill_device();
  {
    BigLock lock(map.mutex());
    for (size_t i = 0; i < DeviceQueues::kMaxSpeculative; ++i)
      ASSERT_TRUE(queues.promotion_requests.push_back({&r, 0, 0, 0, Urgency::prefetch, nullptr}));
  }
  EXPECT_TRUE(prefetch(r, 1, 1, 0).ok());
  EXPECT_EQ(asked_to_device(), DeviceQueues::kMaxSpeculative);
}

TEST_F(PagerPrefetch, OneInAStreamsOrderTakesEffectWhenTheStreamGetsThere) {
  Region& r = device_region(2);
  devices.streams = true;
  fill_device();
  ASSERT_TRUE(prefetch(r, 0, 0, 0, stream).ok());
  EXPECT_TRUE(wait_for_streams());
  EXPECT_FALSE(serve_streams());
  EXPECT_EQ(asked_to_device(), 0u);
  devices.reached = true;
  EXPECT_TRUE(serve_streams());
  EXPECT_FALSE(wait_for_streams());
  EXPECT_EQ(asked_to_device(), 1u);
}

TEST_F(PagerPrefetch, AStreamThatTakesNoMarkRefusesTheHint) {
  Region& r = device_region(1);
  devices.streams = true;
  devices.record_error = EIO;
  EXPECT_EQ(prefetch(r, 0, 0, 0, stream).code(), -EIO);
  EXPECT_FALSE(wait_for_streams());
}

TEST_F(PagerPrefetch, AHintWhoseRegionWentDoesNothing) {
  Region& r = device_region(1);
  devices.streams = true;
  ASSERT_TRUE(prefetch(r, 0, 0, 0, stream).ok());
  {
    BigLock lock(map.mutex());
    queues.stream_hints.front().region = nullptr;  // as when it is freed
  }
  devices.reached = true;
  EXPECT_TRUE(serve_streams());
  EXPECT_EQ(asked_to_device(), 0u);
}

TEST_F(PagerPrefetch, WhatIsAskedAwayFromADeviceLeavesItUnlessItIsLeased) {
  Region& r = supplied(2);
  for (const BlockIndex b : {0, 1}) dirty_on_device(r, b);
  {
    BigLock lock(map.mutex());
    ASSERT_TRUE(lease_manager.grant({&r, 1, 1}, VMEM_READ, 0, nullptr).ok());
  }
  ASSERT_TRUE(prefetch(r, 0, 1, VMEM_SSD).ok());
  EXPECT_EQ(state(r, 0), State::on_device) << "a worker does it";
  while (serve_demotion()) {
  }
  EXPECT_EQ(state(r, 0), State::staged);
  EXPECT_EQ(state(r, 1), State::on_device);
  EXPECT_EQ(asked_from_device(), 0u);
  {
    BigLock lock(map.mutex());
    EXPECT_FALSE(evictions.empty()) << "and from there it is to go on";
    evictions.forget(r);
    lease_manager.take_back({&r, 1, 1}, VMEM_READ, 0, nullptr);
  }
  take_away(r, 1);
  BigLock lock(map.mutex());
  edit(r.table, 0).flags = 0;
  ASSERT_TRUE(map.reserve_transition());
  map.withdraw(r.table[0].aux);
  vmem::pager::DeferredWork after;
  write_back.drop_held(r, 0, after);
}

}  // namespace
