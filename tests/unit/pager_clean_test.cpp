// When a block in host memory counts as clean; which waiters learn that a free failed; what a
// region that goes leaves to others; and blocks that are pinned when they are to leave.
#include <gtest/gtest.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <future>
#include <memory>
#include <utility>

#include "common/patience.h"
#include "device/sim/sim_device.h"
#include "pager_steps.h"

namespace vmem::pager::test {
namespace {

class PagerClean : public PagerSteps {};

// A network card that has pinned the block's pages stores into them in spite of any protection.
TEST_F(PagerClean, WhatADeviceStoresUnderAWriteLeaseIsWrittenEachTime) {
  for (size_t block : {kSmall, kHugePage}) {
    start(config());
    std::byte* r = shared(2 * block, block);
    const vmem_range first = range(r, block, VMEM_READ | VMEM_WRITE);
    ASSERT_TRUE(pager->acquire({&first, 1}, VMEM_HOST, nullptr).ok());
    put(r, 7);
    EXPECT_TRUE(pager->flush_shared().ok());
    EXPECT_EQ(in_file(0), 7u);
    const uint64_t stored = 8;
    memcpy(r, &stored, sizeof stored);
    EXPECT_TRUE(pager->flush_shared().ok());
    EXPECT_EQ(in_file(0), 8u);
    const uint64_t last = 9;
    memcpy(r, &last, sizeof last);
    EXPECT_TRUE(pager->release({&first, 1}, nullptr).ok());
    EXPECT_TRUE(pager->sync(r, 2 * block).ok());
    EXPECT_EQ(in_file(0), 9u);
    TearDown();
    pager.reset();
  }
}

// The free whose write fails must not keep the region: the forced one must not wait for ever.
TEST_F(PagerClean, AFreeThatFailsBesideOneThatDoesNotLeavesNobodyWaiting) {
  for (int round = 0; round < 25; ++round) {
    start(config());
    std::byte* r = shared(2 * kSmall);
    put(r, 7);
    put(r + kSmall, 8);
    engine->hold(Io::Op::write, true);
    auto polite = calling([&] { return pager->destroy(r, false); });
    engine->until_held(1);
    auto forced = calling([&] { return pager->destroy(r, true); });
    engine->fail(Io::Op::write, EIO);
    engine->hold(Io::Op::write, false);
    engine->let_go();
    const int code = polite.get().code();
    EXPECT_TRUE(code == -EIO || code == -EINVAL) << code << ": the write failed, or the other was faster";
    EXPECT_TRUE(forced.get().ok());
    EXPECT_FALSE(pager->has_regions());
    engine->fail(Io::Op::write, 0);
    TearDown();
    pager.reset();
  }
}

// The trap takes back what it placed of a block, after a thread that was not parked stored there.
// The frame then differs from the store, though no access was answered.
TEST_F(PagerClean, AStoreToWhatARefusedFillHadPlacedIsWritten) {
  start(config());
  std::byte* r = region(1);
  put(r, 1);
  evict(r, kSmall);
  trap->fail_fill(ENOMEM, 1, 2);
  trap->report(r, trap::FaultKind::write);  // its thread has gone
  trap->until_called("fill refused", 1);
  EXPECT_EQ(get(r), 2u);
  evict(r, kSmall);
  EXPECT_EQ(get(r), 2u);
}

// The same for a block that waited in a staging frame and leaves from there.
TEST_F(PagerClean, AStoreToWhatARefusedFillHadPlacedOfAStagedBlockIsWritten) {
  std::unique_ptr<device::SimDevices> sim;
  device::SimOptions options;
  options.devices = 1;
  options.memory_bytes = 32 << 20;
  ASSERT_TRUE(device::make_sim_devices(options, &sim).ok());
  start(config(96 << 20), std::make_unique<FakeTrap>(false, true, true), std::move(sim));
  std::byte* r = region(4, kHugePage);
  put(r, 1);
  evict(r, kHugePage);
  ASSERT_TRUE(pager->prefetch(r, kHugePage, VMEM_HOST).ok());
  const auto held = [&] {
    struct vmem_residency where = {};
    EXPECT_TRUE(pager->queries().query(r, kHugePage, &where).ok());
    return where.host_bytes == kHugePage;
  };
  ASSERT_TRUE(vmem::test::eventually(held)) << "it waits in a staging frame";
  trap->fail_fill(EIO, 1, 2);
  trap->report(r, trap::FaultKind::write);
  trap->until_called("fill refused", 1);
  evict(r, kHugePage);
  EXPECT_EQ(get(r), 2u);
}

// The writing thread may be delayed anywhere; other threads do not wait for a region whose
// transitions are over.
TEST_F(PagerClean, WhatAWriteReplacesIsReleasedBeforeThePagerEnds) {
  start(config());
  std::byte* r = region(1);
  put(r, 1);
  evict(r, kSmall);
  put(r, 2);
  space->hold_release();
  ASSERT_TRUE(pager->prefetch(r, kSmall, VMEM_SSD).ok());
  space->until_release_held();
  auto ended = std::async(std::launch::async, [&] {
    pager->shutdown();
    pager.reset();
  });
  EXPECT_EQ(ended.wait_for(std::chrono::milliseconds(500)), std::future_status::timeout);
  space->let_release_go();
  ended.get();
}

// As with the module and devices: blocks leave from where they stand.
TEST_F(PagerClean, ABlockWhosePagesCannotBeDroppedStays) {
  start(config(64 << 20), std::make_unique<FakeTrap>(false));
  for (const size_t block : {kSmall, 2 * kHugePage}) {
    std::byte* r = region(1, block);
    put(r, 7);
    trap->pin_drop(2);
    evict(r, block);
    EXPECT_EQ(get(r), 7u);
    trap->pin_drop(2);
    EXPECT_EQ(pager->evict(r, block, VMEM_SSD).code(), -EBUSY);
    EXPECT_EQ(get(r), 7u);
    trap->pin_drop(0);
    evict(r, block);
    EXPECT_EQ(ssd(r, block), block);
    EXPECT_EQ(get(r), 7u);
  }
}

// Waking a large region of small blocks takes long.
TEST_F(PagerClean, AFaultElsewhereDoesNotWaitUntilAFreedRegionIsWoken) {
  start(config());
  std::byte* r = region(2);
  std::byte* other = region(1);
  Gate waking("fake.wake");
  auto freed = calling([&] { return pager->destroy(r, false); });
  waking.until_reached();
  auto toucher = getting(other);
  EXPECT_EQ(toucher.wait_for(vmem::test::patiently(std::chrono::seconds(10))), std::future_status::ready);
  waking.open();
  EXPECT_TRUE(freed.get().ok());
  EXPECT_EQ(toucher.get(), 0u);
}

}  // namespace
}  // namespace vmem::pager::test
