// What the pager keeps of blocks, and how much of it there may be: tables, residents, moves, queues. All of it is paid
// for from the host budget, beyond what every process can spare.
//
// A region's table grows by a page with the first of 128 blocks that is ever used. Where the budget has no room for one
// more beside what blocks need to move at all, the access that wants it gets SIGBUS, with the numbers in the log, and
// an acquire -ENOMEM: everything that is there already goes on. What a region was granted when it was made it always
// has, so that a sparse one takes nothing from others.
#include <algorithm>

#include "pager/pager.h"

namespace vmem::pager {

// Locked, and now and then not; a new region. So that its blocks can move without asking for memory, as many of them as
// fit the budget, or kMostReserved. Beyond that memory is asked for when it is needed, and without it blocks wait for
// others to leave.
bool Pager::reserve_blocks(Lock& lock, Region& r) {
  constexpr size_t kMostReserved = 65536, kMoves = 128, kWaiting = 256;
  const uint64_t at_once = r.gpu ? r.blocks : std::min<uint64_t>(r.blocks, budget_.wanted() / r.block_size);
  while (map_.residents().size() < std::min<uint64_t>(sums_.reserved_blocks + at_once, kMostReserved)) {
    if (!map_.reserve_residents(map_.residents().size() + 1)) return false;
    lock.give_way();
  }
  if (!frames_.want_slots(r.block_size) || !map_.reserve_move(kMoves) || !waits_.queue().reserve(kWaiting) ||
      !speculation_.reserve(kWaiting) || !failed_.reserve(kWaiting) || !tables_.reserve())
    return false;
  r.reserved_blocks = at_once;
  sums_.reserved_blocks += at_once;
  tables_.count();
  return true;
}

}  // namespace vmem::pager
