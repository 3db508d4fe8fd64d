// What the pager keeps of blocks, and how much of it there may be: tables, residents, moves, queues. All of it is paid
// for from the host budget, beyond what every process can spare.
//
// A region's table grows by a page with the first of 128 blocks that is ever used. Where the budget has no room for one
// more beside what blocks need to move at all, the access that wants it gets SIGBUS, with the numbers in the log, and
// an acquire -ENOMEM: everything that is there already goes on. What a region was granted when it was made it always
// has, so that a sparse one takes nothing from others.
#include <algorithm>
#include <cerrno>
#include <utility>

#include "core/log.h"
#include "pager/pager.h"

namespace vmem::pager {

using core::BlockIndex;
using core::ResidentId;
using core::State;
using core::Status;

// Locked, and now and then not; a new region. So that its blocks can move without asking for memory, as many of them as
// fit the budget, or kMostReserved. Beyond that memory is asked for when it is needed, and without it blocks wait for
// others to leave.
bool Pager::reserve_blocks(Lock& lock, Region& r) {
  constexpr size_t kMostReserved = 65536, kMoves = 128, kWaiting = 256;
  const uint64_t at_once = r.gpu ? r.blocks : std::min<uint64_t>(r.blocks, budget_.wanted() / r.block_size);
  while (residents_.size() < std::min<uint64_t>(sums_.reserved_blocks + at_once, kMostReserved)) {
    if (!map_.reserve_residents(residents_.size() + 1)) return false;
    lock.give_way();
  }
  if (!frames_.want_slots(r.block_size) || !map_.reserve_move(kMoves) || !queues_.starved.reserve(kWaiting) ||
      !queues_.speculation.reserve(kWaiting) || !queues_.dropped.reserve(kWaiting) || !tables_.reserve() ||
      !queues_.retries.reserve(kWaiting))
    return false;
  r.reserved_blocks = at_once;
  sums_.reserved_blocks += at_once;
  tables_.count();
  return true;
}

Status Pager::no_table(const Region& r, BlockIndex b) const {
  return core::error(
      ENOMEM,
      "host_budget %s has no room for more of the tables of blocks: %s, of which %s are this region's (%s "
      "for each %s of it in which anything was stored), beside %s of buffers, %s leased and %s for blocks "
      "that move; raise host_budget, choose a larger block_size, or drop what is not needed with "
      "VMEM_ADVISE_DONT_NEED; %s",
      core::human_bytes(budget_.wanted()).c_str(), core::human_bytes(tables_.bytes()).c_str(),
      core::human_bytes(r.table_charged).c_str(), core::human_bytes(core::kPage).c_str(),
      core::human_bytes(core::BlockTable::kChunk * r.block_size).c_str(),
      core::human_bytes(frames_.least_overhead() - budget_.charged(Use::tables)).c_str(),
      core::human_bytes(reserve_.pinned()).c_str(),
      core::human_bytes(std::max(reserve_.bytes(), 4 * reserve_.largest_block())).c_str(), map_.where(r, b).c_str());
}

// Locked; state untouched. Its accesses get SIGBUS until there is room: known by place, for its table has none.
void Pager::refuse_touch(Region& r, BlockIndex b) {
  const Status why = no_table(r, b);
  core::log(core::Level::error, "%.*s: an access gets SIGBUS", static_cast<int>(why.text().size()), why.text().data());
  if (const Status failed = tables_.refuse(r, b); !failed.ok()) answer_later(r, b, failed);
}

}  // namespace vmem::pager
