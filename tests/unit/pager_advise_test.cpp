// Advice: what the pager keeps of it, which policies and devices receive it, and dropped contents.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>
#include <vector>

#include "edit_block.h"
#include "pager/calls/advise.h"
#include "pager_device_parts.h"

namespace vmem::pager::test {
namespace {

using policy::Access;
using policy::Priority;
using policy::Temperature;

class Advised : public FakeDevices {
 public:
  Status advise(device::Range range, device::Advice what, int location, bool set) override {
    said.push_back({range, what, location, set});
    return error != 0 ? core::error(error, "as the test wants it") : Status();
  }
  struct Said {
    device::Range range;
    device::Advice what;
    int location;
    bool set;
  };
  std::vector<Said> said;
  int error = 0;
};

class PagerAdvise : public PromotionParts {
 protected:
  PagerAdvise() : PromotionParts(std::make_unique<Advised>()) {}
  Status advise(Region& r, BlockIndex first, BlockIndex last, int what, int location = 0) {
    return advisor.advise(r.address(first), (last - first + 1) * r.block_size, what, location);
  }
  Temperature of(Region& r, BlockIndex b, bool* pinned = nullptr) {
    BigLock lock(map.mutex());
    bool ignored = false;
    return temperature(r, b, pinned != nullptr ? pinned : &ignored);
  }
  Advised& advised = static_cast<Advised&>(devices);
  Advise& advisor = calls.advise;
};

TEST_F(PagerAdvise, TheLastThatCoversABlockCountsAndNormalUndoesAPart) {
  Region& r = region(8);
  ASSERT_TRUE(advise(r, 0, 7, VMEM_ADVISE_COLD).ok());
  ASSERT_TRUE(advise(r, 4, 5, VMEM_ADVISE_HOT).ok());
  EXPECT_EQ(of(r, 3), Temperature::cold);
  EXPECT_EQ(of(r, 4), Temperature::hot);
  ASSERT_TRUE(advise(r, 5, 7, VMEM_ADVISE_NORMAL).ok());
  EXPECT_EQ(of(r, 4), Temperature::hot);
  EXPECT_EQ(of(r, 5), Temperature::normal);
  EXPECT_EQ(of(r, 7), Temperature::normal);
  EXPECT_EQ(of(r, 0), Temperature::cold);
  bool pinned = false;
  ASSERT_TRUE(advise(r, 1, 1, VMEM_ADVISE_PIN).ok());
  of(r, 1, &pinned);
  EXPECT_TRUE(pinned);
  of(r, 2, &pinned);
  EXPECT_FALSE(pinned);
}

TEST_F(PagerAdvise, WhatUndoesNothingIsNotKeptAndSoManyRangesAreTheMost) {
  Region& r = region(600);
  ASSERT_TRUE(advise(r, 0, 599, VMEM_ADVISE_NORMAL).ok());
  EXPECT_TRUE(r.advice.advised.empty());
  for (BlockIndex b = 0; b < 256; ++b) ASSERT_TRUE(advise(r, 2 * b, 2 * b, VMEM_ADVISE_COLD).ok()) << b;
  EXPECT_EQ(advise(r, 599, 599, VMEM_ADVISE_COLD).code(), -ENOSPC);
  EXPECT_TRUE(advise(r, 0, 599, VMEM_ADVISE_HOT).ok()) << "it takes their place";
  EXPECT_EQ(r.advice.advised.size(), 1u);
}

TEST_F(PagerAdvise, EqualAdviceOnNeighboursIsOneRange) {
  Region& r = region(600);
  for (BlockIndex b = 0; b < 600; ++b) ASSERT_TRUE(advise(r, b, b, VMEM_ADVISE_COLD).ok()) << b;
  EXPECT_EQ(r.advice.advised.size(), 1u);
}

TEST_F(PagerAdvise, TheLastAdviceCountsWhateverRangesGrowTogether) {
  Region& r = region(64);
  std::vector<Temperature> want(64, Temperature::normal);
  uint32_t random = 1;
  const auto below = [&](uint32_t n) { return (random = random * 1664525 + 1013904223) / 65536 % n; };
  for (int i = 0; i < 2000; ++i) {
    static const std::pair<int, Temperature> kAdvice[] = {{VMEM_ADVISE_COLD, Temperature::cold},
                                                          {VMEM_ADVISE_HOT, Temperature::hot},
                                                          {VMEM_ADVISE_NORMAL, Temperature::normal}};
    const auto [advice, temperature] = kAdvice[below(3)];
    const BlockIndex first = below(64), last = std::min<BlockIndex>(63, first + below(8));
    ASSERT_TRUE(advise(r, first, last, advice).ok()) << i;
    std::fill(want.begin() + static_cast<std::ptrdiff_t>(first), want.begin() + static_cast<std::ptrdiff_t>(last) + 1,
              temperature);
    for (BlockIndex b = 0; b < 64; ++b) ASSERT_EQ(of(r, b), want[b]) << "advice " << i << ", block " << b;
  }
}

TEST_F(PagerAdvise, PrioritiesAndOrdersAreOfTheWholeRegion) {
  Region& r = region(4);
  bring(r, 3);
  ASSERT_TRUE(advise(r, 0, 0, VMEM_ADVISE_PRIORITY_HIGH).ok());
  EXPECT_EQ(r.advice.priority, Priority::high);
  ASSERT_TRUE(advise(r, 0, 0, VMEM_ADVISE_RANDOM).ok());
  EXPECT_EQ(r.advice.access, Access::random);
  ASSERT_TRUE(advise(r, 0, 0, VMEM_ADVISE_NORMAL).ok());
  EXPECT_EQ(r.advice.access, Access::normal);
  EXPECT_TRUE(r.advice.advised.empty());
  EXPECT_EQ(advise(r, 0, 0, 4711).code(), -EINVAL);
}

TEST_F(PagerAdvise, ThePolicyHearsOfBlocksThatItHas) {
  Region& r = region(2);
  bring(r, 0);
  bring(r, 1);
  ASSERT_TRUE(advise(r, 0, 0, VMEM_ADVISE_PIN).ok());
  BigLock lock(map.mutex());
  std::array<policy::Victim, 1> victims;
  ASSERT_EQ(map.policy_of(kHostPool).victims(1, victims), 1u);
  EXPECT_EQ(map.frame_table()[victims[0].id].block, 1u) << "the other one is pinned";
  if (victims[0].probe) return;
  map.frame_table()[victims[0].id].admitted = false;  // chosen, but it does not leave
  map.admit(r, 1, map.nonresident_age().shadow());
}

TEST_F(PagerAdvise, WhatConcernsDevicesIsTheDriversOfEachBlockAndNobodysWithoutADeviceTier) {
  Region& host_only = region(2);
  ASSERT_TRUE(advise(host_only, 0, 1, VMEM_ADVISE_SET_READ_MOSTLY).ok());
  EXPECT_TRUE(advised.said.empty());
  Region& r = device_region(3);
  EXPECT_EQ(advise(r, 0, 2, VMEM_ADVISE_SET_PREFERRED_LOCATION, 5).code(), -ENODEV);
  ASSERT_TRUE(advise(r, 1, 2, VMEM_ADVISE_SET_PREFERRED_LOCATION, 1).ok());
  ASSERT_EQ(advised.said.size(), 2u);
  EXPECT_EQ(advised.said[0].what, device::Advice::preferred_location);
  EXPECT_EQ(advised.said[0].location, 1);
  EXPECT_TRUE(advised.said[0].set);
  EXPECT_FALSE(r.advice.read_mostly);
  ASSERT_TRUE(advise(r, 0, 0, VMEM_ADVISE_SET_READ_MOSTLY).ok());
  EXPECT_TRUE(r.advice.read_mostly);
  ASSERT_TRUE(advise(r, 0, 0, VMEM_ADVISE_UNSET_ACCESSED_BY, VMEM_HOST).ok());
  EXPECT_EQ(advised.said.back().what, device::Advice::accessed_by);
  EXPECT_EQ(advised.said.back().location, device::kHost);
  EXPECT_FALSE(advised.said.back().set);
}

TEST_F(PagerAdvise, ADriverThatRefusesEndsIt) {
  Region& r = device_region(3);
  advised.error = EIO;
  EXPECT_EQ(advise(r, 0, 2, VMEM_ADVISE_SET_READ_MOSTLY).code(), -EIO);
  EXPECT_EQ(advised.said.size(), 1u);
  BigLock lock(map.mutex());
  EXPECT_EQ(r.counts.in_flight, 0u);
}

TEST_F(PagerAdvise, WhatIsNeededSoonIsFetchedToWhereItIsBest) {
  Region& r = device_region(4);
  ASSERT_TRUE(advise(r, 1, 2, VMEM_ADVISE_SET_PREFERRED_LOCATION, 1).ok());
  uint64_t full = 0;  // so that the request stays in its queue
  {
    BigLock lock(map.mutex());
    full = gpus[1].budget.limit();
    gpus[1].budget.charge(full);
  }
  ASSERT_TRUE(advise(r, 0, 3, VMEM_ADVISE_WILL_NEED).ok());
  BigLock lock(map.mutex());
  gpus[1].budget.credit(full);
  ASSERT_EQ(queues.promotion_requests.size(), 1u);
  const auto& request = queues.promotion_requests.front();
  EXPECT_EQ(request.device, 1);
  EXPECT_EQ(request.next, 1u);
  EXPECT_EQ(request.last, 2u);
  queues.promotion_requests.pop_front();
}

TEST_F(PagerAdvise, DroppedContentsAreZerosAndLeasedBlocksKeepTheirs) {
  Region& r = region(3);
  for (BlockIndex b = 0; b < 3; ++b) {
    bring(r, b);
    put(r, b, b + 7);
  }
  {
    BigLock lock(map.mutex());
    ASSERT_TRUE(lease_manager.grant({&r, 1, 1}, VMEM_READ, VMEM_HOST, nullptr).ok());
  }
  EXPECT_EQ(advise(r, 0, 2, VMEM_ADVISE_DONT_NEED).code(), -EBUSY);
  EXPECT_EQ(state(r, 0), State::unpopulated);
  EXPECT_EQ(state(r, 1), State::resident);
  EXPECT_EQ(state(r, 2), State::unpopulated);
  EXPECT_EQ(engine.count(store::Io::Op::write), 0u);
  EXPECT_GE(freed, 1u) << "who waits for memory is served";
  bring(r, 0);
  uint64_t value = 1;
  ASSERT_TRUE(trap.load(r.address(0), &value));
  EXPECT_EQ(value, 0u);
  BigLock lock(map.mutex());
  lease_manager.take_back({&r, 1, 1}, VMEM_READ, VMEM_HOST, nullptr);
}

TEST_F(PagerAdvise, OnlyBlocksWhollyInsideLoseTheirContents) {
  Region& r = region(3);
  for (BlockIndex b = 0; b < 3; ++b) bring(r, b);
  ASSERT_TRUE(advisor.advise(r.base + 1, 2 * kBlock, VMEM_ADVISE_DONT_NEED, 0).ok());
  EXPECT_EQ(state(r, 0), State::resident);
  EXPECT_EQ(state(r, 1), State::unpopulated);
  EXPECT_EQ(state(r, 2), State::resident);
}

TEST_F(PagerAdvise, ASharedFileLosesNothing) {
  Region& r = region(1, Backing::file_shared);
  bring(r, 0);
  put(r, 0, 7);
  ASSERT_TRUE(advise(r, 0, 0, VMEM_ADVISE_DONT_NEED).ok());
  EXPECT_EQ(engine.count(store::Io::Op::write), 1u);
  EXPECT_FALSE(core::in_memory(state(r, 0)));
}

TEST_F(PagerAdvise, WhatIsDroppedOnADeviceIsNotCopied) {
  Region& r = device_region(1);
  place_changed(r);
  ASSERT_TRUE(advise(r, 0, 0, VMEM_ADVISE_DONT_NEED).ok());
  EXPECT_EQ(devices.copied, 0u);
  EXPECT_EQ(state(r, 0), State::unpopulated);
  BigLock lock(map.mutex());
  EXPECT_EQ(gpus[0].budget.charged(), 0u);
}

}  // namespace
}  // namespace vmem::pager::test
