#include "pager/calls/region_charges.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "pager/host/bounce_limits.h"

namespace vmem::pager {

// Reserves memory so that as many blocks as fit the budget, at most kMostReserved, can move without
// asking for memory. Further blocks ask when they need it, and wait for others to leave if there is
// none. Drops the lock now and then.
bool RegionCharges::reserve_blocks(Lock& lock, Region& r) {
  constexpr size_t kMostReserved = 65536, kMoves = 128, kWaiting = 256;
  const uint64_t at_once = r.gpu ? r.blocks : std::min<uint64_t>(r.blocks, budget_.wanted() / r.block_size);
  while (map_.frame_table().size() < std::min<uint64_t>(sums_.reserved_blocks + at_once, kMostReserved)) {
    if (!map_.reserve_entries(map_.frame_table().size() + 1)) return false;
    lock.give_way();
  }
  if (!frames_.want_slots(r.block_size) || !map_.reserve_transition(kMoves) || !waits_.queue().reserve(kWaiting) ||
      !readahead_queue_.reserve(kWaiting) || !failed_.reserve(kWaiting) || !tables_.reserve())
    return false;
  r.reserved_blocks = at_once;
  sums_.reserved_blocks += at_once;
  tables_.count();
  return true;
}

// Gets the region's first buffers. Wakes reclaim if the budget has no room for them. Drops the
// lock.
Status RegionCharges::want_buffers(Lock& lock, Region& r, uint64_t mark) {
  for (;; lock.sleep_for(map_.changed(), std::chrono::milliseconds(20))) {
    Status s = frames_.want_bounce(r.block_size, bounce_limit(r, config_, budget_), least_bounce(r));
    const uint64_t least = FramePool::least_bounce(r.block_size, least_bounce(r));
    if (s.ok() || !reserve_.fits(least) || deadline_.hopeless(mark)) {
      reserve_.want_nothing();
      return s;
    }
    reserve_.want(least);
    pressure_.wake_all_reclaim();
  }
}

Status RegionCharges::charge(Lock& lock, Region& r, uint64_t mark) {
  const uint64_t budget = budget_.limit(), overhead = frames_.least_overhead();
  if (budget < overhead + 4 * r.block_size) {
    return error(ENOMEM,
                 "host_budget %s holds fewer than 4 blocks of %s beside %s of tables and buffers; raise host_budget or "
                 "lower %s",
                 core::human_bytes(budget).c_str(), core::human_bytes(r.block_size).c_str(),
                 core::human_bytes(overhead).c_str(), r.gpu ? "device_block_size" : "block_size");
  }
  if (!reserve_blocks(lock, r)) return no_memory_for_region(r.size);
  r.table_granted = std::min<size_t>(r.table.most(), budget_.wanted() / 32);
  if (r.bounces) {
    if (Status s = want_buffers(lock, r, mark); !s.ok()) {
      sums_.reserved_blocks -= std::exchange(r.reserved_blocks, 0);
      return s;
    }
  }
  if (r.gpu) ++staging_.of(r).regions;
  tables_.charge(r);
  reserve_.add_region(r.block_size);
  if (reserve_.fits(0)) return {};
  Status s = error(ENOMEM,
                   "host_budget %s has no room for a region of %s blocks: %s of tables and buffers, %s leased, %s "
                   "for faults; raise host_budget, lower %s or release leases",
                   core::human_bytes(budget_.limit()).c_str(), core::human_bytes(r.block_size).c_str(),
                   core::human_bytes(frames_.least_overhead()).c_str(), core::human_bytes(reserve_.pinned()).c_str(),
                   core::human_bytes(reserve_.bytes()).c_str(), r.gpu ? "device_block_size" : "block_size");
  credit(r);
  return s;
}

void RegionCharges::credit(Region& r) {
  sums_.reserved_blocks -= std::exchange(r.reserved_blocks, 0);
  if (r.bounces) frames_.unwant_bounce(r.block_size);
  if (r.gpu && --staging_.of(r).regions == 0) device_set_.work().notify_all();  // others may use its frames
  tables_.credit(r);
  reserve_.remove_region(r.block_size);
}

Status no_memory_for_region(size_t size) {
  return error(ENOMEM, "no memory for the tables of a region of %s", core::human_bytes(size).c_str());
}

}  // namespace vmem::pager
