#include "pager/calls/region_charges.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "pager/calls/calls.h"

namespace vmem::pager {

RegionCharges::RegionCharges(PagerContext& ctx, Calls& calls) : ctx_(ctx), host_(calls.host) {}

// Reserves memory so that as many blocks as fit the budget, at most kMostReserved, can move without
// asking for memory. Further blocks ask when they need it, and wait for others to leave if there is
// none. Drops the lock now and then.
bool RegionCharges::reserve_blocks(Lock& lock, Region& r) {
  constexpr size_t kMostReserved = 65536, kMoves = 128, kWaiting = 256;
  const uint64_t at_once = r.gpu ? r.blocks : std::min<uint64_t>(r.blocks, ctx_.budget.wanted() / r.block_size);
  while (ctx_.map.frame_table().size() < std::min<uint64_t>(ctx_.totals.reserved_blocks + at_once, kMostReserved)) {
    if (!ctx_.map.reserve_entries(ctx_.map.frame_table().size() + 1)) return false;
    lock.give_way();
  }
  if (!ctx_.frames.want_slots(r.block_size) || !ctx_.map.reserve_transition(kMoves) ||
      !host_.waits.queue().reserve(kWaiting) || !host_.readahead_queue.reserve(kWaiting) ||
      !host_.failed.reserve(kWaiting) || !ctx_.tables.reserve())
    return false;
  r.charge.reserved_blocks = at_once;
  ctx_.totals.reserved_blocks += at_once;
  ctx_.tables.count();
  return true;
}

// Gets the region's first buffers. Wakes reclaim if the budget has no room for them. Drops the
// lock.
Status RegionCharges::want_buffers(Lock& lock, Region& r, uint64_t mark) {
  for (;; lock.sleep_for(ctx_.map.changed(), std::chrono::milliseconds(20))) {
    Status s = ctx_.frames.want_bounce(r.block_size, bounce_limit(r, ctx_), least_bounce(r));
    const uint64_t least = FramePool::least_bounce(r.block_size, least_bounce(r));
    if (s.ok() || !ctx_.reserve.fits(least) || ctx_.deadline.hopeless(mark)) {
      ctx_.reserve.want_nothing();
      return s;
    }
    ctx_.reserve.want(least);
    host_.pressure.wake_all_reclaim();
  }
}

Status RegionCharges::charge(Lock& lock, Region& r, uint64_t mark) {
  const uint64_t budget = ctx_.budget.limit(), overhead = ctx_.frames.least_overhead();
  if (budget < overhead + 4 * r.block_size) {
    return error(ENOMEM,
                 "host_budget %s holds fewer than 4 blocks of %s beside %s of tables and buffers; raise host_budget or "
                 "lower %s",
                 core::human_bytes(budget).c_str(), core::human_bytes(r.block_size).c_str(),
                 core::human_bytes(overhead).c_str(), r.gpu ? "device_block_size" : "block_size");
  }
  if (!reserve_blocks(lock, r)) return no_memory_for_region(r.size);
  r.charge.table_granted = std::min<size_t>(r.table.most(), ctx_.budget.wanted() / 32);
  if (r.bounces) {
    if (Status s = want_buffers(lock, r, mark); !s.ok()) {
      ctx_.totals.reserved_blocks -= std::exchange(r.charge.reserved_blocks, 0);
      return s;
    }
  }
  if (r.gpu) ++ctx_.staging.of(r).regions;
  ctx_.tables.charge(r);
  ctx_.reserve.add_region(r.block_size);
  if (ctx_.reserve.fits(0)) return {};
  Status s =
      error(ENOMEM,
            "host_budget %s has no room for a region of %s blocks: %s of tables and buffers, %s leased, %s "
            "for faults; raise host_budget, lower %s or release leases",
            core::human_bytes(ctx_.budget.limit()).c_str(), core::human_bytes(r.block_size).c_str(),
            core::human_bytes(ctx_.frames.least_overhead()).c_str(), core::human_bytes(ctx_.reserve.pinned()).c_str(),
            core::human_bytes(ctx_.reserve.bytes()).c_str(), r.gpu ? "device_block_size" : "block_size");
  credit(r);
  return s;
}

void RegionCharges::credit(Region& r) {
  ctx_.totals.reserved_blocks -= std::exchange(r.charge.reserved_blocks, 0);
  if (r.bounces) ctx_.frames.unwant_bounce(r.block_size);
  if (r.gpu && --ctx_.staging.of(r).regions == 0) ctx_.device_set.work().notify_all();  // others may use its frames
  ctx_.tables.credit(r);
  ctx_.reserve.remove_region(r.block_size);
}

Status no_memory_for_region(size_t size) {
  return error(ENOMEM, "no memory for the tables of a region of %s", core::human_bytes(size).c_str());
}

}  // namespace vmem::pager
