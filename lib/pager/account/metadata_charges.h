// What the host budget is charged with for what is known of regions and blocks: tables, leases, frames, transitions,
// beyond what every process can spare; and the accesses that were refused because a table had no room to grow.
//
//   the charge = the regions' tables, each as large as it is or as it was granted, their leases, and the records
//   a block that is refused gets SIGBUS and is known by its place, for its table has none; no more than kMostRefused
//
// Not thread-safe: the pager's lock protects it. Needs no memory for as many refusals as were reserved.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "core/pooled_list.h"
#include "core/status.h"
#include "core/types.h"
#include "memory/host_budget.h"
#include "pager/account/fault_reserve.h"
#include "pager/block/frame_table.h"
#include "pager/block/region.h"
#include "pager/block/transition_pool.h"
#include "trap/trap.h"

namespace vmem::pager {

class MetadataCharges {
 public:
  static constexpr uint64_t kFree = uint64_t{8} << 20;  // what every process can spare
  static constexpr size_t kMostRefused = 256;

  MetadataCharges(memory::HostBudget& budget, const FaultReserve& reserve, const FrameTable& frame_table,
                  const TransitionPool& transitions, trap::Trap& trap)
      : budget_(budget), reserve_(reserve), frame_table_(frame_table), transitions_(transitions), trap_(trap) {}

  uint64_t bytes() const { return bytes_; }  // of regions' tables and leases
  // There are more frames or transitions than before.
  void count() { budget_.set_tables(counted(0)); }
  // Its table grows and shrinks as blocks change, and is charged from the start for what it was granted.
  void charge(Region& r);
  void charge_leases(Region& r);
  // It goes, and what it was charged with.
  void credit(Region& r);

  // What the budget must have room for beside the frame of block b, so that its table can be charged at once.
  uint64_t growth(const Region& r, core::BlockIndex b) const;
  // Whether a block may be the first of its page in the region's table, or is not. If so, all that were refused before
  // and that there is room for by now can be accessed again; the block itself is to be asked for before it moves.
  bool may_grow(const Region& r, core::BlockIndex b);

  bool reserve() { return refused_.reserve(kMostRefused); }
  // State unpopulated. Its accesses get SIGBUS until there is room, or are made again at once, where there is no memory
  // to know it by. On error they are not answered.
  core::Status refuse(Region& r, core::BlockIndex b);
  // Memory may have come free: as may_grow(), for the first that was refused.
  void try_again();
  // Nothing of a region that goes is refused any more.
  void forget(const Region& r);
  size_t refused() const { return refused_.size(); }

  // Tests: `bytes` are recounted. What is wrong; empty: nothing.
  std::string check(uint64_t bytes) const;

 private:
  uint64_t counted(uint64_t more) const;
  bool fits(const Region& r, core::BlockIndex b) const;
  bool asks_again(const Region& r, core::BlockIndex b);

  memory::HostBudget& budget_;
  const FaultReserve& reserve_;
  const FrameTable& frame_table_;
  const TransitionPool& transitions_;
  trap::Trap& trap_;
  uint64_t bytes_ = 0;
  PooledList<std::pair<Region*, core::BlockIndex>> refused_;
};

}  // namespace vmem::pager
