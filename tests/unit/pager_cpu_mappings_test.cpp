// The CPU's view of blocks on devices with their own page tables: which faults wait, their next
// step, and what is known of the copies.
#include <gtest/gtest.h>

#include <memory>

#include "core/os_allocator.h"
#include "edit_block.h"
#include "pager/account/cpu_mappings.h"
#include "pager_fakes.h"

namespace vmem::pager::test {
namespace {

using core::kPage;
using trap::Fault;
using trap::FaultKind;
using Next = CpuMappings::Next;

class FakeClock final : public WaitClock {
 public:
  uint64_t look(uint64_t now_ns) override { return now_ns / 10; }
  bool hopeless(uint64_t mark) override {
    asked = mark;
    return over;
  }
  bool over = false;
  uint64_t asked = 0;
};

class PagerCpuMappings : public ::testing::Test {
 protected:
  static constexpr size_t kBlocks = 8, kSize = 4 * kPage;
  static constexpr uint64_t kNow = 1000000000;

  void SetUp() override {
    void* at = nullptr;
    ASSERT_TRUE(trap.attach(kBlocks * kSize, kSize, trap::Transfer::copy, &at).ok());
    region.id = 7;
    region.base = static_cast<std::byte*>(at);
    region.span = kBlocks * kSize;
    region.block_size = kSize;
    region.blocks = kBlocks;
    ASSERT_TRUE(region.table.create(kBlocks).ok());
    frame_table.grow();
    facts.now_ns = kNow;
    facts.lent_most_ns = 300000000;
    facts.room = facts.may_hide = true;
  }
  void TearDown() override { EXPECT_EQ(copies->check(), ""); }

  Frame& on_device(BlockIndex b) {
    edit(region.table, b).aux = frame_table.take(region, b, nullptr, kDevicePools);
    change(region.table, b, State::unpopulated, State::promoting);
    change(region.table, b, State::promoting, State::on_device);
    return frame_table[region.table[b].aux];
  }
  Frame& shown(BlockIndex b, uint64_t since = kNow) {
    Frame& frame = on_device(b);
    EXPECT_TRUE(copies->expect());
    copies->show(region, b, since);
    return frame;
  }
  Fault fault(BlockIndex b, FaultKind kind, size_t page = 0) {
    return {reinterpret_cast<uintptr_t>(region.address(b)) + page * kPage, kind, 0};
  }
  bool load(BlockIndex b, size_t page = 0) { return copies->met(region, b, fault(b, FaultKind::read, page), kNow); }
  bool store(BlockIndex b, size_t page = 0) { return copies->met(region, b, fault(b, FaultKind::write, page), kNow); }
  CpuFault& first() { return *copies->begin(); }
  Next next() { return copies->next(first(), facts); }
  bool waits(BlockIndex b) const { return (region.table[b].flags & core::kFaultPending) != 0; }
  // Accesses of b have got SIGBUS for lack of memory.
  void refuse(BlockIndex b) {
    clock.over = true;
    EXPECT_EQ(next(), Next::move) << "once";
    EXPECT_EQ(copies->stays(first(), kNow), Next::refuse);
    copies->refuse(first(), Next::refuse, kNow);
    EXPECT_TRUE(frame_table[region.table[b].aux].dev.answers_sigbus);
    clock.over = false;
  }

  FakeTrap trap;
  FakeClock clock;
  core::Counters counters;
  Region region{kBlocks, 4};
  FrameTable frame_table;
  std::unique_ptr<CpuMappings> copies = std::make_unique<CpuMappings>(trap, frame_table, clock, counters, true);
  CpuMappings::Around facts;
};

TEST_F(PagerCpuMappings, AnAccessWaitsOnceForItsBlock) {
  on_device(3);
  EXPECT_FALSE(copies->waits());
  EXPECT_TRUE(load(3)) << "somebody is to look";
  EXPECT_FALSE(load(3, 1)) << "somebody does already";
  EXPECT_EQ(counters.faults.load(), 1u);
  EXPECT_TRUE(waits(3));
  EXPECT_EQ(first().mark, kNow / 10);
  EXPECT_TRUE(first().loads);
  EXPECT_EQ(std::next(copies->begin()), copies->end());
}

TEST_F(PagerCpuMappings, WhereDevicesHaveNoPageTablesNobodyWaits) {
  copies = std::make_unique<CpuMappings>(trap, frame_table, clock, counters, false);
  on_device(3);
  EXPECT_FALSE(load(3));
  EXPECT_FALSE(copies->waits());
  EXPECT_EQ(trap.calls("wake"), 1u);
}

TEST_F(PagerCpuMappings, ATryThatFailedGoesOnWaitingAsBefore) {
  on_device(3);
  EXPECT_TRUE(copies->ask(region, 3, kNow, {5, 6}));
  EXPECT_EQ(first().since_ns, 5u);
  EXPECT_EQ(first().mark, 6u);
  EXPECT_EQ(first().not_before, kNow + CpuMappings::kTryAgain);
}

TEST_F(PagerCpuMappings, ItIsMovedWhenNothingIsInTheWay) {
  Frame& frame = on_device(3);
  load(3);
  EXPECT_EQ(next(), Next::move);
  EXPECT_EQ(copies->begun(copies->begin()), copies->end());
  EXPECT_FALSE(frame.dev.asked);
}

TEST_F(PagerCpuMappings, WhatMovesIsWaitedForAndWhatLeftIsForgotten) {
  on_device(3);
  load(3);
  change(region.table, 3, State::on_device, State::demoting);
  EXPECT_EQ(next(), Next::wait);
  region.dying = true;
  EXPECT_EQ(next(), Next::erase);
  change(region.table, 3, State::demoting, State::on_device);
  EXPECT_EQ(next(), Next::erase);
  region.dying = false;
  edit(region.table, 3).flags = 0;
  EXPECT_EQ(next(), Next::erase) << "nobody waits any more";
  EXPECT_EQ(copies->erase(copies->begin()), copies->end());
}

TEST_F(PagerCpuMappings, ALoadOfWhatIsShownIsAnswered) {
  shown(3);
  copies->ask(region, 3, kNow);
  edit(region.table, 3).flags |= core::kFaultPending;
  facts.leased = true;
  EXPECT_EQ(next(), Next::again);
  EXPECT_FALSE(waits(3));
  EXPECT_EQ(next(), Next::erase);
  copies->erase(copies->begin());
}

TEST_F(PagerCpuMappings, WhatNobodyLeasesIsShownToALoadAndMovedForAStore) {
  on_device(3);
  load(3);
  EXPECT_EQ(next(), Next::move) << "it may not be shown";
  facts.shows = true;
  EXPECT_EQ(next(), Next::show);
  store(3, 1);
  EXPECT_EQ(next(), Next::move);
}

TEST_F(PagerCpuMappings, WhatCouldNotBeShownIsMoved) {
  on_device(3);
  copies->ask(region, 3, kNow, {5, 6});
  edit(region.table, 3).flags |= core::kFaultPending;
  facts.shows = true;
  EXPECT_EQ(next(), Next::wait);
  facts.now_ns += CpuMappings::kTryAgain;
  EXPECT_EQ(next(), Next::move);
}

TEST_F(PagerCpuMappings, OfWhatNobodyLeasesAndIsShownALoadIsAnsweredAndAStoreMovesIt) {
  shown(3);
  copies->ask(region, 3, kNow);
  edit(region.table, 3).flags |= core::kFaultPending;
  EXPECT_EQ(next(), Next::move) << "it may not be shown any more";
  facts.shows = true;
  EXPECT_EQ(next(), Next::again);
  EXPECT_FALSE(waits(3));
  edit(region.table, 3).flags |= core::kFaultPending;
  facts.lost = true;
  EXPECT_EQ(next(), Next::move) << "it is the block";
  facts.lost = false;
  edit(region.table, 3).flags |= core::kStorePending;
  EXPECT_EQ(next(), Next::move);
}

TEST_F(PagerCpuMappings, AStoreMakesTheDevicesBytesStaleUntilTheCopyGoes) {
  Frame& frame = shown(3);
  store(3);
  edit(region.table, 3).flags |= core::kFaultPending | core::kStorePending;
  copies->ask(region, 3, kNow);
  facts.leased = true;
  ASSERT_EQ(next(), Next::change);
  copies->change(region, 3);
  EXPECT_TRUE(frame.dev.stale);
  EXPECT_EQ(copies->device_stale_bytes(), kSize);
  EXPECT_EQ(region.counts.device_stale, 1u);
  EXPECT_EQ(trap.calls("unprotect"), 1u);
  EXPECT_EQ(copies->check(), "");
  EXPECT_EQ(next(), Next::wait) << "until the leases end";
  facts.leased = false;
  EXPECT_EQ(next(), Next::move);
  copies->forget(region, 3);
  EXPECT_EQ(copies->device_stale_bytes(), 0u);
  EXPECT_EQ(region.counts.device_stale, 0u);
  EXPECT_FALSE(copies->any());
}

TEST_F(PagerCpuMappings, WhereNoRoomIsLeftAStoreWaitsAndLoadsAreShown) {
  on_device(3);
  store(3);
  facts.leased = true;
  facts.room = false;
  EXPECT_EQ(next(), Next::wait) << "a store alone has no use for a copy";
  load(3, 1);
  EXPECT_EQ(next(), Next::show);
}

TEST_F(PagerCpuMappings, AStoreThatFoundNoRoomForLongIsRefusedAndLoadsBesideItAreNot) {
  Frame& frame = on_device(3);
  store(3, 2);
  facts.leased = true;
  facts.room = false;
  clock.over = true;
  ASSERT_EQ(next(), Next::refuse_store);
  EXPECT_EQ(clock.asked, kNow / 10);
  copies->refuse(first(), Next::refuse_store, kNow);
  EXPECT_TRUE(frame.dev.apart);
  EXPECT_FALSE(frame.dev.answers_sigbus);
  EXPECT_FALSE(waits(3)) << "loads are reported again";
  uint64_t value = 0;
  EXPECT_FALSE(trap.load(region.address(3) + 2 * kPage, &value)) << "SIGBUS";
  EXPECT_EQ(copies->check(), "");
  EXPECT_EQ(next(), Next::wait);
  facts.now_ns += CpuMappings::kTryAgain;
  trap.refuse_unfail(1);
  EXPECT_EQ(next(), Next::wait) << "the trap does not take it back";
  EXPECT_TRUE(frame.dev.apart);
  facts.now_ns += CpuMappings::kTryAgain;
  EXPECT_EQ(next(), Next::erase);
  EXPECT_FALSE(frame.dev.apart);
  copies->erase(copies->begin());
}

TEST_F(PagerCpuMappings, WhatIsShownIsHiddenBeforeItIsRefused) {
  Frame& frame = shown(3);
  for (int i = 0; i < CpuMappings::kReportedLate; ++i) store(3);
  store(3);
  facts.leased = true;
  facts.room = false;
  facts.may_hide = false;
  frame.dev.missed = 0;
  EXPECT_EQ(next(), Next::wait);
  facts.may_hide = true;
  EXPECT_EQ(next(), Next::wait) << "there is hope";
  clock.over = true;
  EXPECT_EQ(next(), Next::hide);
  copies->forget(region, 3);
  clock.over = false;
  EXPECT_EQ(next(), Next::refuse_store) << "it has given up";
}

TEST_F(PagerCpuMappings, PagesThatTheProgramDroppedAreShownAgain) {
  Frame& frame = shown(3);
  for (int i = 0; i < CpuMappings::kReportedLate; ++i) EXPECT_FALSE(load(3)) << "reported late";
  EXPECT_FALSE(copies->waits());
  EXPECT_TRUE(load(3));
  EXPECT_EQ(frame.dev.missed, CpuMappings::kReportedLate);
  facts.leased = true;
  EXPECT_EQ(next(), Next::hide);
  facts.may_hide = false;
  EXPECT_EQ(next(), Next::wait);
}

TEST_F(PagerCpuMappings, WithoutMemoryItIsTriedOnceMoreAndThenRefused) {
  Frame& frame = on_device(3);
  load(3);
  EXPECT_EQ(copies->stays(first(), kNow), Next::wait);
  refuse(3);
  EXPECT_TRUE(first().starved);
  EXPECT_EQ(first().not_before, kNow + CpuMappings::kAskAgain);
  uint64_t value = 0;
  EXPECT_FALSE(trap.load(region.address(3), &value)) << "SIGBUS";
  EXPECT_FALSE(load(3)) << "a fault that was reported before";
  EXPECT_EQ(next(), Next::wait);
  facts.now_ns += CpuMappings::kAskAgain;
  EXPECT_EQ(next(), Next::move) << "there may be memory by now";
  trap.refuse_unfail(1);
  EXPECT_FALSE(copies->unrefuse(region, 3));
  EXPECT_TRUE(copies->unrefuse(region, 3));
  EXPECT_FALSE(frame.dev.answers_sigbus);
}

TEST_F(PagerCpuMappings, AWriteLeaseIsWaitedForAndTimeThatNobodyLookedDoesNotCount) {
  on_device(3);
  load(3);
  facts.lent = true;
  EXPECT_EQ(next(), Next::wait);
  facts.now_ns += 100 * CpuMappings::kLookedAt;  // the machine stood still
  EXPECT_EQ(next(), Next::wait);
  facts.now_ns += CpuMappings::kLookedAt;
  EXPECT_EQ(next(), Next::wait);
  facts.now_ns += CpuMappings::kLookedAt;
  ASSERT_EQ(next(), Next::refuse_lent);
  copies->refuse(first(), Next::refuse_lent, facts.now_ns);
  EXPECT_FALSE(first().starved);
  EXPECT_EQ(next(), Next::wait);
  facts.lent = false;
  EXPECT_EQ(next(), Next::erase) << "it has got its signal";
  EXPECT_FALSE(frame_table[region.table[3].aux].dev.answers_sigbus);
  copies->erase(copies->begin());
}

TEST_F(PagerCpuMappings, ALostDevicesBlocksAreNotWaitedFor) {
  on_device(3);
  load(3);
  facts.lent = facts.lost = true;
  EXPECT_EQ(next(), Next::move);
}

TEST_F(PagerCpuMappings, TheOldestCopyGoesFirstButNotWhatIsStaleYoungOrAllThereIs) {
  const auto oldest = [&](uint64_t now, bool lost = false) -> int64_t {
    const auto* s = copies->oldest(now, [&](size_t) { return lost; });
    return s == nullptr ? -1 : static_cast<int64_t>(s->block);
  };
  shown(1, 10), shown(2, 20), shown(3, 30);
  EXPECT_EQ(oldest(9 + CpuMappings::kShownAtLeast), -1);
  EXPECT_EQ(oldest(10 + CpuMappings::kShownAtLeast), 1);
  copies->change(region, 1);
  EXPECT_EQ(oldest(19 + CpuMappings::kShownAtLeast), -1);
  EXPECT_EQ(oldest(kNow), 2);
  EXPECT_EQ(oldest(kNow, true), -1);
  copies->forget(region, 2);
  EXPECT_EQ(oldest(kNow), 3);
  copies->forget(region, 3);
  EXPECT_EQ(oldest(kNow), -1);
  EXPECT_EQ(copies->check(), "");
}

// Two workers have announced a copy; then there is no memory. A copy in place must be known, or not
// begun.
TEST_F(PagerCpuMappings, WhatWasExpectedNeedsNoMemoryToBeShown) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizer has it";
#endif
  on_device(1), on_device(2), on_device(3);
  ASSERT_TRUE(copies->expect());
  ASSERT_TRUE(copies->expect());
  core::memory_hook.store([] { return true; });
  EXPECT_FALSE(copies->expect());
  copies->show(region, 1, 10);
  copies->show(region, 2, 20);
  EXPECT_FALSE(copies->expect());
  core::memory_hook.store(nullptr);
  EXPECT_EQ(copies->check(), "");
  ASSERT_TRUE(copies->expect());
  copies->not_shown();
  copies->forget(region, 1);
  core::memory_hook.store([] { return true; });
  EXPECT_TRUE(copies->expect()) << "what is shown no more leaves its room";
  copies->show(region, 3, 30);
  core::memory_hook.store(nullptr);
  EXPECT_EQ(copies->check(), "");
}

TEST_F(PagerCpuMappings, WhatComesToRestAnswersWhoMetTheTrapMeanwhile) {
  on_device(3);
  EXPECT_FALSE(copies->answer(region, 3, kNow)) << "nobody did";
  edit(region.table, 3).flags |= core::kFaultPending;
  EXPECT_TRUE(copies->answer(region, 3, kNow));
  EXPECT_EQ(trap.calls("wake"), 0u);
  shown(4);
  copies->change(region, 4);
  const size_t before = trap.calls("unprotect");
  EXPECT_TRUE(copies->answer(region, 4, kNow)) << "it is to leave when it can";
  EXPECT_EQ(trap.calls("unprotect"), before + 1);
}

TEST_F(PagerCpuMappings, OfARegionThatGoesNobodyWaits) {
  Frame& frame = on_device(3);
  load(3);
  copies->forget(region);
  EXPECT_FALSE(copies->waits());
  EXPECT_NE(copies->check(), "") << "the block says that somebody does";
  frame.dev.asked = false;
}

TEST_F(PagerCpuMappings, TheCheckFindsWhatDisagrees) {
  Frame& frame = on_device(3);
  frame.dev.answers_sigbus = true;
  EXPECT_NE(copies->check(), "");
  frame.dev.answers_sigbus = false;
  frame.dev.cpu_mapped = true;
  EXPECT_NE(copies->check(), "");
  frame.dev.cpu_mapped = false;
  frame.dev.stale = true;
  EXPECT_NE(copies->check(), "");
  frame.dev.stale = false;
  shown(4);
  copies->change(region, 4);
  region.counts.device_stale = 0;
  EXPECT_NE(copies->check(), "");
  region.counts.device_stale = 2;
  EXPECT_NE(copies->check(), "");
  region.counts.device_stale = 1;
}

}  // namespace
}  // namespace vmem::pager::test
