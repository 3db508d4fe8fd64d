// Releases on devices whose streams reach them when the test says so, and the waiters for them.
#include <gtest/gtest.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <deque>
#include <list>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "core/clock.h"
#include "pager_device_parts.h"

namespace {

using vmem::core::BigLock;
using vmem::core::Status;
using vmem::pager::AcquireRequest;
using vmem::pager::BlockSpan;
using vmem::pager::PendingRelease;
using vmem::pager::Region;
using vmem::pager::StreamReleaseQueue;

class PagerStreamReleases : public vmem::pager::test::DeviceParts {
 protected:
  void SetUp() override {
    tunables.device_budget = 4 * kUnit;
    devices.streams = true;
    ASSERT_TRUE(gpus.use(0).ok());
    ASSERT_TRUE(gpus.use(1).ok());
    impatient.patience_ns = 0;
  }
  void lease(Region& r, uint64_t first, uint64_t last, int location, void* stream) {
    BigLock lock(map.mutex());
    ASSERT_TRUE(lease_manager.grant({&r, first, last}, VMEM_READ, location, stream).ok());
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
  const uint64_t soon = vmem::pager::StreamReleases::kSoon, begun = vmem::core::now_ns();
  const auto end_soon = [&](int d, uint64_t now) {
    BigLock lock(map.mutex());
    return releases.end_soon(d, now);
  };
  EXPECT_FALSE(end_soon(0, begun)) << "there are none";
  lease(r, 0, 3, 0, a);
  EXPECT_FALSE(end_soon(0, begun)) << "a live one is none";
  ASSERT_TRUE(release(r, 0, 0, a).ok());
  const uint64_t made = vmem::core::now_ns();
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
  const uint64_t begun = vmem::core::now_ns();
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
    ASSERT_TRUE(queues.promotion_requests.push_back({&r, 1, 1, 1, vmem::core::Urgency::acquire, &r}));
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

// The queue asks for the oldest release of each lane, and for the next when that ended.
class PagerStreamReleaseQueue : public ::testing::Test {
 protected:
  void TearDown() override { EXPECT_EQ(all.check(), ""); }
  // Queues a release on the stream, which has recorded the mark.
  uint64_t add(int device, void* stream, Region* r = nullptr, bool recorded = true) {
    std::list<PendingRelease> made(1);
    PendingRelease& e = made.front();
    e.device = device;
    e.stream = e.end = stream;
    e.thread = pthread_self();
    e.recorded = recorded;
    if (r != nullptr) e.spans.push_back({r, 0, 0});
    all.add(made, made.begin());
    EXPECT_TRUE(made.empty());
    last = e.id;
    return last;
  }
  std::vector<uint64_t> oldest(uint64_t after = 0) {
    std::array<const PendingRelease*, 4> out{};
    const size_t count = all.oldest(after, out);
    std::vector<uint64_t> ids;
    for (size_t i = 0; i < count; ++i) ids.push_back(out[i]->id);
    return ids;
  }
  void end(uint64_t id) {
    const size_t before = over.size();
    const PendingRelease* e = all.find(id);
    ASSERT_NE(e, nullptr) << id;
    all.end(*e, &over);
    EXPECT_EQ(over.size(), before + 1);
    EXPECT_EQ(&over.back(), e) << "it is kept until the lock is gone";
  }
  using Ids = std::vector<uint64_t>;

  StreamReleaseQueue all;
  std::list<PendingRelease> over;
  uint64_t last = 0;
  int a = 0, b = 0;  // streams
};

TEST_F(PagerStreamReleaseQueue, TheOldestOfEachLaneIsAskedFor) {
  EXPECT_TRUE(all.empty());
  const uint64_t one = add(0, &a), two = add(0, &a), three = add(0, &b), four = add(1, &a);
  EXPECT_EQ(all.size(), 4u);
  EXPECT_EQ(oldest(), (Ids{one, three, four})) << "another stream, and another device, is another lane";
  EXPECT_EQ(oldest(one), (Ids{three, four}));
  end(one);
  EXPECT_EQ(oldest(), (Ids{two, three, four}));
  end(two);
  EXPECT_EQ(oldest(), (Ids{three, four}));
  EXPECT_EQ(add(0, &a), four + 1);
  EXPECT_EQ(oldest(), (Ids{three, four, four + 1})) << "the lane begins anew";
}

TEST_F(PagerStreamReleaseQueue, ALaneIsOneThreads) {
  const uint64_t mine = add(0, &a);
  uint64_t other = 0;
  std::thread([&] { other = add(0, &a); }).join();
  EXPECT_EQ(oldest(), (Ids{mine, other})) << "what two threads put on a stream may be in either order";
}

TEST_F(PagerStreamReleaseQueue, AReleaseWhoseOwnerIsInTheDriverIsNotAskedFor) {
  const uint64_t one = add(0, &a, nullptr, false), two = add(0, &a);
  EXPECT_TRUE(oldest().empty()) << "nor those behind it";
  end(one);
  EXPECT_EQ(oldest(), (Ids{two}));
}

TEST_F(PagerStreamReleaseQueue, ALookHasItsEnd) {
  std::array<char, 9> streams{};
  for (char& s : streams) add(0, &s);
  EXPECT_EQ(oldest(), (Ids{1, 2, 3, 4}));
  EXPECT_EQ(oldest(4), (Ids{5, 6, 7, 8}));
  EXPECT_EQ(oldest(8), (Ids{9}));
  EXPECT_TRUE(oldest(9).empty());
}

TEST_F(PagerStreamReleaseQueue, OneThatIsNotToBeLeavesFromTheMiddle) {
  const uint64_t one = add(0, &a), two = add(0, &a), three = add(0, &a);
  end(two);
  EXPECT_EQ(oldest(), (Ids{one})) << "the oldest is as it was";
  EXPECT_EQ(all.find(two), nullptr);
  end(one);
  EXPECT_EQ(oldest(), (Ids{three}));
}

TEST_F(PagerStreamReleaseQueue, ARegionThatGoesIsAskedForByNobody) {
  Region gone{16, 4}, stays{16, 4};
  const uint64_t one = add(0, &a, &gone);
  add(0, &b, &stays);
  EXPECT_TRUE(all.any(gone) && all.any(stays));
  all.forget(gone);
  EXPECT_FALSE(all.any(gone));
  EXPECT_TRUE(all.any(stays));
  EXPECT_EQ(all.size(), 2u) << "the stream gets there all the same";
  EXPECT_NE(all.find(one), nullptr);
}

TEST_F(PagerStreamReleaseQueue, TheCheckSeesALaneThatNobodyAsksFor) {
  const uint64_t one = add(0, &a), two = add(0, &a);
  auto* first = const_cast<PendingRelease*>(all.find(one));
  auto* second = const_cast<PendingRelease*>(all.find(two));
  first->oldest = false;
  EXPECT_EQ(all.check(), "the oldest release of a lane is not marked");
  first->oldest = second->oldest = true;
  EXPECT_EQ(all.check(), "a lane has two oldest");
  second->oldest = false;
  std::swap(first->id, second->id);
  EXPECT_EQ(all.check(), "releases at devices are not in the order of their numbers");
  std::swap(first->id, second->id);
}

// Streams reach their releases in order, whichever comes first; each check finds all that were
// reached.
TEST_F(PagerStreamReleaseQueue, NoneIsForgottenInALongMix) {
  std::mt19937 random(5);
  std::array<char, 5> streams{};
  std::array<std::deque<uint64_t>, 5> lanes;
  for (int n = 0; n < 4000; ++n) {
    const size_t lane = random() % streams.size();
    if (random() % 2 == 0) {
      lanes[lane].push_back(add(0, &streams[lane]));
    } else if (!lanes[lane].empty()) {
      // Now and then a release that must not end.
      const auto which =
          lanes[lane].begin() + static_cast<ptrdiff_t>(random() % 8 == 0 ? random() % lanes[lane].size() : 0);
      end(*which);
      lanes[lane].erase(which);
      over.clear();
    }
    std::vector<uint64_t> expected;
    for (const auto& l : lanes)
      if (!l.empty()) expected.push_back(l.front());
    std::sort(expected.begin(), expected.end());
    if (expected.size() > 4) expected.resize(4);
    ASSERT_EQ(oldest(), expected) << n;
    ASSERT_EQ(all.check(), "") << n;
  }
}

}  // namespace
