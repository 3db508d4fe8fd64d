// How the way out of host memory ends, on fakes: an isolated block is evicted, put back, kept or
// lost.
#include <cerrno>

#include "edit_block.h"
#include "pager/host/drop_pages.h"
#include "pager_parts.h"

namespace {

using vmem::core::BigLock;
using vmem::core::error;
using vmem::core::State;
using vmem::memory::Use;
using vmem::pager::Batch;
using vmem::pager::DeferredWork;
using vmem::pager::Region;
using vmem::pager::Transition;
namespace core = vmem::core;

class PagerEvictedBlocks : public vmem::pager::test::PagerParts {
 protected:
  // Isolates block 0 where it stands; its fate is still open.
  Transition* take(Region& r, bool keep = false) {
    bring(r, 0);
    Transition* m = nullptr;
    {
      BigLock lock(map.mutex());
      m = isolator.begin_take(r, 0, keep, false);
    }
    EXPECT_NE(m, nullptr);
    return m;
  }
  uint64_t charged() {
    BigLock lock(map.mutex());
    return budget.charged(Use::blocks);
  }
  void want(Region& r) {
    BigLock lock(map.mutex());
    edit(r.table, 0).flags |= core::kFaultPending;
  }
};

TEST_F(PagerEvictedBlocks, WhatIsLetGoIsCreditedAndLeavesNoMore) {
  Region& r = region(1);
  Transition* const m = take(r);
  ASSERT_TRUE(vmem::pager::drop_one(trap, r, 0));
  DeferredWork after;
  BigLock lock(map.mutex());
  EXPECT_EQ(writeback_throttle.leaving(), kBlock);
  write_back.let_go(m, after);
  EXPECT_EQ(r.table[0].state, State::unpopulated) << "the store has nothing of it";
  EXPECT_EQ(budget.charged(Use::blocks), 0u);
  EXPECT_EQ(writeback_throttle.leaving(), 0u);
  EXPECT_FALSE(map.transitions().in_flight());
  EXPECT_TRUE(after.empty()) << "nobody wants it";
}

TEST_F(PagerEvictedBlocks, WhatIsLetGoAndWantedIsReadAgain) {
  Region& r = region(1);
  Transition* const m = take(r);
  ASSERT_TRUE(vmem::pager::drop_one(trap, r, 0));
  want(r);
  DeferredWork after;
  {
    BigLock lock(map.mutex());
    write_back.let_go(m, after);
    EXPECT_EQ(r.table[0].state, State::reading);
  }
  page_in.run(after);
  engine.until_idle();
  EXPECT_EQ(state(r, 0), State::resident);
  EXPECT_EQ(charged(), kBlock);
}

TEST_F(PagerEvictedBlocks, WhatIsPutBackStaysChargedAndWhoWaitsIsWoken) {
  Region& r = region(1);
  Transition* const m = take(r, true);
  want(r);
  DeferredWork after;
  const size_t woken = trap.calls("wake");
  {
    BigLock lock(map.mutex());
    m->status = error(EBUSY, "a page is pinned");
    write_back.put_back(m, after);
    EXPECT_EQ(writeback_throttle.leaving(), 0u);
    EXPECT_TRUE(after.empty()) << "its pages never left";
    EXPECT_FALSE(map.transitions().in_flight());
  }
  EXPECT_EQ(state(r, 0), State::resident);
  EXPECT_EQ(flags(r, 0, core::kFaultPending | core::kProtected), 0);
  EXPECT_EQ(trap.calls("wake"), woken + 1);
  EXPECT_EQ(charged(), kBlock);
}

TEST_F(PagerEvictedBlocks, ContentsThatNobodyWantsAreNotWritten) {
  Region& r = region(1);
  bring(r, 0);
  put(r, 0, 9);
  BigLock lock(map.mutex());
  DeferredWork after;
  ASSERT_TRUE(write_back.drop_contents(lock, r, 0, after).ok());
  EXPECT_TRUE(after.empty());
  EXPECT_EQ(r.table[0].state, State::unpopulated);
  EXPECT_EQ(engine.count(vmem::store::Io::Op::write), 0u);
}

TEST_F(PagerEvictedBlocks, ContentsOfABlockWithAPinnedPageStay) {
  Region& r = region(1);
  bring(r, 0);
  put(r, 0, 9);
  trap.pin_drop(1);
  {
    DeferredWork after;
    BigLock lock(map.mutex());
    EXPECT_EQ(write_back.drop_contents(lock, r, 0, after).code(), -EBUSY);
    EXPECT_EQ(r.table[0].state, State::resident);
    EXPECT_EQ(writeback_throttle.leaving(), 0u);
    EXPECT_TRUE(write_back.drop_contents(lock, r, 0, after).ok());
    EXPECT_EQ(r.table[0].state, State::unpopulated);
    EXPECT_TRUE(after.empty());
  }
  EXPECT_EQ(charged(), 0u);
}

TEST_F(PagerEvictedBlocks, WhatIsLostIsCreditedAndFailedAndToldToWhoWaitsForTheWrite) {
  Region& r = region(1);
  Transition* const m = take(r);
  vmem::pager::Completion completion{.outstanding = 1, .status = {}};
  BigLock lock(map.mutex());
  ASSERT_TRUE(frames.want_slots(kBlock));
  m->image = frames.get_slot(kBlock);
  ASSERT_NE(m->image, nullptr);
  m->completion = &completion;
  m->status = error(ENOTRECOVERABLE, "half of it moved");
  write_back.lose_taken(m);
  EXPECT_EQ(r.table[0].state, State::poisoned);
  EXPECT_NE(r.table[0].flags & core::kTold, 0);
  EXPECT_EQ(budget.charged(Use::blocks), 0u);
  EXPECT_EQ(writeback_throttle.leaving(), 0u);
  EXPECT_FALSE(map.transitions().in_flight());
}

}  // namespace
