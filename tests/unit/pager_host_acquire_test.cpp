// Acquires at the host: the whole lease is in place when one returns; one that fails leaves nothing
// behind.
#include <gtest/gtest.h>

#include <cerrno>
#include <thread>

#include "edit_block.h"
#include "pager/calls/host_acquire.h"
#include "pager_device_parts.h"

namespace vmem::pager::test {
namespace {

class PagerHostAcquire : public DeviceParts {
 protected:
  Status acquire(Region& r, BlockIndex first, BlockIndex last, unsigned access, const AcquireRequest* ask = nullptr) {
    const vmem_range range = bytes(r, first, last, access);
    return leases.acquire({&range, 1}, ask);
  }
  static vmem_range bytes(const Region& r, BlockIndex first, BlockIndex last, unsigned access) {
    return {r.address(first), (last - first + 1) * r.block_size, access, 0};
  }
  void end(Region& r, BlockIndex first, BlockIndex last, unsigned access) {
    BigLock lock(map.mutex());
    lease_manager.take_back({&r, first, last}, access, VMEM_HOST, nullptr);
    map.match_holds(lock, {&r, first, last});
  }
  bool nothing_is_leased(Region& r) {
    BigLock lock(map.mutex());
    return r.leases.empty() && reserve.pinned() == 0 && r.counts.in_flight == 0;
  }
  HostAcquire& leases = calls.host_acquire;
};

TEST_F(PagerHostAcquire, AllOfItIsInPlaceAndWhatWasThereIsAHit) {
  Region& r = region(4);
  bring(r, 1);
  put_away(r, 2, 7);
  ASSERT_TRUE(acquire(r, 0, 3, VMEM_READ).ok());
  for (BlockIndex b = 0; b < 4; ++b) EXPECT_EQ(state(r, b), State::resident) << b;
  EXPECT_EQ(counters.lease_blocks, 4u);
  EXPECT_EQ(counters.lease_hits, 1u);
  uint64_t value = 0;
  ASSERT_TRUE(trap.load(r.address(2), &value));
  EXPECT_EQ(value, 7u);
  {
    BigLock lock(map.mutex());
    EXPECT_EQ(reserve.pinned(), 4 * kBlock);
    EXPECT_EQ(r.counts.in_flight, 0u);
  }
  end(r, 0, 3, VMEM_READ);
  EXPECT_TRUE(nothing_is_leased(r));
}

TEST_F(PagerHostAcquire, AllReadsAreUnderWayBeforeTheFirstIsWaitedFor) {
  Region& r = region(3);
  for (BlockIndex b = 0; b < 3; ++b) put_away(r, b, b + 1);
  engine.hold(Io::Op::read, true);
  Status result = core::error(EIO, "not yet");
  std::thread asker([&] { result = acquire(r, 0, 2, VMEM_READ); });
  engine.until_held(3);
  engine.hold(Io::Op::read, false);
  engine.let_go();
  asker.join();
  EXPECT_TRUE(result.ok());
  end(r, 0, 2, VMEM_READ);
}

TEST_F(PagerHostAcquire, WhatIsLeasedForWritingIsNotProtectedAnyMore) {
  Region& r = region(2);
  for (BlockIndex b = 0; b < 2; ++b) put_away(r, b, 9);
  ASSERT_TRUE(acquire(r, 0, 0, VMEM_READ).ok());
  EXPECT_NE(flags(r, 0, core::kProtected), 0);
  ASSERT_TRUE(acquire(r, 0, 1, VMEM_WRITE).ok());
  EXPECT_EQ(flags(r, 0, core::kProtected), 0) << "it was in place, protected";
  EXPECT_EQ(flags(r, 1, core::kProtected), 0);
  end(r, 0, 0, VMEM_READ);
  end(r, 0, 1, VMEM_WRITE);
}

TEST_F(PagerHostAcquire, WhatMayNotBeLeasedIsRefusedBeforeAnythingIsRead) {
  Region& r = region(2);
  r.backing = Backing::file_read;
  const vmem_range ranges[] = {bytes(r, 0, 0, VMEM_READ), bytes(r, 1, 1, VMEM_WRITE)};
  EXPECT_EQ(leases.acquire(ranges, nullptr).code(), -EACCES);
  const vmem_range beyond = {r.base, r.size + 1, VMEM_READ, 0};
  EXPECT_EQ(leases.acquire({&beyond, 1}, nullptr).code(), -EINVAL);
  EXPECT_TRUE(nothing_is_leased(r));
  EXPECT_EQ(state(r, 0), State::unpopulated);
}

TEST_F(PagerHostAcquire, OneOfWhichARangeIsLeasedElsewhereIsRefusedAsAWhole) {
  Region& r = device_region(3);
  ASSERT_TRUE(gpus.use(0).ok());
  {
    BigLock lock(map.mutex());
    ASSERT_TRUE(lease_manager.grant({&r, 2, 2}, VMEM_READ, 0, nullptr).ok());
  }
  const vmem_range ranges[] = {bytes(r, 0, 1, VMEM_READ), bytes(r, 2, 2, VMEM_READ)};
  EXPECT_EQ(leases.acquire(ranges, nullptr).code(), -EBUSY);
  {
    BigLock lock(map.mutex());
    EXPECT_EQ(r.leases.blocks(), 1u);
    EXPECT_EQ(reserve.pinned(), 0u);
    EXPECT_EQ(r.table[0].state, State::unpopulated);
    lease_manager.take_back({&r, 2, 2}, VMEM_READ, 0, nullptr);
  }
  EXPECT_TRUE(nothing_is_leased(r));
}

TEST_F(PagerHostAcquire, AReadThatFailsIsToldAndNothingIsLeased) {
  Region& r = region(3);
  put_away(r, 1, 7);
  engine.fail(Io::Op::read, EIO);
  EXPECT_EQ(acquire(r, 0, 2, VMEM_READ).code(), -EIO);
  EXPECT_TRUE(nothing_is_leased(r));
  EXPECT_EQ(state(r, 1), State::poisoned);
  engine.fail(Io::Op::read, 0);
  ASSERT_TRUE(acquire(r, 0, 2, VMEM_READ).ok()) << "an old failure is tried again";
  uint64_t value = 0;
  ASSERT_TRUE(trap.load(r.address(1), &value));
  EXPECT_EQ(value, 7u);
  end(r, 0, 2, VMEM_READ);
}

TEST_F(PagerHostAcquire, ABlockOnADeviceComesBack) {
  Region& r = device_region(1);
  supply_frames(r);
  place_changed(r);
  {
    BigLock lock(map.mutex());
    ASSERT_TRUE(frames.want_bounce(kUnit, 2 * kUnit, 2 * kUnit).ok());
  }
  ASSERT_TRUE(acquire(r, 0, 0, VMEM_READ).ok());
  EXPECT_EQ(state(r, 0), State::resident);
  EXPECT_EQ(devices.copied, 1u);
  uint64_t value = 0;
  ASSERT_TRUE(trap.load(r.address(0), &value));
  EXPECT_EQ(value, 0x0101010101010101u * FakeDevices::kByte);
  end(r, 0, 0, VMEM_READ);
}

TEST_F(PagerHostAcquire, WithoutMemoryForTheTimeOutItIsGivenUpAndWaitsForNoneAnyMore) {
  tunables.fault_timeout_ms = 30;
  Region& r = region(2);
  {
    BigLock lock(map.mutex());
    ASSERT_TRUE(budget.charge(budget.available(), 0)) << "others have it, and do not leave";
  }
  const Status s = acquire(r, 0, 1, VMEM_READ);
  EXPECT_EQ(s.code(), -ENOMEM) << s.text();
  EXPECT_TRUE(nothing_is_leased(r));
  BigLock lock(map.mutex());
  EXPECT_TRUE(waits.queue().empty());
}

TEST_F(PagerHostAcquire, OneThatWasCancelledLeavesNothingBehind) {
  Region& r = region(2);
  put_away(r, 0, 7);
  AcquireRequest ask;
  ask.regions = {r.id};
  engine.hold(Io::Op::read, true);
  Status result;
  std::thread asker([&] { result = acquire(r, 0, 1, VMEM_READ, &ask); });
  engine.until_held(1);
  ask.cancelled = true;
  engine.hold(Io::Op::read, false);
  engine.let_go();
  asker.join();
  engine.until_idle();  // blocks that were read go into place all the same
  EXPECT_EQ(result.code(), -ECANCELED);
  EXPECT_TRUE(nothing_is_leased(r));
}

TEST_F(PagerHostAcquire, OneWhoseRegionIsFreedMeanwhileFails) {
  Region& r = region(1);
  put_away(r, 0, 7);
  engine.hold(Io::Op::read, true);
  Status result;
  std::thread asker([&] { result = acquire(r, 0, 0, VMEM_READ); });
  engine.until_held(1);
  {
    BigLock lock(map.mutex());
    r.dying = true;
  }
  engine.hold(Io::Op::read, false);
  engine.let_go();
  asker.join();
  engine.until_idle();  // blocks that were read go into place all the same
  EXPECT_EQ(result.code(), -EINVAL);
  EXPECT_TRUE(nothing_is_leased(r));
  BigLock lock(map.mutex());
  r.dying = false;
  map.match_hold(r, 0);  // policies are not told about a dying region
}

TEST_F(PagerHostAcquire, AnAskOfAnOlderRegionIsRefused) {
  Region& r = region(1);
  AcquireRequest ask;
  ask.regions = {r.id + 1};
  EXPECT_EQ(acquire(r, 0, 0, VMEM_READ, &ask).code(), -EINVAL);
  EXPECT_TRUE(nothing_is_leased(r));
}

}  // namespace
}  // namespace vmem::pager::test
