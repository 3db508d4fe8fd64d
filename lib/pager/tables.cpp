// What the pager keeps of blocks, and how much of it there may be: tables, residents, moves, queues. All of it is paid
// for from the host budget, beyond what every process can spare.
#include <algorithm>

#include "pager/pager.h"

namespace vmem::pager {

using core::ResidentId;

namespace {

constexpr uint64_t kFree = uint64_t{8} << 20;  // what every process can spare

}  // namespace

// At least so many in all. References to residents stay good. False: no memory, and nothing has changed.
bool Pager::reserve_residents(size_t count) noexcept try {
  const size_t old = residents_.size();
  if (count <= old) return true;
  const size_t grown = std::max<size_t>({64, count, old + old / 2});
  free_residents_.reserve(grown);  // giving one back needs no memory
  resize_policies(grown);
  residents_.resize(grown);
  for (size_t i = grown; i > old; --i) free_residents_.push_back(static_cast<ResidentId>(i - 1));
  return true;
} catch (const std::bad_alloc&) {
  return false;
}

bool Pager::reserve_move(size_t free) noexcept try {
  if (free_moves_.size() >= free) return true;
  const size_t count = moves_.size() + free - free_moves_.size();
  if (free_moves_.capacity() < count) {
    const size_t room = std::max(count, 2 * moves_.size() + 16);
    for (Gpu& g : gpus_) {
      g.ready.reserve(room);
      g.from_peers.reserve(room);
    }
    moves_.reserve(room);
    free_moves_.reserve(room);  // as above
  }
  while (moves_.size() < count) {
    moves_.push_back(std::make_unique<Move>());
    free_moves_.push_back(moves_.back().get());
  }
  return true;
} catch (const std::bad_alloc&) {
  return false;
}

bool Pager::reserve_block() {
  return (!free_residents_.empty() || reserve_residents(residents_.size() + 1)) && reserve_move();
}

// Locked; a new region. So that its blocks can move without asking for memory, as many of them as fit the budget, or
// kMostReserved. Beyond that memory is asked for when it is needed, and without it blocks wait for others to leave.
bool Pager::reserve_blocks(Region& r) {
  constexpr size_t kMostReserved = 65536, kMoves = 128, kWaiting = 256;
  const uint64_t at_once = r.gpu ? r.blocks : std::min<uint64_t>(r.blocks, frames_.wanted_budget() / r.block_size);
  const uint64_t wanted = std::min<uint64_t>(sums_.reserved_blocks + at_once, kMostReserved);
  if (!frames_.want_slots(r.block_size) || !reserve_residents(wanted) || !reserve_move(kMoves) ||
      !queues_.starved.reserve(kWaiting) || !queues_.speculative.reserve(kWaiting) ||
      !queues_.dropped.reserve(kWaiting))
    return false;
  r.reserved_blocks = at_once;
  sums_.reserved_blocks += at_once;
  count_tables();
  return true;
}

void Pager::count_tables() {
  const uint64_t bytes = sums_.table_bytes + residents_.size() * (sizeof(Resident) + 24) + moves_.size() * sizeof(Move);
  frames_.set_tables(bytes > kFree ? bytes - kFree : 0);
}

// Its table grows and shrinks as blocks change.
void Pager::charge_table(Region& r) {
  if (r.table.footprint() == r.table_charged) return;
  sums_.table_bytes += r.table.footprint() - r.table_charged;
  r.table_charged = r.table.footprint();
  count_tables();
}

}  // namespace vmem::pager
