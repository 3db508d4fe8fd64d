// A load of an unleased block on a device, in a range advised READ_MOSTLY. The CPU gets a copy and
// continues when it has its piece; the device keeps the block until there is a store to it. On
// simulated devices with page tables of their own.
#include "device_large_blocks.h"

namespace systest {
namespace {

using vmem::core::Status;
using vmem::device::SimOp;

class DeviceUnleased : public LargeBlocks {
 protected:
  void SetUp() override { start_large(2); }
  static vmem::region read_mostly(size_t size) {
    vmem::region r(size);
    r.advise(VMEM_ADVISE_SET_READ_MOSTLY);
    return r;
  }
};

TEST_F(DeviceUnleased, ALoadWaitsForItsPieceAndTheDeviceKeepsTheBlock) {
  if (IsSkipped()) return;
  const vmem::region r = read_mostly(kLarge);
  put(r, 10);
  load_the_middle(r, 11);
  go_on();
  join();
  expect(r, 10);
  EXPECT_EQ(device_stats().used_bytes, kLarge);
  put(r, 20);
  expect(r, 20);
  EXPECT_EQ(device_stats().used_bytes, kLarge);
}

TEST_F(DeviceUnleased, WhatIsNotOrNoLongerAdvisedMoves) {
  if (IsSkipped()) return;
  const vmem::region r(2 * kLarge);
  for (const bool mostly : {true, false}) {
    ASSERT_EQ(vmem_advise(words(r), kLarge, mostly ? VMEM_ADVISE_SET_READ_MOSTLY : VMEM_ADVISE_UNSET_READ_MOSTLY, 0), 0)
        << said();
    for (size_t b = 0; b < 2; ++b) put(r, 10, b);
    for (size_t b = 0; b < 2; ++b) {
      expect(r, 10, b);
      at_rest(words(r) + b * kWords);
    }
    EXPECT_EQ(device_stats().used_bytes, mostly ? kLarge : 0u);
  }
}

TEST_F(DeviceUnleased, AStoreTakesTheBlockFromTheDeviceWithoutAnotherCopy) {
  if (IsSkipped()) return;
  const vmem::region r = read_mostly(kLarge);
  put(r, 10);
  expect(r, 10);
  at_rest(words(r));  // all of it is mapped for the CPU
  EXPECT_EQ(device_stats().used_bytes, kLarge);
  const uint64_t out = device_stats().out_bytes;
  words(r)[kPlaces[1]] = 31;
  EXPECT_EQ(device_stats().used_bytes, 0u);
  EXPECT_EQ(device_stats().out_bytes, out);
  ASSERT_EQ(vmem_evict(words(r), kLarge, VMEM_SSD), 0) << said();
  EXPECT_EQ(load(words(r) + kPlaces[0]), 10u);
  EXPECT_EQ(load(words(r) + kPlaces[1]), 31u);
  EXPECT_EQ(load(words(r) + kPlaces[2]), 12u);
}

TEST_F(DeviceUnleased, AStoreToThePieceWhileTheRestIsOnItsWayIsKept) {
  if (IsSkipped()) return;
  const vmem::region r = read_mostly(kLarge);
  put(r, 10);
  load_the_middle(r, 11);
  aside([&] { words(r)[kPlaces[1]] = 31; });
  go_on();
  join();
  EXPECT_EQ(load(words(r) + kPlaces[0]), 10u);
  EXPECT_EQ(load(words(r) + kPlaces[1]), 31u);
  EXPECT_EQ(device_stats().used_bytes, 0u);
}

TEST_F(DeviceUnleased, AReadLeaseKeepsTheCopyAndAWriteLeaseDropsIt) {
  if (IsSkipped()) return;
  const vmem::region r = read_mostly(kLarge);
  put(r, 10);
  expect(r, 10);
  at_rest(words(r));  // all of it is mapped for the CPU
  EXPECT_EQ(device_stats().used_bytes, kLarge);
  const uint64_t out = device_stats().out_bytes;
  ASSERT_EQ(vmem_acquire(words(r), kLarge, VMEM_READ, 0, stream_), 0) << said();
  expect(r, 10);
  ASSERT_EQ(vmem_release(words(r), kLarge, stream_), 0) << said();
  EXPECT_EQ(device_stats().out_bytes, out);
  put(r, 20);
  expect(r, 20);
  at_rest(words(r));
  EXPECT_EQ(device_stats().out_bytes, out + kLarge);
}

TEST_F(DeviceUnleased, WhatCannotBeShownMovesWhenItCanBeCopied) {
  if (IsSkipped()) return;
  const vmem::region r = read_mostly(kLarge);
  put(r, 10);
  failures_ = 0;
  fails_ = true;
  sim().set_hook([](SimOp is, int, uintptr_t, size_t size) {
    if (is != SimOp::issue_out || !fails_ || size == size_t{64} << 10) return Status();
    ++failures_;
    return vmem::core::error(ENOMEM, "as the test wants it");
  });
  load_the_middle(r, 11);
  go_on();
  ASSERT_TRUE(until([] { return failures_ > 0; }));
  fails_ = false;
  aside([&] { expect(r, 10); });
  join();
  EXPECT_EQ(vmem::stats().lost_blocks, 0u);
  put(r, 20);
  expect(r, 20);
}

TEST_F(DeviceUnleased, WhatIsShownOutlivesTheDevice) {
  if (IsSkipped()) return;
  const vmem::region r = read_mostly(kLarge);
  put(r, 10);
  expect(r, 10);
  at_rest(words(r));  // all of it is mapped for the CPU
  sim().lose(0, "the test took it away");
  expect(r, 10);
  EXPECT_NE(vmem_acquire(words(r), kLarge, VMEM_READ, 0, stream_), 0);
  expect(r, 10);
  EXPECT_EQ(vmem::stats().lost_blocks, 0u);
}

TEST_F(DeviceUnleased, WhatIsShownAndHasToLeaveTheDeviceIsTheBlock) {
  if (IsSkipped()) return;
  const vmem::region r = read_mostly(kLarge), more(8 * kLarge);  // the whole device
  put(r, 10);
  expect(r, 10);
  ASSERT_EQ(vmem_acquire(words(more), 8 * kLarge, kBoth, 0, stream_), 0) << said();
  const uint64_t out = device_stats().out_bytes;
  expect(r, 10);
  EXPECT_EQ(device_stats().out_bytes, out);
  ASSERT_EQ(vmem_release(words(more), 8 * kLarge, stream_), 0) << said();
}

TEST_F(DeviceUnleased, ALeaseTakesItToAnotherDeviceAndOneAtTheHostOrAnEvictionFromIt) {
  if (IsSkipped()) return;
  const vmem::region r = read_mostly(kLarge);
  put(r, 10);
  expect(r, 10);
  at_rest(words(r));  // all of it is mapped for the CPU
  void* const other = stream(1);
  ASSERT_EQ(vmem_prefetch(words(r), kLarge, 1, nullptr), 0) << said();
  expect(r, 10);
  EXPECT_EQ(device_stats().used_bytes, kLarge) << "a hint leaves what is shown where it is";
  ASSERT_EQ(vmem_acquire(words(r), kLarge, VMEM_READ, 1, other), 0) << said();
  EXPECT_EQ(device_stats().used_bytes, 0u);
  ASSERT_EQ(vmem_release(words(r), kLarge, other), 0) << said();
  expect(r, 10);
  EXPECT_EQ(device_stats(1).used_bytes, kLarge);
  ASSERT_EQ(vmem_acquire(words(r), kLarge, kBoth, VMEM_HOST, nullptr), 0) << said();
  EXPECT_EQ(device_stats(1).used_bytes, 0u);
  words(r)[kPlaces[0]] = 7;
  ASSERT_EQ(vmem_release(words(r), kLarge, nullptr), 0) << said();
  put(r, 30);
  expect(r, 30);
  ASSERT_EQ(vmem_evict(words(r), kLarge, VMEM_SSD), 0) << said();
  EXPECT_EQ(device_stats().used_bytes, 0u);
  expect(r, 30);
}

// Scans more than host memory holds; then again, with loads and stores in turn.
TEST_F(DeviceUnleased, AScanIsRightWhereHostMemoryIsShort) {
  if (IsSkipped()) return;
  ASSERT_EQ(vmem_set("host_budget", "128MiB"), 0) << said();
  const vmem::region r = read_mostly(8 * kLarge), host(48 << 20, VMEM_HOST_ONLY);
  for (size_t b = 0; b < 8; ++b) put(r, 100 * b, b);
  for (uint64_t round = 0; round < 4; ++round) {
    for (size_t i = 0; i < host.size() / 8; i += 512) words(host)[i] = i + round;
    for (size_t b = 0; b < 8; ++b) expect(r, 100 * b, b);
    for (size_t i = 0; i < host.size() / 8; i += 512) ASSERT_EQ(load(words(host) + i), i + round);
    const auto all = vmem::stats();
    EXPECT_LE(all.host_bytes, all.host_budget);
    if (round == 2) {
      for (size_t b = 0; b < 8; ++b) put(r, 100 * b, b);
    }
  }
  ASSERT_EQ(vmem_set("host_budget", "256MiB"), 0) << said();
}

TEST_F(DeviceUnleased, ARegionMayBeFreedMeanwhile) {
  if (IsSkipped()) return;
  vmem::region r = read_mostly(kLarge);
  put(r, 10);
  load_the_middle(r, 11);
  aside([&] { r.free(); });
  go_on();
  join();
  const vmem::region other(kLarge);
  EXPECT_EQ(load(words(other) + kPlaces[1]), 0u);
}

}  // namespace
}  // namespace systest
