// Loans: staging frames that kernels load from where they are, for as long as the service of an open range says. A
// block that is lent is in state taking, without a move: to everybody else it is on its way, and who wants it waits, as
// for any other. So nothing changes its bytes, and its frame is nobody else's.
//
//   held ──lend──> taking, lent ──end_loans──> held
//   on_device, with a host copy, nobody leases it ──leaves──> held
//
// Whoever waits is seen by loans_wanted(), which the service asks often. A region that is freed by force takes its
// loans with it, after the kernels. At exit kernels may keep what is lent for ever: it is written in state writing,
// with a move, and goes back to where it was.
#include <algorithm>
#include <utility>

#include "pager/clock.h"
#include "pager/open_range.h"
#include "pager/pager.h"

namespace vmem::pager {

using core::Block;
using core::BlockIndex;
using core::State;

namespace {

constexpr size_t kForMoves = 4;  // of all frames one of so many is not lent
constexpr uint16_t kSomebodyWants = core::kWanted | core::kWantedWrite;

}  // namespace

// Locked. nullptr: it was freed, by shutdown.
Region* Pager::region_of(const OpenRange& range) {
  Region* const r = map_.find(range.first);
  return r != nullptr && r->id == range.region ? r : nullptr;
}

// Of these blocks those that are in staging frames, until end_loans(): they come first in `blocks`, in the order of
// `frames`, which has room for all. How many they are. leave: also those that are on the range's device, and that
// nobody leases: where a staging frame has the same bytes they leave it first, which copies nothing.
size_t Pager::lend(const OpenRange& range, std::span<uint32_t> blocks, std::span<const std::byte*> frames, bool leave) {
  Lock lock(map_.mutex());
  Region* const r = region_of(range);
  if (r == nullptr || r->dying) return 0;
  StagingPool& pool = staging_.of(*r);
  if (supply_.is_short()) return 0;
  const auto most = [&] {
    const size_t total = pool.frames.total(), kept = std::max(total / kForMoves, Staging::kLeast);
    const size_t can = total - std::min(total, kept);
    return std::min(blocks.size(), can - std::min(can, pool.lent));
  };
  const BlockIndex first = r->index(reinterpret_cast<const void*>(range.first));
  Batch batch;
  for (size_t i = 0; leave && i < blocks.size() && !batch.full() && batch.size() < most(); ++i) {
    const BlockIndex b = first + blocks[i];
    const Block& block = r->table[b];
    const bool idle = block.state == State::on_device && block.device == range.device && !leased(*r, b);
    if (!idle || map_.residents()[block.aux].shown || !map_.copies().has(block.aux)) continue;
    if (Move* m = demoter_.begin(*r, b, Leave::evict)) batch.push_back(m);
  }
  if (!batch.empty()) {
    ++r->in_flight;
    demoter_.run(lock, batch.all());
    --r->in_flight;
    map_.notify();
    if (r->dying) return 0;
  }
  const size_t now = most();  // others may have lent some meanwhile
  size_t lent = 0;
  for (uint32_t& number : blocks) {
    if (lent == now) break;
    const BlockIndex b = first + number;
    const Block& block = r->table[b];
    if (block.state != State::held || (block.flags & kSomebodyWants) != 0 || map_.waiters().any(*r, b) || leased(*r, b))
      continue;
    Resident& resident = map_.residents()[block.aux];
    if (!in_staging(resident.pool) || resident.frame == nullptr || resident.leaves) continue;
    if (resident.admitted) map_.policy(block.aux).remove(block.aux);
    resident.admitted = false;
    resident.lent = true;
    ++pool.lent;
    r->table.change(b, State::held, State::taking);
    frames[lent] = resident.frame;
    std::swap(number, blocks[lent++]);
  }
  return lent;
}

// Locked. Nothing where it is not lent any more.
void Pager::end_loan(Region& r, BlockIndex b, After& after) {
  const Block& block = r.table[b];
  if ((block.state != State::taking && block.state != State::writing) || !map_.residents()[block.aux].lent) return;
  map_.residents()[block.aux].lent = false;
  --staging_.of(r).lent;
  if (block.state == State::writing) return;  // put_back() does the rest
  r.table.change(b, State::taking, State::held);
  map_.admit(r, b, map_.clock().stamp());
  if (std::exchange(map_.residents()[block.aux].leaves, false)) leaves(r, b);
  if (!r.dying) page_in_.settle(r, b, after);
}

// Locked on entry and on return, and not meanwhile. All of a region that is freed, whose kernels have ended.
void Pager::take_back_loans(Lock& lock, Region& r) {
  if (!r.gpu || staging_.of(r).lent == 0) return;
  After after;
  for (BlockIndex b = r.table.next_touched(0); b < r.blocks; b = r.table.next_touched(b + 1)) end_loan(r, b, after);
  map_.notify();
  came_free(after);
  page_in_.run(lock, after);
}

// No kernel loads from them any more, nor will.
void Pager::end_loans(const OpenRange& range, std::span<const uint32_t> blocks) {
  After after;
  Lock lock(map_.mutex());
  Region* const r = region_of(range);
  if (r == nullptr) return;
  const BlockIndex first = r->index(reinterpret_cast<const void*>(range.first));
  for (const uint32_t number : blocks) {
    end_loan(*r, first + number, after);
  }
  map_.notify();
  came_free(after);
  lock.unlock();
  page_in_.run(after);
}

// Of blocks that are lent those that somebody waits for, as many as fit into `out`: how many.
size_t Pager::loans_wanted(const OpenRange& range, std::span<const uint32_t> lent, std::span<uint32_t> out) {
  Lock lock(map_.mutex());
  Region* const r = region_of(range);
  if (r == nullptr) return 0;
  const BlockIndex first = r->index(reinterpret_cast<const void*>(range.first));
  size_t count = 0;
  for (const uint32_t number : lent) {
    if (count == out.size()) break;
    const BlockIndex b = first + number;
    const Block& block = r->table[b];
    const bool wished = std::any_of(queues_.wishes.begin(), queues_.wishes.end(),
                                    [&](const Wish& w) { return w.region == r && w.next <= b && b <= w.last; });
    if (r->dying || wished || (block.flags & kSomebodyWants) != 0 || map_.residents()[block.aux].leaves ||
        map_.waiters().any(*r, b))
      out[count++] = number;
  }
  return count;
}

}  // namespace vmem::pager
