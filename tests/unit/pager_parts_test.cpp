// Each class that moves blocks of host memory, alone on those below it: its contract, and its
// failures.
#include "pager_parts.h"

#include <cerrno>

#include "core/clock.h"
#include "edit_block.h"

namespace vmem::pager::test {
namespace {

class PagerBlockMap : public PagerParts {};

TEST_F(PagerBlockMap, FindsARegionByEachOfItsAddressesAndByNoOther) {
  Region& r = region(4);
  BigLock lock(map.mutex());
  const auto base = reinterpret_cast<uintptr_t>(r.base);
  EXPECT_EQ(map.find(base), &r);
  EXPECT_EQ(map.find(base + r.span - 1), &r);
  EXPECT_EQ(map.find(base + r.span), nullptr);
  EXPECT_EQ(map.find(base - 1), nullptr);
  BlockSpan span;
  ASSERT_TRUE(map.check_range(r.address(1), 2 * kBlock, &span).ok());
  EXPECT_EQ(span.first, 1u);
  EXPECT_EQ(span.last, 2u);
  EXPECT_EQ(map.check_range(r.address(1), 4 * kBlock, &span).code(), -EINVAL);
  r.dying = true;
  EXPECT_EQ(map.check_range(r.base, kBlock, &span).code(), -EINVAL);
  r.dying = false;
}

TEST_F(PagerBlockMap, GuestsHaveTheShareOfADeviceThatTheConfigurationSays) {
  DeviceBudget budget_of_one;
  budget_of_one.begin(8 * core::kHugePage, core::kHugePage);
  for (const unsigned percent : {0u, 25u, 50u}) {
    Config config;
    config.peer_spill_percent = percent;
    PagerContext its({trap, engine, space, nullptr}, config, settings(), *this);
    BigLock lock(its.map.mutex());
    const uint64_t share = 8 * core::kHugePage * percent / 100;
    EXPECT_TRUE(its.map.spilled().fits(1, budget_of_one, share, 1)) << percent;
    EXPECT_FALSE(its.map.spilled().fits(1, budget_of_one, share + core::kHugePage, 1)) << percent;
  }
}

TEST_F(PagerBlockMap, TheEndOfAMoveWakesWhoWaitsForItsBlockAndForNoOther) {
  Region& r = region(2);
  BigLock lock(map.mutex());
  ASSERT_TRUE(map.reserve_block());
  EXPECT_GE(queued, 1u) << "those above have room for as many moves";
  map.new_entry(r, 0, nullptr);
  change(r.table, 0, State::unpopulated, State::reading);
  Transition* m = map.new_transition(r, 0);
  EXPECT_EQ(r.counts.in_flight, 1u);
  Completion completion{1, {}};
  m->completion = &completion;
  m->status = error(EIO, "as the test wants it");
  change(r.table, 0, State::reading, State::unpopulated);
  map.free_entry(0, r);
  map.free_transition(m);
  EXPECT_EQ(r.counts.in_flight, 0u);
  EXPECT_EQ(completion.outstanding, 0u);
  EXPECT_EQ(completion.status.code(), -EIO);
  EXPECT_NE(r.table[0].aux, 0u) << "a block that has left memory has a stamp";
}

TEST_F(PagerBlockMap, ABlockThatWasAskedToTheSsdInTransitionIsAskedAgainOnce) {
  Region& r = region(1);
  bring(r, 0);
  BigLock lock(map.mutex());
  map.frame_table()[r.table[0].aux].evict_when_stable = true;
  ASSERT_TRUE(map.reserve_transition());
  map.free_transition(map.new_transition(r, 0));
  map.free_transition(map.new_transition(r, 0));
  EXPECT_EQ(asked_to_leave, 1u);
}

TEST_F(PagerBlockMap, ItsCheckFindsAResidentThatNamesAnotherBlock) {
  Region& r = region(2);
  bring(r, 0);
  BigLock lock(map.mutex());
  ASSERT_EQ(map.check(), "");
  map.frame_table()[r.table[0].aux].block = 1;
  EXPECT_NE(map.check(), "");
  map.frame_table()[r.table[0].aux].block = 0;
}

class PagerFailedBlocks : public PagerParts {};

TEST_F(PagerFailedBlocks, ABlockIsUnknownFromAFailedWriteUntilItIsWritten) {
  Region& r = region(2);
  bring(r, 1);
  BigLock lock(map.mutex());
  failed.mark_unknown(r, 1);
  failed.mark_unknown(r, 1);
  EXPECT_EQ(failed.unknown_blocks(), 1u);
  EXPECT_EQ(failed.check(), "");
  EXPECT_EQ(r.table[1].flags & (core::kDigest | core::kProtected), 0) << "no digest proves anything now";
  failed.clear_unknown(r, 1);
  failed.clear_unknown(r, 1);
  EXPECT_EQ(failed.unknown_blocks(), 0u);
}

TEST_F(PagerFailedBlocks, ItsCheckFindsAnUnknownBlockThatIsNotCounted) {
  Region& r = region(1);
  BigLock lock(map.mutex());
  ASSERT_TRUE(map.reserve_block());
  map.new_entry(r, 0, nullptr);
  change(r.table, 0, State::unpopulated, State::reading);
  edit(r.table, 0).flags |= core::kUnknown;
  EXPECT_NE(failed.check(), "");
  edit(r.table, 0).flags = 0;
  change(r.table, 0, State::reading, State::unpopulated);
  map.free_entry(0, r);
}

TEST_F(PagerFailedBlocks, ALostBlockGetsSigbusAndIsToldOnceUnlessAsked) {
  Region& r = region(2);
  {
    BigLock lock(map.mutex());
    ASSERT_TRUE(map.reserve_block());
    map.new_entry(r, 1, nullptr);
    change(r.table, 1, State::unpopulated, State::reading);
    map.free_entry(1, r);
    failed.mark_lost(r, 1, error(EIO, "torn"));
    EXPECT_EQ(failed.tell_lost(r, 0, 0, false).code(), 0);
    EXPECT_EQ(failed.tell_lost(r, 0, 1, false).code(), -EIO);
    EXPECT_EQ(failed.tell_lost(r, 0, 1, false).code(), 0) << "it has been told";
    EXPECT_EQ(failed.tell_lost(r, 0, 1, true).code(), -EIO) << "a sync says so every time";
  }
  EXPECT_TRUE(bus(r, 1));
  BigLock lock(map.mutex());
  ASSERT_TRUE(failed.revive(r, 1).ok());
  EXPECT_EQ(r.table[1].state, State::unpopulated);
  EXPECT_EQ(r.table[1].flags & core::kLost, 0);
}

TEST_F(PagerFailedBlocks, WhatWasDroppedForWantOfMemoryComesBackWhenTheTrapTakesItBack) {
  Region& r = region(1);
  BigLock lock(map.mutex());
  ASSERT_TRUE(failed.reserve_dropped());
  ASSERT_TRUE(failed.drop(r, 0, error(ENOMEM, "no memory")));
  EXPECT_EQ(r.table[0].state, State::poisoned);
  trap.refuse_unfail(1);
  failed.revive_dropped();
  EXPECT_TRUE(failed.any_dropped()) << "the trap refused it: it waits for the next time";
  EXPECT_EQ(r.table[0].state, State::poisoned);
  failed.revive_dropped();
  EXPECT_FALSE(failed.any_dropped());
  EXPECT_EQ(r.table[0].state, State::unpopulated);
  EXPECT_TRUE(r.reasons.empty());
}

TEST_F(PagerFailedBlocks, ItsCheckFindsADroppedBlockThatWaitsForNothing) {
  Region& r = region(2);
  bring(r, 0);
  BigLock lock(map.mutex());
  ASSERT_TRUE(failed.drop(r, 1, error(ENOMEM, "no memory")));
  EXPECT_EQ(failed.check(), "");
  failed.forget(r);
  EXPECT_NE(failed.check(), "") << "nobody will make it good again";
  ASSERT_TRUE(failed.revive(r, 1).ok());
  EXPECT_EQ(failed.check(), "");
  edit(r.table, 0).flags |= core::kDropped;
  EXPECT_NE(failed.check(), "") << "it is in memory";
  edit(r.table, 0).flags &= static_cast<uint16_t>(~core::kDropped);
}

TEST_F(PagerFailedBlocks, AccessesThatTheTrapRefusedAreMadeAgainAfterAPause) {
  Region& r = region(1);
  BigLock lock(map.mutex());
  failed.answer_later(r, 0, error(ENOMEM, "refused"));
  EXPECT_TRUE(failed.asleep(r, 0));
  EXPECT_FALSE(failed.ask_again(lock, now_ns() - 1000000000)) << "not before its time";
  const size_t woken = trap.calls("wake");
  EXPECT_TRUE(failed.ask_again(lock, failed.next_ns()));
  EXPECT_EQ(trap.calls("wake"), woken + 1);
  EXPECT_FALSE(failed.asleep(r, 0));
  failed.forget(r);
  EXPECT_FALSE(failed.any_retries());
}

class PagerMemoryWaits : public PagerParts {};

TEST_F(PagerMemoryWaits, AFaultThatNothingCanEndGetsSigbusAndNoneWhileAMoveIsUnderWay) {
  tunables.fault_timeout_ms = 200;
  Region& r = region(2);
  {
    BigLock lock(map.mutex());
    ASSERT_TRUE(map.reserve_block());
    map.new_entry(r, 1, nullptr);
    change(r.table, 1, State::unpopulated, State::reading);
    Transition* m = map.new_transition(r, 1);
    ASSERT_TRUE(waits.starve_fault(r, 0));
    EXPECT_TRUE(waits.queue().marked(r.table[0]));
    const uint64_t begun = now_ns();
    // Looks as reclaim threads do: often, and for longer than the time-out.
    for (uint64_t ms = 0; ms < 1000; ms += 50) EXPECT_FALSE(waits.check_starved(lock, begun + ms * 1000000));
    change(r.table, 1, State::reading, State::unpopulated);
    map.free_entry(1, r);
    map.free_transition(m);
    bool given_up = false;
    for (uint64_t ms = 1000; ms < 2000 && !given_up; ms += 50)
      given_up = waits.check_starved(lock, begun + ms * 1000000);
    EXPECT_TRUE(given_up);
    EXPECT_EQ(r.table[0].state, State::poisoned);
    EXPECT_NE(r.table[0].flags & core::kDropped, 0) << "its contents are intact";
    EXPECT_TRUE(waits.queue().empty());
  }
  EXPECT_TRUE(bus(r, 0));
}

TEST_F(PagerMemoryWaits, AWaitIsNotGivenUpWhileSomethingGoesOn) {
  Region& r = region(1);
  BigLock lock(map.mutex());
  ASSERT_TRUE(waits.starve_fault(r, 0));
  const uint64_t begun = now_ns();
  for (uint64_t ms = 0; ms < 2000; ms += 50) {
    map.progress().made();
    EXPECT_FALSE(waits.check_starved(lock, begun + ms * 1000000));
  }
  waits.queue().pop();
}

TEST_F(PagerMemoryWaits, WhoWaitsCallsForMemoryAndALaterAcquireWaitsBehindAFault) {
  Region& r = region(3);
  BigLock lock(map.mutex());
  EXPECT_FALSE(waits.must_evict());
  ASSERT_TRUE(waits.starve(r, 1, Urgency::acquire));
  ASSERT_TRUE(waits.starve_fault(r, 0));
  EXPECT_EQ(waits.queue().front().block, 0u);
  EXPECT_FALSE(waits.overtakes(r)) << "nothing larger waits";
  waits.queue().forget(r);
  EXPECT_TRUE(waits.queue().empty());
}

class PagerMemoryPressure : public PagerParts {};

TEST_F(PagerMemoryPressure, ARefusalTakesNothingBackOfWhatPressureAskedFor) {
  Region& r = region(32);
  for (BlockIndex b = 0; b < 32; ++b) bring(r, b);
  BigLock lock(map.mutex());
  pressure.press(16 * kBlock);
  EXPECT_TRUE(pressure.pressed());
  const uint64_t pressed = budget.limit();
  EXPECT_LT(pressed, budget.wanted());
  pressure.hold_back_after_refusal(error(ENOMEM, "none"));
  EXPECT_LE(budget.limit(), pressed);
  pressure.lift_cap(now_ns() + 2000000000);
  EXPECT_TRUE(pressure.pressed()) << "pressure lasts longer than a refusal";
  pressure.lift_cap(now_ns() + 20000000000);
  EXPECT_FALSE(pressure.pressed());
  EXPECT_EQ(budget.limit(), budget.wanted());
}

TEST_F(PagerMemoryPressure, AnAdministratorsLimitLeavesWhatFaultsNeed) {
  region(4);
  BigLock lock(map.mutex());
  pressure.set_ceiling(4096);
  EXPECT_GE(budget.limit(), reserve.least());
  pressure.set_ceiling(0);
  EXPECT_EQ(budget.limit(), budget.wanted());
}

class PagerPageIn : public PagerParts {};

TEST_F(PagerPageIn, ABlockThatWasNeverStoredToIsZerosWithoutARead) {
  Region& r = region(1);
  bring(r, 0);
  EXPECT_EQ(engine.count(store::Io::Op::read), 0u);
  EXPECT_EQ(counters.zero_fills, 1u);
  EXPECT_GE(freed, 1u) << "a buffer came free";
  uint64_t value = 1;
  ASSERT_TRUE(trap.load(r.base, &value));
  EXPECT_EQ(value, 0u);
}

TEST_F(PagerPageIn, WithoutMemoryNothingHasChanged) {
  Region& r = region(1);
  BigLock lock(map.mutex());
  const uint64_t all = budget.available();
  ASSERT_TRUE(budget.charge(all, 0));
  DeferredWork after;
  EXPECT_FALSE(page_in.start_fill(r, 0, Urgency::fault, after));
  EXPECT_TRUE(after.empty());
  EXPECT_EQ(r.table[0].state, State::unpopulated);
  budget.credit(all);
}

TEST_F(PagerPageIn, ABlockThatCameToRestIsBroughtForWhoAskedMeanwhile) {
  Region& r = region(2);
  DeferredWork after;
  {
    BigLock lock(map.mutex());
    page_in.settle(r, 0, after);
    EXPECT_TRUE(after.empty()) << "nobody asked";
    edit(r.table, 1).flags |= core::kFaultPending;
    page_in.settle(r, 1, after);
    EXPECT_EQ(r.table[1].state, State::reading);
  }
  page_in.run(after);
  EXPECT_EQ(state(r, 1), State::resident);
  EXPECT_EQ(flags(r, 1, core::kFaultPending), 0);
}

class PagerInstaller : public PagerParts {};

TEST_F(PagerInstaller, ABlockThatTheTrapRefusesStaysHeldAndIsTriedAgainLater) {
  Region& r = region(1);
  trap.fail_fill(EIO, 1);
  DeferredWork after;
  {
    BigLock lock(map.mutex());
    ASSERT_TRUE(page_in.start_fill(r, 0, Urgency::fault, after));
  }
  page_in.run(after);
  EXPECT_EQ(state(r, 0), State::staged);
  {
    BigLock lock(map.mutex());
    EXPECT_TRUE(failed.asleep(r, 0));
    ASSERT_TRUE(installer.install_or_wait(r, 0, after));
    EXPECT_EQ(r.table[0].state, State::mapping);
  }
  page_in.run(after);
  EXPECT_EQ(state(r, 0), State::resident);
}

class PagerWriteback : public PagerParts {
 protected:
  // Isolates the block and writes it; does not wait for the write's end.
  void take(Region& r, BlockIndex b, bool keep = false) {
    Transition* m = nullptr;
    {
      BigLock lock(map.mutex());
      m = isolator.begin_take(r, b, keep, false);
      ASSERT_NE(m, nullptr);
    }
    write_back.evict_batch({&m, 1});
  }
};

// Isolates through Writeback, which alone can finish.
class PagerIsolator : public PagerWriteback {};
class PagerStoreWriter : public PagerWriteback {};

TEST_F(PagerIsolator, WhatIsAllZerosLeavesWithoutAWrite) {
  Region& r = region(1);
  bring(r, 0);
  take(r, 0);
  EXPECT_EQ(state(r, 0), State::unpopulated);
  EXPECT_EQ(engine.count(store::Io::Op::write), 0u);
  EXPECT_EQ(budget.charged(memory::Use::blocks), 0u);
}

// Otherwise a program that keeps asking for a block that cannot leave would hold up reclaim for all
// others.
TEST_F(PagerWriteback, NothingButAKnownPinThatReclaimMeetsPausesReclaim) {
  Region& r = region(1);
  bring(r, 0);
  const auto meets_a_pin = [&](bool reclaims) {
    Transition* m = nullptr;
    trap.pin_drop(2);
    {
      BigLock lock(map.mutex());
      map.withdraw(r.table[0].aux);
      m = isolator.begin_take(r, 0, false, false);
      ASSERT_NE(m, nullptr);
      EXPECT_EQ(m->write.leaving.counted(), !map.frame_table()[r.table[0].aux].pins.pinned)
          << "nobody waits for what is pinned";
      m->write.reclaims = reclaims;
    }
    write_back.evict_batch({&m, 1});
    ASSERT_EQ(state(r, 0), State::resident);
  };
  const auto pause = [&] {
    BigLock lock(map.mutex());
    write_back.evict_batch(lock, {});
    return writeback_throttle.pause(now_ns());
  };
  meets_a_pin(true);
  EXPECT_EQ(pause(), 0u) << "others are tried first";
  meets_a_pin(false);
  EXPECT_EQ(pause(), 0u) << "a call chose it";
  meets_a_pin(true);
  BigLock lock(map.mutex());
  EXPECT_GT(writeback_throttle.pause(0), 0u) << "there is nothing else";
}

TEST_F(PagerWriteback, WhatWasStoredToIsWrittenBeforeItsMemoryGoes) {
  Region& r = region(1);
  bring(r, 0);
  put(r, 0, 7);
  engine.hold(store::Io::Op::write, true);
  take(r, 0);
  EXPECT_EQ(state(r, 0), State::writing_back);
  EXPECT_EQ(writeback_throttle.leaving(), kBlock) << "it will come free";
  EXPECT_EQ(budget.charged(memory::Use::blocks), kBlock);
  engine.hold(store::Io::Op::write, false);
  engine.let_go();
  engine.until_idle();
  EXPECT_EQ(state(r, 0), State::stored);
  EXPECT_EQ(writeback_throttle.leaving(), 0u);
  EXPECT_EQ(space.extents(), 1u);
  bring(r, 0);
  uint64_t value = 0;
  ASSERT_TRUE(trap.load(r.base, &value));
  EXPECT_EQ(value, 7u);
}

TEST_F(PagerStoreWriter, AWriteThatFailedLeavesTheBlockInMemoryAndUnknownAndGivesItsRoomBack) {
  Region& r = region(1);
  bring(r, 0);
  put(r, 0, 7);
  engine.fail(store::Io::Op::write, EIO);
  take(r, 0);
  engine.until_idle();
  EXPECT_EQ(state(r, 0), State::resident);
  EXPECT_NE(flags(r, 0, core::kUnknown), 0);
  EXPECT_EQ(space.extents(), 0u);
  EXPECT_NE(writeback_throttle.pause(now_ns()), 0u) << "the next try waits";
  {
    BigLock lock(map.mutex());
    EXPECT_EQ(failed.unknown_blocks(), 1u);
    EXPECT_EQ(writeback_throttle.take_error().code(), -EIO) << "nobody had been told";
  }
  engine.fail(store::Io::Op::write, 0);
  take(r, 0);
  engine.until_idle();
  EXPECT_EQ(state(r, 0), State::stored);
  EXPECT_EQ(flags(r, 0, core::kUnknown), 0);
}

TEST_F(PagerWriteback, WhatIsSyncedStaysInPlaceAndClean) {
  Region& r = region(1);
  bring(r, 0);
  put(r, 0, 9);
  take(r, 0, true);
  engine.until_idle();
  EXPECT_EQ(state(r, 0), State::resident);
  EXPECT_NE(flags(r, 0, core::kProtected), 0) << "equal to the store for as long as nobody stores to it";
  EXPECT_EQ(engine.count(store::Io::Op::write), 1u);
}

}  // namespace
}  // namespace vmem::pager::test
