// Reclaim threads while writes are paused.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <optional>
#include <vector>

#include "common/patience.h"
#include "core/clock.h"
#include "edit_block.h"
#include "pager/threads/reclaim_threads.h"
#include "pager_parts.h"

namespace vmem::pager::test {
namespace {

class PagerPausedWrites : public PagerParts {
 protected:
  static constexpr uint64_t kHour = uint64_t{3600} * 1000000000;

  void TearDown() override {
    {
      BigLock lock(map.mutex());
      writeback_throttle.has_room();
      if (evicts) reclaimers.stop();
    }
    if (evicts) reclaimers.join();
    PagerParts::TearDown();
  }
  // Pauses writes as after a failed write, but for longer than any test runs.
  void put_writes_off() {
    BigLock lock(map.mutex());
    writeback_throttle.failed(core::error(EIO, "as the test wants it"), true, now_ns() + kHour);
  }
  void write_again() {
    BigLock lock(map.mutex());
    writeback_throttle.has_room();
    pressure.wake_all_reclaim();
  }
  // Returns false if there is no memory and the block waits for some.
  bool try_to_bring(Region& r, BlockIndex b) {
    DeferredWork after;
    {
      BigLock lock(map.mutex());
      waits.queue().forget(r);
      edit(r.table, b).flags &= static_cast<uint16_t>(~core::kWaitsForMemory);
      if (!page_in.start_fill(r, b, core::Urgency::fault, after)) {
        EXPECT_TRUE(waits.starve(r, b, core::Urgency::fault));
        return false;
      }
    }
    page_in.run(after);
    engine.until_idle();
    return true;
  }
  // Stops the reclaim threads after their last writes, then expects b + 1000 in each block.
  void expect_all(Region& r, BlockIndex blocks) {
    {
      BigLock lock(map.mutex());
      waits.queue().forget(r);
      reclaimers.stop();
    }
    reclaimers.join();
    evicts = false;
    engine.until_idle();
    for (BlockIndex b = 0; b < blocks; ++b) {
      if (state(r, b) != State::resident) {
        ASSERT_TRUE(try_to_bring(r, b)) << b;
      }
      uint64_t value = 0;
      ASSERT_TRUE(trap.load(r.address(b), &value));
      ASSERT_EQ(value, 1000 + b);
      Transition* m = nullptr;
      {
        BigLock lock(map.mutex());
        map.withdraw(r.table[b].aux);
        m = isolator.begin_take(r, b, false, false);
        ASSERT_NE(m, nullptr);
      }
      write_back.evict_batch({&m, 1});
      engine.until_idle();
      ASSERT_EQ(state(r, b), State::stored) << b;
    }
  }

  ReclaimThreads reclaimers{ctx, host};
  bool evicts = true;
};

TEST_F(PagerPausedWrites, WhatNeedNotBeWrittenLeavesWhileNothingCanBe) {
  constexpr BlockIndex kClean = 4, kMore = 200;
  Region& r = region(400);
  BlockIndex changed = 0;
  while (try_to_bring(r, changed)) ++changed;
  ASSERT_GT(changed, 2 * kClean);
  changed -= kClean;
  for (BlockIndex b = 0; b < changed; ++b) put(r, b, 1000 + b);
  put_writes_off();
  ASSERT_TRUE(reclaimers.start(2).ok());
  for (BlockIndex b = changed + kClean; b < changed + kMore; ++b)
    ASSERT_TRUE(vmem::test::eventually([&] { return try_to_bring(r, b); })) << b;
  EXPECT_GE(counters.clean_drops, kMore - 2 * kClean);
  EXPECT_EQ(engine.count(Io::Op::write), 0u);
  for (BlockIndex b = 0; b < changed; ++b) ASSERT_EQ(state(r, b), State::resident) << b;
  write_again();
  expect_all(r, changed);
}

TEST_F(PagerPausedWrites, NobodyLooksForEverWhereNothingIsClean) {
  Region& r = region(200);
  BlockIndex changed = 0;
  while (try_to_bring(r, changed)) ++changed;
  for (BlockIndex b = 0; b < changed; ++b) put(r, b, 1000 + b);
  put_writes_off();
  ASSERT_TRUE(reclaimers.start(1).ok());
  const auto looked_at = [&] {
    BigLock lock(map.mutex());
    size_t found = 0;
    for (BlockIndex b = 0; b < changed; ++b)
      found += r.table[b].state == State::resident && map.frame_table()[r.table[b].aux].unwritten;
    return found == changed;
  };
  ASSERT_TRUE(vmem::test::eventually([&] { return looked_at() || try_to_bring(r, changed); }));
  EXPECT_EQ(state(r, changed), State::unpopulated);
  const size_t protects = trap.calls("protect");
  for (int i = 0; i < 20; ++i) EXPECT_FALSE(try_to_bring(r, changed)) << "each calls an evictor";
  EXPECT_EQ(trap.calls("protect"), protects) << "no block is looked at twice";
  EXPECT_EQ(engine.count(Io::Op::write), 0u);
  write_again();
  EXPECT_TRUE(vmem::test::eventually([&] { return try_to_bring(r, changed); }));
  EXPECT_GT(engine.count(Io::Op::write), 0u);
  expect_all(r, changed);
}

// A pin pauses write-back for a moment: that is no reason to evict blocks that the program wants to
// keep.
TEST_F(PagerPausedWrites, APinIsNoReasonToEvictInAnotherOrder) {
  Region& r = region(400);
  BlockIndex blocks = 0;
  while (try_to_bring(r, blocks)) ++blocks;
  {
    BigLock lock(map.mutex());
    r.advice.advised.push_back({0, 3, policy::Temperature::normal, true});
    for (BlockIndex b = 0; b < 4; ++b) map.follow_advice(r, b);
  }
  for (BlockIndex b = 4; b < blocks; ++b) put(r, b, 1000 + b);
  {
    BigLock lock(map.mutex());
    writeback_throttle.pinned(now_ns() + kHour);
  }
  ASSERT_TRUE(reclaimers.start(1).ok());
  for (int i = 0; i < 50; ++i, usleep(1000)) ASSERT_FALSE(try_to_bring(r, blocks)) << "something left";
  engine.hold(Io::Op::write, true);
  write_again();
  engine.until_held(1);
  for (BlockIndex b = 0; b < 4; ++b) EXPECT_EQ(state(r, b), State::resident) << b;
  {
    BigLock lock(map.mutex());
    waits.queue().forget(r);
  }
  engine.hold(Io::Op::write, false);
  engine.let_go();
  engine.until_idle();
}

}  // namespace
}  // namespace vmem::pager::test
