// A load of a block on a device that nobody leases, in a range advised READ_MOSTLY: the CPU is shown a copy and goes on
// when it has its piece, and the device keeps the block until something is stored to it. On simulated devices with page
// tables of their own.
#include <atomic>

#include "sim_support.h"

namespace {

using vmem::core::Status;
using vmem::device::SimOp;

constexpr unsigned kBoth = VMEM_READ | VMEM_WRITE;
constexpr size_t kLarge = 8 << 20, kWords = kLarge / 8;
constexpr size_t kPlaces[] = {0, kWords / 2 + 77, kWords - 1};  // of words that are looked at

class DeviceUnleased : public systest::SimTest {
 protected:
  void SetUp() override {
    start(2,
          {{"device_block_size", "8MiB"},
           {"device_budget", "64MiB"},
           {"host_budget", "256MiB"},
           {"trap", "uffd"}},  // the module takes blocks
          true);
  }
  void TearDown() override {
    fails_ = false;
    SimTest::TearDown();
    vmem_set("trap", "auto");
    vmem_set("device_block_size", "2MiB");  // as it is in tests of the same process that do not say
  }
  static vmem::region read_mostly(size_t size) {
    vmem::region r(size);
    r.advise(VMEM_ADVISE_SET_READ_MOSTLY);
    return r;
  }
  static uint64_t* words(const vmem::region& r) { return static_cast<uint64_t*>(r.data()); }
  static uint64_t load(const uint64_t* at) { return *static_cast<const volatile uint64_t*>(at); }
  // A kernel stores to the places of block b: value, value + 1, ..; then nobody leases it.
  void put(const vmem::region& r, uint64_t value, size_t b = 0) {
    uint64_t* const w = words(r) + b * kWords;
    ASSERT_EQ(vmem_acquire(w, kLarge, kBoth, 0, stream_), 0) << said();
    for (const size_t place : kPlaces) launch_store(stream_, w + place, value++);
    ASSERT_EQ(vmem_release(w, kLarge, stream_), 0) << said();
    ASSERT_TRUE(sim().synchronize(stream_).ok());
    at_rest(w);
  }
  static void expect(const vmem::region& r, uint64_t value, size_t b = 0) {
    for (const size_t place : kPlaces) EXPECT_EQ(load(words(r) + b * kWords + place), value++) << place;
  }
  static struct vmem_device_stats device(int d = 0) {
    struct vmem_device_stats stats = {};
    stats.size = sizeof stats;
    EXPECT_EQ(vmem_device_stats(d, &stats), 0) << said();
    return stats;
  }
  // Who has loaded one word of the middle, while the rest of the block is not there yet.
  void load_the_middle(const vmem::region& r, uint64_t value) {
    stop_at("device.showing_rest");
    seen_ = false;
    aside([&r, value, this] {
      EXPECT_EQ(load(words(r) + kPlaces[1]), value);
      seen_ = true;
    });
    ASSERT_TRUE(stopped());
    EXPECT_TRUE(until([this] { return seen_.load(); })) << "it waits for all of the block";
  }

  std::atomic<bool> seen_{false};
  static inline std::atomic<int> failures_{0};
  static inline std::atomic<bool> fails_{false};
};

TEST_F(DeviceUnleased, ALoadWaitsForItsPieceAndTheDeviceKeepsTheBlock) {
  if (IsSkipped()) return;
  const vmem::region r = read_mostly(kLarge);
  put(r, 10);
  load_the_middle(r, 11);
  go_on();
  join();
  expect(r, 10);
  EXPECT_EQ(device().used_bytes, kLarge);
  put(r, 20);
  expect(r, 20);
  EXPECT_EQ(device().used_bytes, kLarge);
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
    EXPECT_EQ(device().used_bytes, mostly ? kLarge : 0u);
  }
}

TEST_F(DeviceUnleased, AStoreTakesTheBlockFromTheDeviceWithoutAnotherCopy) {
  if (IsSkipped()) return;
  const vmem::region r = read_mostly(kLarge);
  put(r, 10);
  expect(r, 10);
  at_rest(words(r));  // all of it is shown
  EXPECT_EQ(device().used_bytes, kLarge);
  const uint64_t out = device().out_bytes;
  words(r)[kPlaces[1]] = 31;
  EXPECT_EQ(device().used_bytes, 0u);
  EXPECT_EQ(device().out_bytes, out);
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
  EXPECT_EQ(device().used_bytes, 0u);
}

TEST_F(DeviceUnleased, AReadLeaseKeepsTheCopyAndAWriteLeaseDropsIt) {
  if (IsSkipped()) return;
  const vmem::region r = read_mostly(kLarge);
  put(r, 10);
  expect(r, 10);
  at_rest(words(r));  // all of it is shown
  EXPECT_EQ(device().used_bytes, kLarge);
  const uint64_t out = device().out_bytes;
  ASSERT_EQ(vmem_acquire(words(r), kLarge, VMEM_READ, 0, stream_), 0) << said();
  expect(r, 10);
  ASSERT_EQ(vmem_release(words(r), kLarge, stream_), 0) << said();
  EXPECT_EQ(device().out_bytes, out);
  put(r, 20);
  expect(r, 20);
  at_rest(words(r));
  EXPECT_EQ(device().out_bytes, out + kLarge);
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
  at_rest(words(r));  // all of it is shown
  sim().lose(0, "the test took it away");
  expect(r, 10);
  EXPECT_NE(vmem_acquire(words(r), kLarge, VMEM_READ, 0, stream_), 0);
  expect(r, 10);
  EXPECT_EQ(vmem::stats().lost_blocks, 0u);
}

TEST_F(DeviceUnleased, WhatIsShownAndHasToLeaveTheDeviceIsTheBlock) {
  if (IsSkipped()) return;
  const vmem::region r = read_mostly(kLarge), more(8 * kLarge);  // all of the device
  put(r, 10);
  expect(r, 10);
  ASSERT_EQ(vmem_acquire(words(more), 8 * kLarge, kBoth, 0, stream_), 0) << said();
  const uint64_t out = device().out_bytes;
  expect(r, 10);
  EXPECT_EQ(device().out_bytes, out);
  ASSERT_EQ(vmem_release(words(more), 8 * kLarge, stream_), 0) << said();
}

TEST_F(DeviceUnleased, AHintTakesItToAnotherDeviceAndALeaseAtTheHostOrAnEvictionFromIt) {
  if (IsSkipped()) return;
  const vmem::region r = read_mostly(kLarge);
  put(r, 10);
  expect(r, 10);
  ASSERT_EQ(vmem_prefetch(words(r), kLarge, 1, nullptr), 0) << said();
  EXPECT_TRUE(until([] { return device(1).used_bytes == kLarge && device().used_bytes == 0; }));
  at_rest(words(r));
  expect(r, 10);
  EXPECT_EQ(device(1).used_bytes, kLarge);
  ASSERT_EQ(vmem_acquire(words(r), kLarge, kBoth, VMEM_HOST, nullptr), 0) << said();
  EXPECT_EQ(device(1).used_bytes, 0u);
  words(r)[kPlaces[0]] = 7;
  ASSERT_EQ(vmem_release(words(r), kLarge, nullptr), 0) << said();
  put(r, 30);
  expect(r, 30);
  ASSERT_EQ(vmem_evict(words(r), kLarge, VMEM_SSD), 0) << said();
  EXPECT_EQ(device().used_bytes, 0u);
  expect(r, 30);
}

// More than host memory has room for; and again, by loads and stores in turn.
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
