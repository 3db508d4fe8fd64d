// The classes that move blocks of host memory, each on those below it and on fakes. Only the test's
// thread runs, and deferred work is done when the test says so.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "core/clock.h"
#include "edit_block.h"
#include "pager/account/context.h"
#include "pager/calls/calls.h"
#include "pager/host/host_tier.h"
#include "pager/lease/lease_room.h"
#include "pager/tier/device_tier.h"
#include "pager_fakes.h"

namespace vmem::pager::test {

class PagerParts : public ::testing::Test, protected Upcalls {
 protected:
  static constexpr size_t kBlock = 64 << 10;
  static constexpr uint64_t kBudget = uint64_t{8} << 20;

  explicit PagerParts(std::unique_ptr<FakeTrap> its_trap = std::make_unique<FakeTrap>(),
                      device::Devices* its_devices = nullptr, Config config = {})
      : trap_(std::move(its_trap)), ctx({*trap_, engine, space, its_devices}, std::move(config), settings(), *this) {}

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
    metadata_charges.charge(made);
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
    EXPECT_EQ(writeback_throttle.check(map.transitions().all(), now_ns()), "");
    EXPECT_FALSE(map.transitions().in_flight());
  }

  // Upward calls.
  uint64_t pages(uint8_t) const override { return kBudget / core::kPage; }
  void reserve_queues(size_t transitions) override { queued = transitions; }
  void evict_after_transition(Region&, core::BlockIndex) override { ++asked_to_leave; }
  void memory_freed(DeferredWork&) override { ++freed; }
  std::byte* staging_frame(const Region&, size_t) override { return nullptr; }
  std::optional<uint8_t> short_of_staging(uint8_t) override { return std::nullopt; }
  bool evict_copy(core::FrameId) override { return false; }
  void host_is_short() override {}
  void tunables_changed() override {}
  size_t queued = 0, asked_to_leave = 0, freed = 0;
  uint64_t ids = 0;

  static Tunables settings() {
    Tunables first;
    first.host_budget = kBudget;
    first.fault_timeout_ms = 60000;
    return first;
  }

 private:
  std::unique_ptr<FakeTrap> trap_;

 protected:
  FakeTrap& trap = *trap_;
  FakeEngine engine;
  FakeSpace space;
  PagerContext ctx;
  HostTier host{ctx};
  LeaseRoom leases_{ctx, host};
  DeviceTier tier{ctx, host, leases_};
  Calls calls{ctx, host, leases_, tier};

  // Short names of what tests use most.
  Tunables& tunables = ctx.tunables;
  core::Counters& counters = ctx.counters;
  HostBudget& budget = ctx.budget;
  FramePool& frames = ctx.frames;
  StagingPoolSet& staging = ctx.staging;
  BlockMap& map = ctx.map;
  WritebackThrottle& writeback_throttle = ctx.writeback_throttle;
  FaultDeadline& clock = ctx.deadline;
  CpuMappings& cpu_mappings = ctx.cpu_mappings;
  FaultReserve& reserve = ctx.reserve;
  MetadataCharges& metadata_charges = ctx.metadata_charges;
  MemoryPressure& pressure = host.pressure;
  FailedBlocks& failed = host.failed;
  MemoryWaits& waits = host.waits;
  Installer& installer = host.installer;
  ReadaheadQueue& speculation = host.readahead_queue;
  ReclaimRequests& requests = host.reclaim_requests;
  StoreReader& reader = host.reader;
  PageIn& page_in = host.page_in;
  Readahead& read_ahead = host.readahead;
  Isolator& isolator = host.isolator;
  StoreWriter& writer = host.writer;
  Writeback& write_back = host.writeback;
  Reclaim& reclaim = host.reclaim;
};

}  // namespace vmem::pager::test
