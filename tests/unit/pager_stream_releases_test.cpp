// Releases on devices whose streams reach them when the test says so, and the waiters for them.
#include <gtest/gtest.h>

#include <cerrno>

#include "core/clock.h"
#include "pager_device_parts.h"

namespace vmem::pager::test {
namespace {

class PagerStreamReleases : public DeviceParts {
 protected:
  void SetUp() override {
    config.device_budget = 4 * kUnit;
    devices.streams = true;
    ASSERT_TRUE(gpus.use(0).ok());
    ASSERT_TRUE(gpus.use(1).ok());
    impatient.patience_ns = 0;
  }
  void lease(Region& r, uint64_t first, uint64_t last, int location, void* stream) {
    BigLock lock(map.mutex());
    ASSERT_TRUE(grants.grant({&r, first, last}, VMEM_READ, location, stream).ok());
  }
  Status release(Region& r, uint64_t first, uint64_t last, void* stream) {
    const vmem_range range{r.address(first), (last - first + 1) * r.block_size, VMEM_READ, 0};
    return releases.release({&range, 1}, stream, stream, false);
  }
  Status wait_for_turn(const BlockSpan& span, int location, const AcquireRequest* ask = nullptr) {
    BigLock lock(map.mutex());
    return releases.wait_for_turn(lock, {&span, 1}, {&span, 1}, location, ask);
  }
  uint64_t leased() {
    BigLock lock(map.mutex());
    return gpus[0].budget.leased();
  }
  uint64_t live() {
    BigLock lock(map.mutex());
    return gpus[0].budget.live();
  }
  void reap() {
    BigLock lock(map.mutex());
    releases.reap(lock);
  }
  void* const a = &streams[0];
  AcquireRequest impatient;

 private:
  int streams[2] = {};
};

TEST_F(PagerStreamReleases, ALeaseEndsWhenItsStreamGetsToItsReleaseAndNotBefore) {
  Region& r = device_region(4);
  lease(r, 0, 3, 0, a);
  ASSERT_TRUE(release(r, 1, 3, a).ok());
  EXPECT_EQ(leased(), 4 * kUnit);
  EXPECT_EQ(live(), kUnit);
  devices.reached = true;
  reap();
  EXPECT_EQ(leased(), kUnit);
  ASSERT_TRUE(release(r, 0, 0, a).ok());
  EXPECT_EQ(leased(), 0u) << "who releases looks, too";
  EXPECT_EQ(release(r, 0, 0, a).code(), -EINVAL);
}

TEST_F(PagerStreamReleases, OthersEndSoonWhileTheStreamGetsToThem) {
  Region& r = device_region(4);
  const uint64_t soon = StreamReleases::kSoon, begun = now_ns();
  const auto end_soon = [&](int d, uint64_t now) {
    BigLock lock(map.mutex());
    return releases.end_soon(d, now);
  };
  EXPECT_FALSE(end_soon(0, begun)) << "there are none";
  lease(r, 0, 3, 0, a);
  EXPECT_FALSE(end_soon(0, begun)) << "a live one is none";
  ASSERT_TRUE(release(r, 0, 0, a).ok());
  const uint64_t made = now_ns();
  EXPECT_TRUE(end_soon(0, begun + soon - 1));
  EXPECT_FALSE(end_soon(0, made + soon)) << "its stream is held";
  EXPECT_FALSE(end_soon(1, begun)) << "of another device";
  devices.reached = true;
  reap();
  EXPECT_FALSE(end_soon(0, begun)) << "it is over";
  devices.reached = false;
  ASSERT_TRUE(release(r, 1, 1, a).ok());
  EXPECT_TRUE(end_soon(0, made));
  devices.reached = true;
  reap();
}

TEST_F(PagerStreamReleases, OthersEndSoonHoweverManyStreamsOfAnotherDeviceAreHeld) {
  Region& r = device_region(2);
  int held[40];
  for (int& stream : held) {
    lease(r, 0, 0, 1, &stream);
    ASSERT_TRUE(release(r, 0, 0, &stream).ok());
  }
  lease(r, 1, 1, 0, a);
  const uint64_t begun = now_ns();
  ASSERT_TRUE(release(r, 1, 1, a).ok());
  {
    BigLock lock(map.mutex());
    EXPECT_TRUE(releases.end_soon(0, begun));
  }
  devices.reached = true;
  reap();
}

TEST_F(PagerStreamReleases, AStreamThatTakesNoMarkLeavesItsLeaseLive) {
  Region& r = device_region(2);
  lease(r, 0, 1, 0, a);
  devices.record_error = EBUSY;
  EXPECT_EQ(release(r, 0, 1, a).code(), -EBUSY);
  EXPECT_EQ(live(), 2 * kUnit);
  devices.record_error = 0;
  devices.reached = true;
  ASSERT_TRUE(release(r, 0, 1, a).ok());
  EXPECT_EQ(leased(), 0u);
}

// Each worker found its blocks leased, and checks again when it is told.
TEST_F(PagerStreamReleases, AWorkerIsToldWhereSomethingWaitsForLeasesToEndAndIsNotWokenElse) {
  Region& r = device_region(8);
  devices.reached = true;
  const auto told = [&](uint64_t b) {
    const auto count = [&] {
      BigLock lock(map.mutex());
      return gpus.work().count();
    };
    lease(r, b, b, 0, a);
    const uint64_t before = count();
    EXPECT_TRUE(release(r, b, b, a).ok());
    return count() - before;
  };
  const auto locked = [&](auto what) {
    BigLock lock(map.mutex());
    what(lock);
  };
  EXPECT_EQ(told(0), 0u);
  locked([&](BigLock& lock) {
    lock.hold();
    ASSERT_TRUE(queues.promotion_requests.push_back({&r, 1, 1, 1, core::Urgency::acquire, &r}));
  });
  EXPECT_EQ(told(0), 1u) << "a block that another device is to have";
  locked([&](BigLock& lock) {
    lock.hold();
    queues.promotion_requests.pop_front();
    ASSERT_TRUE(queues.demotion_requests.push_back({&r, 1, 1, 1, false}));
  });
  EXPECT_EQ(told(0), 1u) << ".. that host memory is to have";
  locked([&](BigLock& lock) {
    lock.hold();
    queues.demotion_requests.pop_front();
    for (uint64_t b = 0; b < 4; ++b) place(r, b, 0);
  });
  EXPECT_EQ(told(0), 0u) << "a device that is full, and nobody wants more";
  locked([&](BigLock& lock) {
    lock.hold();
    EXPECT_TRUE(cpu_mappings.ask(r, 1, 1));
  });
  EXPECT_EQ(told(0), 1u) << "an access of the CPU";
  locked([&](BigLock& lock) {
    lock.hold();
    map.frame_table()[r.table[1].aux].dev.asked = false;
    cpu_mappings.erase(cpu_mappings.begin());
    gpus[0].budget.set(3 * kUnit);
  });
  EXPECT_EQ(told(0), 1u) << "a budget that was lowered";
  locked([&](BigLock& lock) {
    lock.hold();
    remove(r, 3);
    ASSERT_EQ(gpus[0].budget.missing(), 0u);
    place(r, 4, 1);
    map.policy(r.table[4].aux).remove(r.table[4].aux);
    map.frame_table()[r.table[4].aux].admitted = false;
    map.spilled().set_share(50);
    map.spilled().add(r.table[4].aux, 1);
  });
  EXPECT_EQ(told(0), 0u) << "a spilled block that may stay";
  locked([&](BigLock& lock) {
    lock.hold();
    map.spilled().set_share(0);
  });
  EXPECT_EQ(told(0), 1u) << "one that is to leave";
  locked([&](BigLock& lock) {
    lock.hold();
    map.spilled().remove(r.table[4].aux);
    for (const uint64_t b : {0, 1, 2, 4}) remove(r, b);
  });
}

TEST_F(PagerStreamReleases, ALeaseAtTheHostEndsAtOnceAndNoStreamIsAsked) {
  Region& r = device_region(2);
  lease(r, 0, 1, VMEM_HOST, nullptr);
  devices.streams = false;
  ASSERT_TRUE(release(r, 0, 1, nullptr).ok());
  BigLock lock(map.mutex());
  EXPECT_EQ(reserve.pinned(), 0u);
  EXPECT_TRUE(releases.empty());
}

TEST_F(PagerStreamReleases, ALostDeviceEndsWhatItsStreamsWillNeverGetTo) {
  Region& r = device_region(1);
  lease(r, 0, 0, 0, a);
  ASSERT_TRUE(release(r, 0, 0, a).ok());
  devices.lost = 0;
  reap();
  EXPECT_EQ(leased(), 0u);
  BigLock lock(map.mutex());
  EXPECT_TRUE(gpus[0].lost);
}

TEST_F(PagerStreamReleases, ARangeIsRefusedByLiveLeasesElsewhereAndWaitsForEndingOnes) {
  Region& r = device_region(2);
  lease(r, 1, 1, 0, a);
  EXPECT_EQ(wait_for_turn({&r, 0, 1}, 1).code(), -EBUSY);
  EXPECT_TRUE(wait_for_turn({&r, 0, 1}, 0).ok()) << "where it is leased already";
  EXPECT_TRUE(wait_for_turn({&r, 0, 0}, 1).ok());
  ASSERT_TRUE(release(r, 1, 1, a).ok());
  EXPECT_EQ(wait_for_turn({&r, 0, 1}, 1, &impatient).code(), -EALREADY);
  devices.reached = true;
  EXPECT_TRUE(wait_for_turn({&r, 0, 1}, 1).ok());
}

TEST_F(PagerStreamReleases, RoomForALeaseIsRefusedByLiveLeasesAndWaitsForEndingOnes) {
  Region& r = device_region(8);
  lease(r, 0, 2, 0, a);
  EXPECT_TRUE(wait_for_turn({&r, 4, 4}, 0).ok());
  EXPECT_EQ(wait_for_turn({&r, 4, 5}, 0).code(), -ENOMEM);
  ASSERT_TRUE(release(r, 0, 2, a).ok());
  EXPECT_EQ(wait_for_turn({&r, 4, 5}, 0, &impatient).code(), -EAGAIN);
  devices.reached = true;
  EXPECT_TRUE(wait_for_turn({&r, 4, 5}, 0).ok());
}

TEST_F(PagerStreamReleases, ACancelledAskWaitsNoLonger) {
  Region& r = device_region(1);
  lease(r, 0, 0, 0, a);
  ASSERT_TRUE(release(r, 0, 0, a).ok());
  impatient.patience_ns = UINT64_MAX;
  impatient.cancelled = true;
  EXPECT_EQ(wait_for_turn({&r, 0, 0}, 1, &impatient).code(), -ECANCELED);
  devices.reached = true;
  reap();
}

TEST_F(PagerStreamReleases, ABlockThatIsStaleAtItsDeviceIsRefusedWhileALiveLeaseKeepsIt) {
  Region& r = device_region(1);
  lease(r, 0, 0, 0, a);
  {
    BigLock lock(map.mutex());
    place(r, 0, 0);
    map.frame_table()[r.table[0].aux].dev.stale = true;
    r.counts.device_stale = 1;
    bool wait = false;
    const BlockSpan span{&r, 0, 0};
    EXPECT_EQ(releases.check_device_stale({&span, 1}, &wait).code(), -EBUSY);
  }
  ASSERT_TRUE(release(r, 0, 0, a).ok());
  EXPECT_EQ(wait_for_turn({&r, 0, 0}, 0, &impatient).code(), -EALREADY);
  devices.reached = true;
  reap();
  BigLock lock(map.mutex());
  map.frame_table()[r.table[0].aux].dev.stale = false;
  r.counts.device_stale = 0;
  remove(r, 0);
}

}  // namespace
}  // namespace vmem::pager::test
