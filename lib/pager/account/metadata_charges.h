// Charges to the host budget for bookkeeping: tables, leases, frames and transitions, beyond what
// every process can spare. Also the accesses that were refused because a table had no room to grow.
//
// - The charge is for the regions' tables, each as large as it is or as it was granted, for their
//   leases, and for the records.
// - A refused block gets SIGBUS. It is known by its place, since its table has no entry for it. At
//   most kMostRefused blocks are known.
//
// Not thread-safe: the pager's lock protects it. After reserve() a refusal needs no memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "core/status.h"
#include "core/types.h"
#include "memory/host_budget.h"
#include "pager/account/fault_reserve.h"
#include "pager/block/frame_table.h"
#include "pager/block/pooled_list.h"
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
  // The number of frames or transitions has grown.
  void count() { budget_.set_tables(counted(0)); }
  // Charge for the region's table, which grows and shrinks as blocks change, but at least for what
  // it was granted; and for its leases.
  void charge(Region& r);
  void charge_leases(Region& r);
  // Takes back the charges of a region that is being freed.
  void credit(Region& r);

  // Bytes that the budget must have beside the frame of block b, so that the table can be charged
  // at once.
  uint64_t growth(const Region& r, core::BlockIndex b) const;
  // Whether the table may have an entry for block b: there is room for its page of the table, or
  // that page is in use. If so, refused blocks that there is room for by now can be accessed
  // again. Call this before the block moves.
  bool may_grow(const Region& r, core::BlockIndex b);

  bool reserve() { return refused_.reserve(kMostRefused); }
  // Answers accesses of an unpopulated block with SIGBUS until there is room. Without memory to
  // know the block, they are made again at once. On error they are not answered.
  core::Status refuse(Region& r, core::BlockIndex b);
  // Memory may have come free: calls may_grow() for the block that was refused first.
  void try_again();
  // Forgets the refused blocks of a region that is being freed.
  void forget(const Region& r);
  size_t refused() const { return refused_.size(); }

  // For tests: compares with recounted `bytes`. Returns what is wrong, or an empty string.
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
