// Advice about places. A block advised for a device stays there while others leave. A block advised
// for host memory leaves first. A READ_MOSTLY block keeps its copy in host memory. In all cases
// bytes are right and nothing is refused. On simulated devices.
#include <cerrno>
#include <vector>

#include "sim_support.h"

namespace {

using systest::kBlock;

constexpr size_t kWords = kBlock / 8, kRoom = 16;  // blocks of a device's budget

class Places : public systest::SimTest, public ::testing::WithParamInterface<bool> {
 protected:
  void SetUp() override {
    start(2, {{"peer_spill_percent", "50"}, {"device_block_size", "2MiB"}}, GetParam());
    if (IsSkipped()) return;
    streams_of_ = {stream_, stream(1)};
    device_stats(1);  // marks it as used from now on
  }
  void TearDown() override {
    vmem_set("peer_spill_percent", "50");
    SimTest::TearDown();
  }
  static uint64_t* word(const vmem::region& r, size_t b) { return static_cast<uint64_t*>(r.data()) + b * kWords; }
  static void advise(const vmem::region& r, size_t first, size_t count, int advice, int location = 0) {
    EXPECT_EQ(vmem_advise(word(r, first), count * kBlock, advice, location), 0) << said();
  }
  static void set(const vmem::region& r) {
    for (size_t b = 0; b < r.size() / kBlock; ++b) *word(r, b) = 100 + b;
  }
  static void expect_all(const vmem::region& r) {
    for (size_t b = 0; b < r.size() / kBlock; ++b)
      EXPECT_EQ(*static_cast<const volatile uint64_t*>(word(r, b)), 100 + b) << b;
    EXPECT_EQ(vmem::stats().lost_blocks, 0u);
  }
  // Leases the blocks one after the other, and waits until the stream has reached the releases.
  void pass(const vmem::region& r, size_t first, size_t count, int d = 0, unsigned access = VMEM_READ) {
    void* const s = streams_of_[static_cast<size_t>(d)];
    for (size_t b = first; b < first + count; ++b) {
      ASSERT_EQ(vmem_acquire(word(r, b), kBlock, access, d, s), 0) << said();
      ASSERT_EQ(vmem_release(word(r, b), kBlock, s), 0) << said();
      ASSERT_TRUE(sim().synchronize(s).ok());
      at_rest(word(r, b));
    }
  }
  static uint64_t on_devices(const vmem::region& r, size_t first, size_t count) {
    return residency(word(r, first), count * kBlock).device_bytes / kBlock;
  }

  std::vector<void*> streams_of_;  // by device
};

TEST_P(Places, WhatIsBestOnADeviceStaysThereWhileOthersLeave) {
  if (IsSkipped()) return;
  vmem_set("peer_spill_percent", "0");
  const vmem::region r(8 * kBlock), others(3 * kRoom * kBlock);
  set(r);
  set(others);
  advise(r, 0, 8, VMEM_ADVISE_SET_PREFERRED_LOCATION, 0);
  pass(r, 0, 8);
  for (int turn = 0; turn < 2; ++turn) pass(others, 0, 3 * kRoom);
  EXPECT_EQ(on_devices(r, 0, 8), 8u);
  // More than the device holds nevertheless.
  advise(others, 0, 3 * kRoom, VMEM_ADVISE_SET_PREFERRED_LOCATION, 0);
  pass(others, 0, 3 * kRoom);
  advise(others, 0, 3 * kRoom, VMEM_ADVISE_UNSET_PREFERRED_LOCATION);
  advise(r, 0, 8, VMEM_ADVISE_UNSET_PREFERRED_LOCATION);
  for (int turn = 0; turn < 4; ++turn) pass(others, 0, 3 * kRoom);
  EXPECT_LT(on_devices(r, 0, 8), 8u);
  expect_all(r);
  expect_all(others);
}

TEST_P(Places, WhatIsBestInHostMemoryLeavesADeviceFirst) {
  if (IsSkipped()) return;
  const vmem::region r(kRoom * kBlock), more(4 * kBlock);
  set(r);
  set(more);
  advise(r, 6, 4, VMEM_ADVISE_SET_PREFERRED_LOCATION, VMEM_HOST);
  pass(r, 0, kRoom);
  EXPECT_EQ(on_devices(r, 0, kRoom), kRoom) << "a lease brings it all the same";
  pass(more, 0, 4);
  EXPECT_TRUE(until([&] { return on_devices(r, 6, 4) == 0; }));
  EXPECT_EQ(on_devices(r, 0, 6) + on_devices(r, 10, kRoom - 10), kRoom - 4);
  EXPECT_EQ(device_stats(1).guest_bytes, 0u) << "and is nobody's guest";
  expect_all(r);
  expect_all(more);
}

TEST_P(Places, WhatIsKnownAlreadyHearsOfIt) {
  if (IsSkipped()) return;
  vmem_set("peer_spill_percent", "0");
  const vmem::region r(kRoom * kBlock), more(4 * kBlock);
  set(r);
  set(more);
  pass(r, 0, kRoom);
  advise(r, 0, kRoom - 4, VMEM_ADVISE_SET_PREFERRED_LOCATION, 0);
  advise(r, 3, 1, VMEM_ADVISE_SET_PREFERRED_LOCATION, VMEM_HOST);
  pass(more, 0, 1);
  EXPECT_TRUE(until([&] { return on_devices(r, 3, 1) == 0; }));
  pass(more, 1, 3);
  EXPECT_EQ(on_devices(r, 0, kRoom - 4), kRoom - 5);
  expect_all(r);
}

TEST_P(Places, WhatWillBeNeededGoesToWhereItIsBest) {
  if (IsSkipped()) return;
  const vmem::region r(6 * kBlock);
  set(r);
  r.evict();
  advise(r, 1, 2, VMEM_ADVISE_SET_PREFERRED_LOCATION, 0);
  advise(r, 4, 1, VMEM_ADVISE_SET_PREFERRED_LOCATION, 1);
  r.advise(VMEM_ADVISE_WILL_NEED, 0);
  EXPECT_TRUE(until([&] { return on_devices(r, 1, 2) == 2 && on_devices(r, 4, 1) == 1; }));
  EXPECT_TRUE(until([&] { return r.query().host_bytes == 3 * kBlock; }));
  EXPECT_EQ(device_stats().used_bytes, 2 * kBlock);
  EXPECT_EQ(device_stats(1).used_bytes, kBlock);
  expect_all(r);
}

TEST_P(Places, FromAnotherDeviceItGoesBackAndIsNoGuestThere) {
  if (IsSkipped()) return;
  const vmem::region r(4 * kBlock), others(kRoom * kBlock);
  set(r);
  set(others);
  advise(r, 0, 4, VMEM_ADVISE_SET_PREFERRED_LOCATION, 1);
  pass(r, 0, 4, 0, VMEM_READ | VMEM_WRITE);
  EXPECT_EQ(device_stats().used_bytes, 4 * kBlock) << "a lease brings it where it asks";
  pass(others, 0, kRoom);
  EXPECT_TRUE(until([] { return device_stats(1).used_bytes == 4 * kBlock; }));
  EXPECT_EQ(device_stats(1).guest_bytes, 0u);
  EXPECT_EQ(on_devices(others, 0, kRoom), kRoom);
  EXPECT_EQ(vmem::stats().device_to_host_bytes, 0u);
  expect_all(r);
  expect_all(others);
}

// The staging frames hold at most 20 blocks: by age alone, the copies of blocks used first would
// go.
TEST_P(Places, WhatIsReadMostKeepsItsCopyInHostMemory) {
  if (IsSkipped()) return;
  vmem_set("peer_spill_percent", "0");
  vmem_set("staging_share", "40");
  const vmem::region r(4 * kBlock), plain(4 * kBlock), others(40 * kBlock);
  for (const vmem::region* each : {&r, &plain, &others}) {
    set(*each);
    each->evict();
  }
  advise(r, 0, 4, VMEM_ADVISE_SET_READ_MOSTLY);
  pass(r, 0, 4);
  pass(plain, 0, 4);
  const auto read_by = [](const auto& does) {
    const uint64_t before = vmem::stats().read_bytes;
    does();
    return vmem::stats().read_bytes - before;
  };
  // Repeat until the blocks without advice have left. The policy decides how many others come
  // before that.
  EXPECT_TRUE(until([&] {
    pass(others, 0, 40);
    EXPECT_EQ(read_by([&] { pass(r, 0, 4); }), 0u) << "none came from the disk";
    EXPECT_EQ(read_by([&] { pass(r, 0, 4, 1); }), 0u) << ".. for either device";
    return read_by([&] { pass(plain, 0, 4); }) != 0;
  }));
  // A block that may have changed has no copy.
  advise(r, 0, 4, VMEM_ADVISE_UNSET_READ_MOSTLY);
  const uint64_t out = vmem::stats().device_to_host_bytes;
  pass(r, 0, 4, 1, VMEM_READ | VMEM_WRITE);
  r.evict();
  EXPECT_EQ(vmem::stats().device_to_host_bytes - out, r.size());
  expect_all(r);
  expect_all(others);
  vmem_set("staging_share", "50");
}

TEST_P(Places, SoManyRangesAreKept) {
  if (IsSkipped()) return;
  const vmem::region r(600 * kBlock);
  size_t kept = 0;
  while (kept < 300 && vmem_advise(word(r, 2 * kept), kBlock, VMEM_ADVISE_SET_PREFERRED_LOCATION, 0) == 0) ++kept;
  EXPECT_EQ(kept, 256u);
  EXPECT_EQ(vmem_advise(word(r, 599), kBlock, VMEM_ADVISE_SET_READ_MOSTLY, 0), -ENOSPC);
  advise(r, 0, 600, VMEM_ADVISE_UNSET_PREFERRED_LOCATION);
  advise(r, 599, 1, VMEM_ADVISE_SET_READ_MOSTLY);
  EXPECT_EQ(vmem_advise(word(r, 0), kBlock, VMEM_ADVISE_SET_PREFERRED_LOCATION, 2), -ENODEV);
  EXPECT_EQ(vmem_advise(word(r, 0), kBlock, VMEM_ADVISE_SET_PREFERRED_LOCATION, VMEM_SSD), -EINVAL);
}

INSTANTIATE_TEST_SUITE_P(Sim, Places, ::testing::Bool(), [](const ::testing::TestParamInfo<bool>& handles) {
  return handles.param ? "handles" : "managed";
});

}  // namespace
