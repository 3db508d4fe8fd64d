// Loans of staging frames to kernels, without kernels: which blocks are lent, who sees that a
// thread waits, and how loans return.
#include <gtest/gtest.h>

#include <array>

#include "edit_block.h"
#include "pager_device_parts.h"

namespace {

using vmem::core::BigLock;
using vmem::core::BlockIndex;
using vmem::core::State;
using vmem::pager::KernelRange;
using vmem::pager::PromotionRequest;
using vmem::pager::Reclaim;
using vmem::pager::Region;
namespace core = vmem::core;

class PagerStagingLoans : public vmem::pager::test::DeviceParts {
 protected:
  void SetUp() override {
    devices.transitions = true;
    ASSERT_TRUE(gpus.use(0).ok());
  }
  // Puts a block into a staging frame only.
  void hold(Region& r, BlockIndex b) {
    BigLock lock(map.mutex());
    std::byte* const frame = staging_allocator.frame(r, 0);
    ASSERT_NE(frame, nullptr);
    place(r, b, 0);
    ASSERT_TRUE(staging_allocator.keep_copy(r, b, frame));
    map.withdraw(r.table[b].aux);
    vmem::pager::Transition* m = demoter.begin(r, b, vmem::pager::Leave::evict);
    ASSERT_NE(m, nullptr);
    demoter.run(lock, {&m, 1});
    ASSERT_EQ(r.table[b].state, State::staged);
  }
  void drop(Region& r, BlockIndex b) {
    BigLock lock(map.mutex());
    ASSERT_EQ(r.table[b].state, State::staged);
    edit(r.table, b).flags = 0;
    ASSERT_TRUE(map.reserve_transition());
    map.withdraw(r.table[b].aux);
    vmem::pager::DeferredWork after;
    write_back.drop_held(r, b, after);
  }
  KernelRange open(const Region& r) {
    KernelRange range;
    range.first = reinterpret_cast<uintptr_t>(r.base);
    range.end = range.first + r.span;
    range.block_size = r.block_size;
    range.blocks = static_cast<uint32_t>(r.blocks);
    range.device = 0;
    range.region = r.id;
    return range;
  }
  size_t lend(const KernelRange& range, std::initializer_list<uint32_t> blocks_asked, bool leave = false) {
    asked.assign(blocks_asked);
    homes.assign(asked.size(), nullptr);
    return staging_loans.lend(range, asked, homes, leave);
  }
  size_t wanted(const KernelRange& range, std::initializer_list<uint32_t> blocks_lent) {
    const std::vector<uint32_t> all(blocks_lent);
    std::array<uint32_t, 4> out{};
    return staging_loans.wanted(range, all, out);
  }

  std::vector<uint32_t> asked;
  std::vector<const std::byte*> homes;
  vmem::pager::PooledList<PromotionRequest>& promotion_requests = queues.promotion_requests;
  vmem::pager::StagingLoans& staging_loans = tier.staging_loans;
};

TEST_F(PagerStagingLoans, WhatIsInStagingFramesIsLentAndNobodyHasItUntilTheEnd) {
  Region& r = device_region(4);
  supply_frames(r);
  hold(r, 2);
  const KernelRange range = open(r);
  ASSERT_EQ(lend(range, {0, 2}), 1u);
  EXPECT_EQ(asked[0], 2u) << "what is lent comes first";
  EXPECT_NE(homes[0], nullptr);
  EXPECT_EQ(state(r, 2), State::isolating);
  EXPECT_EQ(lend(range, {2}), 0u) << "it is lent already";
  const std::array<uint32_t, 1> two{2};
  staging_loans.end(range, two);
  EXPECT_EQ(state(r, 2), State::staged);
  staging_loans.end(range, two);
  EXPECT_EQ(staging.of(r.block_size).lent, 0u);
  drop(r, 2);
}

TEST_F(PagerStagingLoans, ABlockOnTheDeviceWithAHostCopyLeavesItToBeLentUnlessItIsLeased) {
  Region& r = device_region(2);
  supply_frames(r);
  {
    BigLock lock(map.mutex());
    for (const BlockIndex b : {0, 1}) {
      place(r, b, 0);
      ASSERT_TRUE(staging_allocator.keep_copy(r, b, staging_allocator.frame(r, 0)));
    }
    ASSERT_TRUE(lease_manager.grant({&r, 1, 1}, VMEM_READ, 0, nullptr).ok());
  }
  const KernelRange range = open(r);
  EXPECT_EQ(lend(range, {0, 1}), 0u) << "nobody said that they may leave";
  ASSERT_EQ(lend(range, {1, 0}, true), 1u);
  EXPECT_EQ(asked[0], 0u);
  EXPECT_EQ(state(r, 1), State::on_device);
  EXPECT_EQ(devices.copied, 0u);
  const std::array<uint32_t, 1> zero{0};
  staging_loans.end(range, zero);
  drop(r, 0);
  BigLock lock(map.mutex());
  lease_manager.take_back({&r, 1, 1}, VMEM_READ, 0, nullptr);
  remove(r, 1);
}

TEST_F(PagerStagingLoans, WhoWaitsForALoanIsSeen) {
  Region& r = device_region(3);
  supply_frames(r);
  for (const BlockIndex b : {0, 1, 2}) hold(r, b);
  const KernelRange range = open(r);
  ASSERT_EQ(lend(range, {0, 1, 2}), 3u);
  EXPECT_EQ(wanted(range, {0, 1, 2}), 0u);
  {
    BigLock lock(map.mutex());
    edit(r.table, 0).flags |= core::kFaultPending;
    ASSERT_TRUE(promotion_requests.push_back({&r, 2, 2, 0, core::Urgency::acquire, nullptr}));
  }
  EXPECT_EQ(wanted(range, {0, 1, 2}), 2u) << "a fault, and a promotion request";
  BigLock lock(map.mutex());
  edit(r.table, 0).flags = 0;
  promotion_requests.pop_front();
  staging_loans.take_back(lock, r);
  EXPECT_EQ(staging.of(r.block_size).lent, 0u);
  lock.unlock();
  for (const BlockIndex b : {0, 1, 2}) drop(r, b);
}

TEST_F(PagerStagingLoans, SomeFramesOfEachSizeAreLeftForMoves) {
  Region& r = device_region(32);
  supply_frames(r);
  size_t frames_there = 0;
  {
    BigLock lock(map.mutex());
    frames_there = staging.of(r.block_size).frames.total();
  }
  ASSERT_GE(r.blocks, frames_there);
  for (BlockIndex b = 0; b < frames_there; ++b) hold(r, b);
  asked.resize(frames_there);
  for (uint32_t b = 0; b < frames_there; ++b) asked[b] = b;
  homes.assign(frames_there, nullptr);
  const KernelRange range = open(r);
  const size_t lent = staging_loans.lend(range, asked, homes, false);
  EXPECT_LE(lent, frames_there - vmem::memory::Staging::kLeast);
  staging_loans.end(range, std::span(asked).first(lent));
  for (BlockIndex b = 0; b < frames_there; ++b) drop(r, b);
}

TEST_F(PagerStagingLoans, ARangeWhoseRegionIsFreedLendsNothing) {
  Region& r = device_region(1);
  KernelRange range = open(r);
  ++range.region;
  EXPECT_EQ(lend(range, {0}), 0u);
  EXPECT_EQ(wanted(range, {0}), 0u);
}

}  // namespace
