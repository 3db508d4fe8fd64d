#include "pager/tier/staging_loans.h"

#include <algorithm>
#include <utility>

#include "pager/tier/device_tier.h"

namespace vmem::pager {

namespace {

constexpr size_t kForMoves = 4;  // one of so many frames is not lent
constexpr uint16_t kSomebodyWants = core::kFaultPending | core::kStorePending;

}  // namespace

StagingLoans::StagingLoans(PagerContext& ctx, DeviceTier& tier) : ctx_(ctx), host_(tier.host), tier_(tier) {}

// Returns nullptr if shutdown has freed the region.
Region* StagingLoans::region_of(const KernelRange& range) {
  Region* const r = ctx_.map.find(range.first);
  return r != nullptr && r->id == range.region ? r : nullptr;
}

// Returns how many of the blocks asked for may be lent.
size_t StagingLoans::most(const StagingPool& pool, size_t asked) const {
  const size_t total = pool.frames.total(), kept = std::max(total / kForMoves, Staging::kLeast);
  const size_t can = total - std::min(total, kept);
  return std::min(asked, can - std::min(can, pool.lent));
}

// Drops the lock while it works; the region is in flight.
void StagingLoans::take_from_device(Lock& lock, Region& r, BlockIndex first, int d, std::span<const uint32_t> blocks) {
  const StagingPool& pool = ctx_.staging.of(r.block_size);
  Batch batch;
  for (size_t i = 0; i < blocks.size() && !batch.full() && batch.size() < most(pool, blocks.size()); ++i) {
    const BlockIndex b = first + blocks[i];
    const Block& block = r.table[b];
    const bool idle = block.state == State::on_device && block.device == d && !leased(r, b);
    if (!idle || ctx_.map.frame_table()[block.aux].dev.cpu_mapped || !ctx_.map.copies().has(block.aux)) continue;
    if (Transition* m = tier_.demoter.begin(r, b, Leave::evict)) batch.push_back(m);
  }
  if (batch.empty()) return;
  ++r.counts.in_flight;
  tier_.demoter.run(lock, batch.all());
  --r.counts.in_flight;
  ctx_.map.notify();
}

size_t StagingLoans::lend(const KernelRange& range, std::span<uint32_t> blocks, std::span<const std::byte*> frames,
                          bool leave) {
  Lock lock(ctx_.map.mutex());
  Region* const r = region_of(range);
  if (r == nullptr || r->dying) return 0;
  StagingPool& pool = ctx_.staging.of(r->block_size);
  if (tier_.staging_allocator.is_short()) return 0;
  const BlockIndex first = r->index(reinterpret_cast<const void*>(range.first));
  if (leave) {
    take_from_device(lock, *r, first, range.device, blocks);
    if (r->dying) return 0;
  }
  const size_t now = most(pool, blocks.size());  // another thread may have lent some by now
  size_t lent = 0;
  for (uint32_t& number : blocks) {
    if (lent == now) break;
    const BlockIndex b = first + number;
    const Block& block = r->table[b];
    if (block.state != State::staged || (block.flags & kSomebodyWants) != 0 || ctx_.map.waiters().any(*r, b) ||
        leased(*r, b))
      continue;
    Frame& frame = ctx_.map.frame_table()[block.aux];
    if (!in_staging(frame.pool) || frame.bytes == nullptr || frame.evict_when_stable) continue;
    if (frame.admitted) ctx_.map.policy(block.aux).remove(block.aux);
    frame.admitted = false;
    frame.lent_to_kernels = true;
    ++pool.lent;
    r->table.begin_isolate(b);
    frames[lent] = frame.bytes;
    std::swap(number, blocks[lent++]);
  }
  return lent;
}

// Ends the loan of a block; does nothing if the block is not lent any more.
void StagingLoans::end(Region& r, BlockIndex b, DeferredWork& after) {
  const Block& block = r.table[b];
  if ((block.state != State::isolating && block.state != State::writing_back) ||
      !ctx_.map.frame_table()[block.aux].lent_to_kernels)
    return;
  ctx_.map.frame_table()[block.aux].lent_to_kernels = false;
  --ctx_.staging.of(r.block_size).lent;
  if (block.state == State::writing_back) return;  // put_back() does the rest
  r.table.keep_staged(b);
  ctx_.map.admit(r, b, ctx_.map.nonresident_age().shadow());
  if (std::exchange(ctx_.map.frame_table()[block.aux].evict_when_stable, false))
    host_.reclaim.evict_after_transition(r, b);
  if (!r.dying) host_.page_in.settle(r, b, after);
}

void StagingLoans::take_back(Lock& lock, Region& r) {
  if (!r.gpu || ctx_.staging.of(r.block_size).lent == 0) return;
  DeferredWork after;
  for (BlockIndex b = r.table.next_populated(0); b < r.blocks; b = r.table.next_populated(b + 1)) end(r, b, after);
  ctx_.map.notify();
  ctx_.upcalls.memory_freed(after);
  host_.page_in.run(lock, after);
}

void StagingLoans::end(const KernelRange& range, std::span<const uint32_t> blocks) {
  DeferredWork after;
  Lock lock(ctx_.map.mutex());
  Region* const r = region_of(range);
  if (r == nullptr) return;
  const BlockIndex first = r->index(reinterpret_cast<const void*>(range.first));
  for (const uint32_t number : blocks) {
    end(*r, first + number, after);
  }
  ctx_.map.notify();
  ctx_.upcalls.memory_freed(after);
  lock.unlock();
  host_.page_in.run(after);
}

size_t StagingLoans::wanted(const KernelRange& range, std::span<const uint32_t> lent, std::span<uint32_t> out) {
  Lock lock(ctx_.map.mutex());
  Region* const r = region_of(range);
  if (r == nullptr) return 0;
  const BlockIndex first = r->index(reinterpret_cast<const void*>(range.first));
  size_t count = 0;
  for (const uint32_t number : lent) {
    if (count == out.size()) break;
    const BlockIndex b = first + number;
    const Block& block = r->table[b];
    const bool requested =
        std::any_of(ctx_.queues.promotion_requests.begin(), ctx_.queues.promotion_requests.end(),
                    [&](const PromotionRequest& w) { return w.region == r && w.next <= b && b <= w.last; });
    if (r->dying || requested || (block.flags & kSomebodyWants) != 0 ||
        ctx_.map.frame_table()[block.aux].evict_when_stable || ctx_.map.waiters().any(*r, b))
      out[count++] = number;
  }
  return count;
}

}  // namespace vmem::pager
