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

namespace {

constexpr uint64_t kFree = uint64_t{8} << 20;  // what every process can spare
constexpr size_t kMostRefused = 256;
constexpr size_t kTries = 8;  // of those that are to ask again, at a time

}  // namespace

// At least so many in all, a chunk at a time. References to residents stay good. False: no memory for so many.
bool Pager::reserve_residents(size_t count) noexcept try {
  while (residents_.size() < count) {
    resize_policies(residents_.size() + Residents::kStep);
    residents_.grow();
  }
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
  return (residents_.free() != 0 || reserve_residents(residents_.size() + 1)) && reserve_move();
}

// Locked, and now and then not; a new region. So that its blocks can move without asking for memory, as many of them as
// fit the budget, or kMostReserved. Beyond that memory is asked for when it is needed, and without it blocks wait for
// others to leave.
bool Pager::reserve_blocks(Lock& lock, Region& r) {
  constexpr size_t kMostReserved = 65536, kMoves = 128, kWaiting = 256;
  const uint64_t at_once = r.gpu ? r.blocks : std::min<uint64_t>(r.blocks, budget_.wanted() / r.block_size);
  while (residents_.size() < std::min<uint64_t>(sums_.reserved_blocks + at_once, kMostReserved)) {
    if (!reserve_residents(residents_.size() + 1)) return false;
    lock.give_way();
  }
  if (!frames_.want_slots(r.block_size) || !reserve_move(kMoves) || !queues_.starved.reserve(kWaiting) ||
      !queues_.speculation.reserve(kWaiting) || !queues_.dropped.reserve(kWaiting) ||
      !queues_.refused.reserve(kMostRefused) || !queues_.retries.reserve(kWaiting))
    return false;
  r.reserved_blocks = at_once;
  sums_.reserved_blocks += at_once;
  count_tables();
  return true;
}

// What tables take from the budget, with so many bytes more of them.
uint64_t Pager::counted_tables(uint64_t more) const {
  const uint64_t bytes =
      sums_.table_bytes + residents_.size() * (sizeof(Resident) + 24) + moves_.size() * sizeof(Move) + more;
  return bytes > kFree ? bytes - kFree : 0;
}

void Pager::count_tables() {
  budget_.set_tables(counted_tables(0));
}

// What the budget must have room for beside the frame of block b, so that its table can be charged at once.
uint64_t Pager::table_growth(const Region& r, BlockIndex b) const {
  const size_t cost = r.table.cost(b);
  if (cost == 0) return 0;
  const size_t grown = r.table.footprint() + cost;
  const uint64_t counted = counted_tables(grown > r.table_charged ? grown - r.table_charged : 0);
  return counted > budget_.charged(Use::tables) ? counted - budget_.charged(Use::tables) : 0;
}

// Its table grows and shrinks as blocks change, and is charged from the start for what it was granted.
void Pager::charge_table(Region& r) {
  const size_t bytes = std::max(r.table.footprint(), r.table_granted);
  if (bytes == r.table_charged) return;
  sums_.table_bytes += bytes - r.table_charged;
  r.table_charged = bytes;
  count_tables();
}

bool Pager::table_fits(const Region& r, BlockIndex b) const {
  const size_t more = r.table.cost(b);
  if (more == 0 || r.table.footprint() + more <= r.table_charged || budget_.charged(Use::tables) == 0) return true;
  return frames_.least_overhead() + reserve_.for_moves() + more <= budget_.wanted();
}

// Locked. Whether a block may be the first of its page in the region's table. If so, all that were refused before and
// that there is room for by now can be touched again.
bool Pager::table_may_grow(const Region& r, BlockIndex b) {
  if (!table_fits(r, b)) return false;
  if (r.table.cost(b) == 0) return true;
  queues_.refused.erase_if([&](const std::pair<Region*, BlockIndex>& e) {
    if (!table_fits(*e.first, e.second)) return false;
    const Status s = trap_->unfail(e.first->address(e.second), e.first->block_size);
    if (!s.ok()) VMEM_LOG_ONCE(core::Level::error, "%.*s", static_cast<int>(s.text().size()), s.text().data());
    return s.ok();  // else it would give SIGBUS for good: tried again
  });
  return true;
}

Status Pager::no_table(const Region& r, BlockIndex b) const {
  return core::error(
      ENOMEM,
      "host_budget %s has no room for more of the tables of blocks: %s, of which %s are this region's (%s "
      "for each %s of it in which anything was stored), beside %s of buffers, %s leased and %s for blocks "
      "that move; raise host_budget, choose a larger block_size, or drop what is not needed with "
      "VMEM_ADVISE_DONT_NEED; %s",
      core::human_bytes(budget_.wanted()).c_str(), core::human_bytes(sums_.table_bytes).c_str(),
      core::human_bytes(r.table_charged).c_str(), core::human_bytes(core::kPage).c_str(),
      core::human_bytes(core::BlockTable::kChunk * r.block_size).c_str(),
      core::human_bytes(frames_.least_overhead() - budget_.charged(Use::tables)).c_str(),
      core::human_bytes(reserve_.pinned()).c_str(),
      core::human_bytes(std::max(reserve_.bytes(), 4 * reserve_.largest_block())).c_str(), where(r, b).c_str());
}

// Locked; state untouched. Its accesses get SIGBUS until there is room: known by place, for its table has none.
void Pager::refuse_touch(Region& r, BlockIndex b) {
  const Status why = no_table(r, b);
  core::log(core::Level::error, "%.*s: an access gets SIGBUS", static_cast<int>(why.text().size()), why.text().data());
  // The oldest may ask again, or the next that the trap takes back; where it takes none, one more is known.
  bool full = queues_.refused.size() >= kMostRefused;
  for (size_t tries = kTries; full && tries != 0; --tries) {
    const auto [region, block] = queues_.refused.front();
    full = !trap_->unfail(region->address(block), region->block_size).ok();
    full ? queues_.refused.move_front(queues_.refused.end()) : queues_.refused.pop_front();
  }
  if (!queues_.refused.push_back({&r, b})) {  // no memory to know it by
    trap_->wake(r.address(b), r.block_size).ignore();
    return;
  }
  const Status failed = trap_->fail(r.address(b), r.block_size);
  if (failed.ok()) return;
  queues_.refused.erase(std::prev(queues_.refused.end()));
  answer_later(r, b, failed);
}

}  // namespace vmem::pager
