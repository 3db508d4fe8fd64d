// Pages that are pinned, or in the way, while blocks go to a device, leave it, or are shown to the
// CPU; and the old extent that a write from a device replaces.
#include <cerrno>
#include <chrono>
#include <future>
#include <memory>
#include <utility>

#include "common/patience.h"
#include "device/sim/sim_device.h"
#include "pager_steps.h"

namespace vmem::pager::test {
namespace {

using device::SimKernel;

class PagerPins : public PagerSteps {
 protected:
  void start_with_device(size_t block = kHugePage) {
    std::unique_ptr<device::SimDevices> made;
    device::SimOptions options;
    options.memory_bytes = 64 << 20;
    options.handles = true;
    ASSERT_TRUE(device::make_sim_devices(options, &made).ok());
    Settings c = config(64 << 20);
    c.fault_timeout_ms = 3000;
    start(std::move(c), std::make_unique<FakeTrap>(false, true, false), std::move(made));
    r = region(4, block);
    size = block;
  }
  void acquire(unsigned access) {
    const vmem_range what = range(r, size, access);
    const Status s = pager->acquire({&what, 1}, 0, nullptr);
    ASSERT_TRUE(s.ok()) << s.text();
  }
  void release() {
    const vmem_range what = range(r, size);
    const Status s = pager->release({&what, 1}, nullptr);
    EXPECT_TRUE(s.ok()) << s.text();
  }
  void change_on_device(uint8_t value) {
    acquire(VMEM_READ | VMEM_WRITE);
    const Status s = device::current_sim()->launch(nullptr, [this, value](SimKernel& k) {
      if (std::byte* at = k.at(r, 1, true); at != nullptr) *at = std::byte{value};
    });
    ASSERT_TRUE(s.ok()) << s.text();
    release();
  }
  // Shows the CPU the block: loads from it under a READ lease.
  void show(uint64_t value) {
    put(r, value);
    acquire(VMEM_READ);
    EXPECT_EQ(get(r), value);
    release();
    ASSERT_TRUE(device::current_sim()->synchronize(nullptr).ok());
  }

  std::byte* r = nullptr;
  size_t size = 0;
};

// No part of it may stay: the CPU would load old bytes after a kernel's store, and the next try
// would fail.
TEST_F(PagerPins, AViewThatWasPutInPlaceHalfWayIsTakenAwayAndMadeAgain) {
  start_with_device();
  std::byte* const end = r + size - sizeof(uint64_t);
  for (const int error : {ENOTRECOVERABLE, EEXIST}) {
    put(r, 7);
    put(end, 8);
    acquire(VMEM_READ);
    trap->tear_fill(error);
    const size_t torn = trap->calls("fill torn");
    EXPECT_EQ(get(end), 8u);
    EXPECT_EQ(get(r), 7u);
    EXPECT_EQ(trap->calls("fill torn"), torn + 1);
    release();
    change_on_device(9);
    EXPECT_EQ(get(r), 9u);
  }
}

TEST_F(PagerPins, ABlockThatIsPinnedGoesToADeviceLater) {
  for (const size_t block : {kHugePage, 2 * kHugePage}) {
    start_with_device(block);
    put(r, 7);
    trap->pin_drop(2);
    acquire(VMEM_READ);
    EXPECT_EQ(trap->calls("drop of what is pinned"), 2u);
    release();
    EXPECT_EQ(get(r), 7u);
    TearDown();
    pager.reset();  // before the next devices, whose threads may get its addresses
  }
}

TEST_F(PagerPins, ADontNeedOfWhatIsShownWaitsForAPin) {
  start_with_device();
  show(7);
  trap->pin_drop(2);
  const Status s = pager->advise(r, size, VMEM_ADVISE_DONT_NEED, 0);
  EXPECT_TRUE(s.ok()) << s.text();
  EXPECT_EQ(trap->calls("drop of what is pinned"), 2u);
  EXPECT_EQ(get(r), 0u);
}

TEST_F(PagerPins, AStoreOnADeviceWaitsUntilAPinnedViewHasGone) {
  start_with_device();
  show(7);
  trap->pin_drop(2);
  change_on_device(9);
  EXPECT_EQ(trap->calls("drop of what is pinned"), 2u);
  EXPECT_EQ(get(r), 9u);
}

// A page was in the way of the fill, and then pinned.
TEST_F(PagerPins, WhatIsInTheWayOfAFillIsDroppedWhenItsPinEnds) {
  start(config(), std::make_unique<FakeTrap>(false));
  std::byte* const at = region(1);
  put(at, 7);
  evict(at, kSmall);
  trap->tear_fill(EEXIST);
  trap->pin_drop(2);
  trap->report(at, trap::FaultKind::read);
  trap->until_called("drop of what is pinned", 2);
  const auto loaded = [&] {
    uint64_t value = 0;
    return trap->load(at, &value) && value == 7;
  };
  EXPECT_TRUE(vmem::test::eventually(loaded));
}

// A buffer may be registered for as long as the program runs, and its rights changed for ever.
TEST_F(PagerPins, WhatIsToLeaveFirstAndCannotKeepsNoOtherInMemory) {
  constexpr size_t kBudget = 32 << 20, kBlocks = 24;
  struct Way {
    size_t block;
    int error;
  };
  for (const Way& way : {Way{kHugePage, EBUSY}, Way{kHugePage, EFAULT}, Way{kSmall, EBUSY}}) {
    Settings c = config(kBudget);
    c.fault_timeout_ms = 1000;
    start(std::move(c));
    const size_t count = kBlocks * kHugePage / way.block;
    std::byte* const at = region(count, way.block);
    for (size_t i = 0; i < 3; ++i) {
      put(at + i * way.block, 100 + i);
      trap->stick(at + i * way.block, way.error);
    }
    ASSERT_TRUE(pager->advise(at, 3 * way.block, VMEM_ADVISE_COLD, VMEM_HOST).ok());
    for (size_t i = 3; i < 2 * count; ++i) put(at + i % count * way.block, 100 + i % count);
    for (size_t i = 0; i < count; ++i) EXPECT_EQ(get(at + i * way.block), 100 + i);
    for (size_t i = 0; i < 3; ++i) trap->stick(at + i * way.block, 0);
    TearDown();
    pager.reset();
  }
}

// The thread that pins it may wait for another fault, or for memory.
TEST_F(PagerPins, APinOfWhatIsInTheWayKeepsNoOtherFaultFromBeingServed) {
  start(config(), std::make_unique<FakeTrap>(false));
  std::byte* const at = region(2);
  std::byte* const end = at + kSmall - sizeof(uint64_t);
  put(end, 7);
  put(at + kSmall, 8);
  evict(at, 2 * kSmall);
  trap->tear_fill(EEXIST);
  trap->pin_drop(SIZE_MAX);
  auto first = getting(end);  // in the half that is not in place
  trap->until_called("drop of what is pinned", 2);
  auto other = getting(at + kSmall);
  EXPECT_TRUE(
      vmem::test::eventually([&] { return other.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }));
  EXPECT_EQ(first.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  trap->pin_drop(0);
  EXPECT_EQ(first.get(), 7u);
  EXPECT_EQ(other.get(), 8u);
}

// The dropped page is zeros and takes stores without a report: the earlier copy is not the block.
TEST_F(PagerPins, AStoreToAPageThatTheProgramDropsWhileItsBlockGoesToADeviceIsKept) {
  using core::kPage;
  start_with_device();
  put(r, 7);
  put(r + kPage, 8);
  Gate pulled("device.pulled");
  auto acquired = std::async(std::launch::async, [this] { acquire(VMEM_READ); });
  pulled.until_reached();
  const trap::Range page{reinterpret_cast<uintptr_t>(r), kPage};
  EXPECT_TRUE(trap->drop({&page, 1}).ok());
  put(r, 9);
  pulled.open();
  acquired.get();
  release();
  evict(r, size);
  EXPECT_EQ(get(r), 9u);
  EXPECT_EQ(get(r + kPage), 8u);
}

// As for a block in host memory: the writing thread may be delayed anywhere.
TEST_F(PagerPins, WhatAWriteFromADeviceReplacesIsReleasedBeforeThePagerEnds) {
  start_with_device();
  put(r, 1);
  evict(r, size);
  change_on_device(2);
  engine->tear(EIO);  // so that the block is written elsewhere
  space->hold_release();
  auto synced = calling([&] {
    Status first = pager->sync(r, size);
    if (stats().unknown_blocks != 0) pager->sync(r, size).ignore();  // else a reclaim thread has written it again
    return first;
  });
  space->until_release_held();
  auto ended = std::async(std::launch::async, [&] {
    synced.wait();
    pager->shutdown();
    pager.reset();
  });
  EXPECT_EQ(ended.wait_for(std::chrono::milliseconds(500)), std::future_status::timeout);
  space->let_release_go();
  ended.get();
  EXPECT_EQ(synced.get().code(), -EIO);
}

}  // namespace
}  // namespace vmem::pager::test
