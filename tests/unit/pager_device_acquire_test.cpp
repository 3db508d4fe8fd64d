// Acquires at a device: their effects when one returns; one that fails leaves nothing behind.
#include <gtest/gtest.h>

#include <cerrno>
#include <chrono>
#include <future>

#include "common/patience.h"
#include "edit_block.h"
#include "pager_device_parts.h"

namespace vmem::pager::test {
namespace {

class PagerDeviceAcquire : public PromotionParts {
 protected:
  void SetUp() override {
    PromotionParts::SetUp();
    devices.streams = true;
  }
  Status acquire(Region& r, BlockIndex first, BlockIndex last, unsigned access, const AcquireRequest* ask = nullptr) {
    const vmem_range range{r.address(first), (last - first + 1) * r.block_size, access, 0};
    return acquires.acquire({&range, 1}, 0, stream, ask);
  }
  // Workers finish what acquires have begun; then the lease ends.
  void end(Region& r, BlockIndex first, BlockIndex last, unsigned access) {
    BigLock lock(map.mutex());
    while (copy_in.end_issued(lock, 0)) {
    }
    lease_manager.take_back({&r, first, last}, access, 0, stream);
    map.match_holds(lock, {&r, first, last});
  }
  uint64_t leased() {
    BigLock lock(map.mutex());
    return gpus[0].budget.leased();
  }
  bool asked_for_nothing() {
    BigLock lock(map.mutex());
    return promotion_requests.empty();
  }
  static bool over(const std::future<Status>& call) {
    return call.wait_for(std::chrono::milliseconds(1)) == std::future_status::ready;
  }
  // Repeats as a reclaim thread does.
  template <typename F>
  void ask_again_until(const F& done) {
    ASSERT_TRUE(vmem::test::eventually([&] {
      {
        BigLock lock(map.mutex());
        failed.ask_again(lock, now_ns());
      }
      return done();
    }));
  }
  void* const stream = this;
  DeviceAcquire& acquires = calls.device_acquire;
};

TEST_F(PagerDeviceAcquire, ItReturnsWhenTheCopiesAreIssuedAndItsStreamWaitsForThem) {
  Region& r = device_region(2);
  ASSERT_TRUE(acquire(r, 0, 1, VMEM_READ).ok());
  EXPECT_EQ(state(r, 0), State::promoting) << "nobody has waited for the device";
  EXPECT_EQ(devices.came.size(), 2u);
  EXPECT_GE(devices.ordered, 1u);
  EXPECT_EQ(leased(), 2 * kUnit);
  EXPECT_EQ(flags(r, 0, core::kDirty), 0);
  end(r, 0, 1, VMEM_READ);
  EXPECT_EQ(state(r, 0), State::on_device);
  for (const BlockIndex b : {0, 1}) take_away(r, b);
}

TEST_F(PagerDeviceAcquire, WhatIsThereAlreadyIsLeasedWithoutACopy) {
  Region& r = device_region(1);
  {
    BigLock lock(map.mutex());
    place(r, 0, 0);
  }
  ASSERT_TRUE(acquire(r, 0, 0, VMEM_READ).ok());
  EXPECT_TRUE(devices.came.empty());
  EXPECT_EQ(counters.lease_hits, 1u);
  end(r, 0, 0, VMEM_READ);
  take_away(r, 0);
}

TEST_F(PagerDeviceAcquire, OfWhatTheCpuIsShownAReadLeaseKeepsTheCopyAndAWriteLeaseDropsIt) {
  Region& r = device_region(1);
  {
    BigLock lock(map.mutex());
    place(r, 0, 0);
    ASSERT_TRUE(budget.charge(kUnit, 0));
    ASSERT_TRUE(cpu_mappings.expect());
    cpu_mappings.show(r, 0, 1);
    map.frame_table()[r.table[0].aux].dev.displaced = true;
  }
  for (const unsigned access : {unsigned{VMEM_READ}, unsigned{VMEM_READ | VMEM_WRITE}}) {
    EXPECT_TRUE(acquire(r, 0, 0, access).ok());
    {
      BigLock lock(map.mutex());
      EXPECT_EQ(map.frame_table()[r.table[0].aux].dev.cpu_mapped, access == VMEM_READ);
      EXPECT_FALSE(map.frame_table()[r.table[0].aux].dev.displaced) << "the device has used it since";
    }
    end(r, 0, 0, access);
  }
  take_away(r, 0);
}

TEST_F(PagerDeviceAcquire, WhatIsLeasedForWritingCountsAsChangedUnlessThatIsToldLater) {
  Region& r = device_region(2);
  ASSERT_TRUE(acquire(r, 0, 0, VMEM_WRITE).ok());
  EXPECT_NE(flags(r, 0, core::kDirty), 0);
  end(r, 0, 0, VMEM_WRITE);
  AcquireRequest ask;
  ask.regions = {r.id};
  ask.moves_blocks = ask.tells_stores = true;
  ASSERT_TRUE(acquire(r, 1, 1, VMEM_WRITE, &ask).ok());
  {
    BigLock lock(map.mutex());
    EXPECT_TRUE(map.frame_table()[r.table[1].aux].dev.undecided);
    while (copy_in.end_issued(lock, 0)) {
    }
    blocks.not_changed({&r, 1, 1}, 0);
  }
  EXPECT_EQ(flags(r, 1, core::kDirty), 0);
  end(r, 1, 1, VMEM_WRITE);
  for (const BlockIndex b : {0, 1}) take_away(r, b);
}

TEST_F(PagerDeviceAcquire, WhatMayNotBeLeasedIsRefusedBeforeAnythingIsAskedFor) {
  Region& host_only = region(1);
  EXPECT_EQ(acquire(host_only, 0, 0, VMEM_READ).code(), -EINVAL);
  Region& r = device_region(8);
  EXPECT_EQ(acquire(r, 0, 4, VMEM_READ).code(), -ENOMEM) << "the device has four blocks";
  r.backing = Backing::file_read;
  EXPECT_EQ(acquire(r, 0, 0, VMEM_WRITE).code(), -EACCES);
  r.backing = Backing::anonymous;
  devices.lost = 0;
  EXPECT_EQ(acquire(r, 0, 0, VMEM_READ).code(), -EIO);
  EXPECT_EQ(leased(), 0u);
  EXPECT_TRUE(asked_for_nothing());
  EXPECT_EQ(state(r, 0), State::unpopulated);
}

TEST_F(PagerDeviceAcquire, OneWhoseDeviceCannotMakeTheBlocksFailsAndNothingIsLeased) {
  tunables.fault_timeout_ms = 30;
  Region& r = device_region(1);
  devices.prepare_error = EIO;
  EXPECT_EQ(acquire(r, 0, 0, VMEM_READ).code(), -EIO);
  EXPECT_EQ(leased(), 0u);
  EXPECT_TRUE(asked_for_nothing());
  EXPECT_EQ(state(r, 0), State::unpopulated);
}

// An acquire waits if the kernel has no memory to read its blocks, as an acquire at host memory
// does.
TEST_F(PagerDeviceAcquire, OneWhoseBlocksTheKernelHasNoMemoryToReadWaits) {
  for (const int refusal : {ENOMEM, ENOBUFS, EAGAIN}) {
    Region& r = supplied(1);
    put_away(r, 0, 7);
    engine.fail(store::Io::Op::read, refusal);
    const uint64_t before = engine.count(store::Io::Op::read);
    auto waits_for_it = std::async(std::launch::async, [&] { return acquire(r, 0, 0, VMEM_READ); });
    ask_again_until([&] { return engine.count(store::Io::Op::read) >= before + 4 || over(waits_for_it); });
    engine.fail(store::Io::Op::read, 0);
    ask_again_until([&] { return over(waits_for_it); });
    const Status s = waits_for_it.get();
    ASSERT_TRUE(s.ok()) << s.text();
    EXPECT_EQ(devices.came.back(), 7u);
    EXPECT_EQ(counters.io_errors, 0u);
    end(r, 0, 0, VMEM_READ);
    take_away(r, 0);
  }
}

TEST_F(PagerDeviceAcquire, OneWhoseBlocksTheKernelHasNoMemoryToReadEndsWhenNothingGoesOn) {
  tunables.fault_timeout_ms = 200 * vmem::test::patience();  // the block is read twice in that time
  Region& r = supplied(1);
  put_away(r, 0, 7);
  engine.fail(store::Io::Op::read, ENOMEM);
  const uint64_t before = engine.count(store::Io::Op::read);
  auto waits_for_it = std::async(std::launch::async, [&] { return acquire(r, 0, 0, VMEM_READ); });
  ask_again_until([&] { return over(waits_for_it); });
  const Status s = waits_for_it.get();
  EXPECT_EQ(s.code(), -ENOMEM);
  EXPECT_NE(s.text().find("the kernel had no memory to read a block"), std::string_view::npos) << s.text();
  EXPECT_GT(engine.count(store::Io::Op::read), before + 1);
  EXPECT_EQ(leased(), 0u);
  EXPECT_EQ(state(r, 0), State::stored);
  engine.fail(store::Io::Op::read, 0);
  waits_for_it = std::async(std::launch::async, [&] { return acquire(r, 0, 0, VMEM_READ); });
  ask_again_until([&] { return over(waits_for_it); });
  EXPECT_TRUE(waits_for_it.get().ok());
  end(r, 0, 0, VMEM_READ);
  take_away(r, 0);
}

TEST_F(PagerDeviceAcquire, WhatFailedIsReadAgainAlsoWhereNoMemoryWasThereForTheReason) {
  Region& r = supplied(1);
  put_away(r, 0, 7);
  engine.fail(store::Io::Op::read, EIO);
  DeferredWork after;
  {
    BigLock lock(map.mutex());
    ASSERT_TRUE(page_in.start_fill(r, 0, core::Urgency::fault, after));
    edit(r.table, 0).flags |= core::kFaultPending;
  }
  page_in.run(after);
  engine.until_idle();
  ASSERT_EQ(state(r, 0), State::poisoned);
  {
    BigLock lock(map.mutex());
    r.reasons.clear();
  }
  engine.fail(store::Io::Op::read, 0);
  const Status s = acquire(r, 0, 0, VMEM_READ);
  ASSERT_TRUE(s.ok()) << s.text();
  EXPECT_EQ(devices.came.back(), 7u);
  end(r, 0, 0, VMEM_READ);
  take_away(r, 0);
}

TEST_F(PagerDeviceAcquire, OneThatMovesBlocksItselfMakesRoomForThem) {
  Region& r = device_region(5);
  {
    BigLock lock(map.mutex());
    for (const BlockIndex b : {0, 1, 2, 3}) place(r, b, 0);
  }
  AcquireRequest ask;
  ask.regions = {r.id};
  ask.moves_blocks = true;
  ASSERT_TRUE(acquire(r, 4, 4, VMEM_READ, &ask).ok());
  end(r, 4, 4, VMEM_READ);
  size_t there = 0;
  for (const BlockIndex b : {0, 1, 2, 3}) there += state(r, b) == State::on_device;
  EXPECT_EQ(there, 3u);
  for (const BlockIndex b : {0, 1, 2, 3, 4})
    if (state(r, b) == State::on_device) take_away(r, b);
}

TEST_F(PagerDeviceAcquire, OneThatWasCancelledLeavesNothingBehind) {
  Region& r = device_region(1);
  AcquireRequest ask;
  ask.regions = {r.id};
  ask.cancelled = true;
  EXPECT_EQ(acquire(r, 0, 0, VMEM_READ, &ask).code(), -ECANCELED);
  EXPECT_EQ(leased(), 0u);
  EXPECT_TRUE(asked_for_nothing());
}

}  // namespace
}  // namespace vmem::pager::test
