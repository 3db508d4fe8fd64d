// Blocks that show their file: their state after its pages are gone, cannot be removed, or cannot
// come back.
#include <gtest/gtest.h>

#include "device/managed/fault_gate.h"
#include "edit_block.h"
#include "pager/host/truncated_files.h"
#include "pager_managed_parts.h"

namespace vmem::pager::test {
namespace {

namespace fault_gate = device::fault_gate;

class PagerTruncatedFiles : public ManagedParts {
 protected:
  void SetUp() override { ASSERT_TRUE(fault_gate::install().ok()); }
  void TearDown() override {
    fault_gate::uninstall();
    ManagedParts::TearDown();
  }
  // Block 0 of a region shows its file, and an access of it waits.
  Region& shown(unsigned more = 0) {
    Region& r = device_region(2);
    BigLock lock(map.mutex());
    r.backing = Backing::file_private;
    change(r.table, 0, State::unpopulated, State::poisoned);
    metadata_charges.charge(r);
    edit(r.table, 0).flags |= static_cast<uint16_t>(core::kShowsFile | core::kFaultPending | more);
    return r;
  }
  Status revive(TruncatedFiles& of, Region& r) {
    BigLock lock(map.mutex());
    Status s = of.revive(lock, r, 0);
    EXPECT_FALSE(map.transitions().in_flight());
    return s;
  }
  TruncatedFiles& files = host.truncated_files;
};

TEST_F(PagerTruncatedFiles, WhereAccessesParkItIsAnOrdinaryBlockAgain) {
  Region& r = shown(core::kLost | core::kTold);
  {
    BigLock lock(map.mutex());
    edit(r.table, 0).flags &= static_cast<uint16_t>(~core::kFaultPending);
  }
  ASSERT_TRUE(revive(files, r).ok());
  EXPECT_EQ(counting.unmapped, 1u);
  EXPECT_TRUE(counting.dropped.empty());
  EXPECT_EQ(state(r, 0), State::unpopulated);
  EXPECT_EQ(flags(r, 0, core::kShowsFile | core::kLost | core::kTold | core::kUnanswered), 0);
  EXPECT_GT(freed, 0u) << "who waits for memory hears of it";
}

TEST_F(PagerTruncatedFiles, WithoutAGateItGoesOnShowingItsFileAndLosesWhatWasStored) {
  Region& r = shown();
  managed.view = device::CpuView::split;
  ASSERT_TRUE(revive(files, r).ok());
  EXPECT_EQ(counting.unmapped, 0u);
  ASSERT_EQ(counting.dropped.size(), 1u);
  EXPECT_EQ(counting.dropped[0].address, reinterpret_cast<uintptr_t>(r.address(0)));
  EXPECT_EQ(counting.dropped[0].size, kUnit);
  EXPECT_EQ(state(r, 0), State::poisoned);
  EXPECT_EQ(flags(r, 0, core::kShowsFile | core::kFaultPending | core::kUnanswered), core::kShowsFile);
  EXPECT_EQ(counting.woken, 1u);
}

TEST_F(PagerTruncatedFiles, WhatCannotGoShowsTheFileAsBefore) {
  Region& r = shown();
  counting.unmap_error = ENOMEM;
  EXPECT_EQ(revive(files, r).code(), -ENOMEM);
  EXPECT_EQ(counting.mapped, 1u);
  EXPECT_EQ(state(r, 0), State::poisoned);
  EXPECT_EQ(flags(r, 0, core::kShowsFile | core::kUnanswered), core::kShowsFile);
  EXPECT_EQ(counting.woken, 1u);
}

TEST_F(PagerTruncatedFiles, WhatShowsNothingIsMarkedUntilItCanGo) {
  Region& r = shown();
  counting.unmap_error = counting.map_error = ENOMEM;
  EXPECT_EQ(revive(files, r).code(), -ENOMEM);
  EXPECT_NE(flags(r, 0, core::kUnanswered), 0) << "accesses get SIGBUS";
  counting.unmap_error = 0;
  ASSERT_TRUE(revive(files, r).ok());
  EXPECT_EQ(state(r, 0), State::unpopulated);
}

}  // namespace
}  // namespace vmem::pager::test
