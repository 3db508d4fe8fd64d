// The classes that move blocks of host memory, each on those below it and on fakes. Only the test's
// thread runs, and deferred work is done when the test says so.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

#include "core/clock.h"
#include "edit_block.h"
#include "pager/host/writeback.h"
#include "pager_fakes.h"

namespace vmem::pager::test {

class PagerParts : public ::testing::Test, protected BlockMap::Above, protected MemoryFreed {
 protected:
  static constexpr size_t kBlock = 64 << 10;
  static constexpr uint64_t kBudget = uint64_t{8} << 20;

  // devices: how many, with their own page tables.
  explicit PagerParts(size_t devices = 0)
      : map(trap, space, staging, counters, config, devices, *this),
        cpu_mappings(trap, map.frame_table(), clock, counters, devices != 0) {}

  // Blocks that are copied.
  Region& region(size_t blocks, Backing backing = Backing::anonymous, size_t size = kBlock) {
    auto r = std::make_unique<Region>(blocks, 0);
    Region& made = *r;
    void* at = nullptr;
    EXPECT_TRUE(trap.attach(blocks * size, size, trap::Transfer::copy, &at).ok());
    made.id = ++ids;
    made.base = static_cast<std::byte*>(at);
    made.size = made.span = blocks * size;
    made.block_size = size;
    made.blocks = blocks;
    made.backing = backing;
    made.transfer = trap::Transfer::copy;
    EXPECT_TRUE(made.table.create(blocks).ok());
    core::BigLock lock(map.mutex());
    map.regions().emplace(reinterpret_cast<uintptr_t>(at), std::move(r));
    if (ids == 1) {
      EXPECT_TRUE(frames.want_bounce(kBlock, 32 * kBlock, 32 * kBlock).ok());
    }
    reserve.add_region(size);
    tables.charge(made);
    return made;
  }
  // Puts the block in place and charges its memory, as after a read.
  void bring(Region& r, core::BlockIndex b) {
    DeferredWork after;
    {
      core::BigLock lock(map.mutex());
      ASSERT_TRUE(page_in.start_fill(r, b, core::Urgency::fault, after));
    }
    page_in.run(after);
    engine.until_idle();
    ASSERT_EQ(state(r, b), core::State::resident);
  }
  // Stores as a thread that meets the write protection, together with FaultHandler.
  void put(Region& r, core::BlockIndex b, uint64_t value) {
    {
      core::BigLock lock(map.mutex());
      edit(r.table, b).flags &= static_cast<uint16_t>(~core::kProtected);
    }
    ASSERT_TRUE(trap.unprotect(r.address(b), r.block_size).ok());
    ASSERT_TRUE(trap.store(r.address(b), value));
  }
  // Evicts a block in place to the store.
  void evict(Region& r, core::BlockIndex b) {
    Transition* m = nullptr;
    {
      core::BigLock lock(map.mutex());
      map.withdraw(r.table[b].aux);
      m = isolator.begin_take(r, b, false, false);
      ASSERT_NE(m, nullptr);
    }
    write_back.evict_batch({&m, 1});
    engine.until_idle();
    ASSERT_EQ(state(r, b), core::State::stored);
  }
  // Leaves the block in the store only.
  void put_away(Region& r, core::BlockIndex b, uint64_t value) {
    bring(r, b);
    put(r, b, value);
    evict(r, b);
  }
  uint64_t written() { return engine.count(store::Io::Op::write); }
  core::State state(Region& r, core::BlockIndex b) {
    core::BigLock lock(map.mutex());
    return r.table[b].state;
  }
  uint16_t flags(Region& r, core::BlockIndex b, unsigned which) {
    core::BigLock lock(map.mutex());
    return static_cast<uint16_t>(r.table[b].flags & which);
  }
  bool bus(Region& r, core::BlockIndex b) {
    uint64_t value = 0;
    return !trap.load(r.address(b), &value);
  }
  void TearDown() override {
    engine.until_idle();
    core::BigLock lock(map.mutex());
    EXPECT_EQ(map.check(), "");
    EXPECT_EQ(failed.check(), "");
    EXPECT_EQ(waits.queue().check(), "");
    EXPECT_EQ(page_in.check(), "");
    EXPECT_EQ(writes.check(map.transitions().all(), now_ns()), "");
    EXPECT_FALSE(map.transitions().in_flight());
  }

  // The interfaces of the classes above.
  uint64_t pages(uint8_t) const override { return kBudget / core::kPage; }
  void reserve_queues(size_t transitions) override { queues = transitions; }
  void leaves(Region&, core::BlockIndex) override { ++asked_to_leave; }
  void memory_freed(DeferredWork&) override { ++freed; }
  std::byte* staging_frame(const Region&, size_t) override { return nullptr; }
  size_t queues = 0, asked_to_leave = 0, freed = 0;
  uint64_t ids = 0;

  FakeTrap trap;
  FakeEngine engine;
  FakeSpace space;
  Config config = [] {
    Config c;
    c.host_budget = kBudget;
    c.fault_timeout_ms = 60000;
    return c;
  }();
  core::Counters counters;
  HostBudget budget{kBudget};
  FramePool frames{trap, budget, {}};
  StagingPoolSet staging{budget, 50};
  BlockMap map;
  WritebackThrottle writes;
  FaultDeadline clock{map, writes, config};
  CpuMappings cpu_mappings;
  FaultReserve reserve{budget, frames, cpu_mappings};
  MetadataCharges tables{budget, reserve, map.frame_table(), map.transitions(), trap};
  Shared shared{trap, engine, space, config, counters, budget, frames, staging, map, writes, clock, reserve, tables};
  MemoryPressure pressure{shared};
  FailedBlocks failed{shared, pressure};
  MemoryWaits waits{shared, pressure, failed};
  Installer installer{shared, pressure, failed, waits, *this};
  ReadaheadQueue speculation;
  StoreReader reader{shared};
  PageIn page_in{shared, pressure, failed, waits, installer, reader, speculation, *this};
  Isolator isolator{shared};
  StoreWriter writer{shared, pressure, failed};
  IsolatedBlocks isolated{shared, failed, installer, page_in};
  Writeback write_back{shared, failed, installer, page_in, isolated, isolator, writer, *this};
};

}  // namespace vmem::pager::test
