#include "pager/host/background_writes.h"

#include <algorithm>
#include <chrono>

#include "core/clock.h"
#include "core/log.h"
#include "core/step.h"
#include "pager/host/host_tier.h"

namespace vmem::pager {

namespace {

constexpr uint64_t kBatch = uint64_t{8} << 20;  // bytes written together
constexpr size_t kLooks = 256;                  // blocks looked at under one hold of the lock
constexpr uint64_t kLookAgain = 100000000;      // ns from a look that found nothing to the next
constexpr uint64_t kLift = 1000000000;          // ns for which faults do not wait if nothing can be written

}  // namespace

BackgroundWrites::BackgroundWrites(PagerContext& ctx, HostTier& host) : ctx_(ctx), host_(host) {}

uint64_t BackgroundWrites::next_ns(uint64_t now_ns) const {
  const DirtyBlocks& dirty = ctx_.map.dirty();
  const uint64_t look = dirty.any_slowed() ? now_ns + kLookAgain : UINT64_MAX;
  if (dirty.interval_ns() == 0 || dirty.first() == kNoFrame) return look;
  if (dirty.writes_enough()) return look;  // the end of a write wakes a reclaim thread
  const uint64_t due = dirty.many() ? now_ns : dirty.since(dirty.first()) + dirty.interval_ns();
  return std::min(look, std::max({due, again_changes_ == dirty.changes() ? again_ns_ : 0, now_ns}));
}

// A call that waits may write a block while kernels load from its frame; a background write does
// not.
bool BackgroundWrites::may_write(Region& r, BlockIndex b, uint64_t now_ns) const {
  const State state = r.table[b].state;
  return !r.dying && !r.lost && !file_refuses(r, now_ns) && (state == State::resident || state == State::staged) &&
         !ctx_.map.frame_table()[r.table[b].aux].lent_to_kernels && !lent_for_writing(r, b);
}

bool BackgroundWrites::take(Region& r, BlockIndex b, Batch* batch) {
  Transition* const m = host_.isolator.begin_take(r, b, true, false);
  if (m == nullptr) return false;
  m->write.background = true;
  ctx_.map.dirty().write_begins(r.block_size);
  batch->push_back(m);
  return true;
}

void BackgroundWrites::write_overdue(Lock& lock, const BlockSpan& span) {
  Region& r = *span.region;
  DirtyBlocks& dirty = ctx_.map.dirty();
  if (r.backing != Backing::file_shared) return;
  const uint64_t give_up_ns = now_ns() + ctx_.tunables.fault_timeout_ms * uint64_t{1000000};
  for (BlockIndex b = r.table.next_populated(span.first); b <= span.last && b < r.blocks && !r.dying;) {
    if (dirty.interval_ns() == 0) return;
    if (dirty.writes_enough()) {
      if (now_ns() > give_up_ns) return;
      lock.sleep_for(ctx_.map.changed(), std::chrono::milliseconds(20));
      continue;
    }
    Batch batch;
    for (size_t looks = 0; looks < kLooks && b <= span.last && b < r.blocks; ++looks) {
      if (batch.full() || dirty.writes_enough()) break;
      const core::Block& block = r.table[b];
      if (core::in_memory(block.state) && dirty.overdue(block.aux) && may_write(r, b, now_ns())) {
        const FrameId id = block.aux;
        if (!take(r, b, &batch)) return host_.writeback.evict_batch(lock, batch.all());
        dirty.put_off(id, now_ns());
      }
      b = r.table.next_populated(b + 1);
    }
    if (batch.empty()) {
      lock.give_way();
    } else {
      host_.writeback.evict_batch(lock, batch.all());
    }
  }
}

// Takes the block, and those behind it that are dirty and not much younger. Returns their bytes, or
// 0 if the block cannot be written.
uint64_t BackgroundWrites::take_run(Region& r, BlockIndex first, uint64_t now_ns, Batch* batch) {
  const DirtyBlocks& dirty = ctx_.map.dirty();
  const uint64_t youngest = now_ns - std::min(now_ns, dirty.interval_ns() / 2);
  uint64_t bytes = 0;
  for (BlockIndex b = first; b < r.blocks && bytes < kBatch && !batch->full(); ++b) {
    if (!core::in_memory(r.table[b].state) || !dirty.listed(r.table[b].aux) || !may_write(r, b, now_ns) ||
        left_alone(r.table[b].aux, now_ns))
      break;
    if (b != first && dirty.since(r.table[b].aux) > youngest && !dirty.many()) break;
    if (!take(r, b, batch)) break;
    bytes += r.block_size;
  }
  return bytes;
}

// Fills the batch with blocks that are due. Returns false if nothing more is due.
bool BackgroundWrites::pick(uint64_t now_ns, Batch* batch) {
  DirtyBlocks& dirty = ctx_.map.dirty();
  uint64_t bytes = 0;
  for (size_t looks = 0; looks < kLooks && bytes < kBatch && !batch->full(); ++looks) {
    const FrameId id = dirty.first();
    if (id == kNoFrame || (!dirty.many() && dirty.since(id) + dirty.interval_ns() > now_ns)) return false;
    const Frame& frame = ctx_.map.frame_table()[id];
    const uint64_t taken = take_run(*frame.region, frame.block, now_ns, batch);
    if (taken == 0) in_vain_ += frame.region->block_size;
    bytes += taken;
    const bool leased = taken == 0 && lent_for_writing(*frame.region, frame.block);
    dirty.put_off(id, now_ns,
                  leased                   ? DirtyFrame::Overdue::leased
                  : left_alone(id, now_ns) ? DirtyFrame::Overdue::failed
                  : taken == 0             ? DirtyFrame::Overdue::yes
                                           : DirtyFrame::Overdue::no);
  }
  return true;
}

bool BackgroundWrites::write_some(Lock& lock, uint64_t now_ns) {
  const DirtyBlocks& dirty = ctx_.map.dirty();
  if (dirty.stuck_ns(now_ns) > ctx_.tunables.fault_timeout_ms * uint64_t{1000000}) give_up(now_ns);
  if (dirty.writes_enough() || next_ns(now_ns) > now_ns) return false;
  Batch batch;
  const bool more = pick(now_ns, &batch);
  if (batch.empty()) {
    // Other blocks may be behind a large lease: look at all of the list, a part at a time, before a
    // pause.
    if (more && in_vain_ < dirty.bytes()) {
      lock.give_way();
      return true;
    }
    in_vain_ = 0;
    again_ns_ = now_ns + kLookAgain;
    again_changes_ = dirty.changes();
    // The look may have found that leases hold the rest, which does not count towards the limit.
    wake_slowed(now_ns);
    if (dirty.any_slowed() && dirty.writing() == 0) give_up(now_ns);
    return false;
  }
  in_vain_ = 0;
  core::step("background.taken");
  host_.writeback.evict_batch(lock, batch.all());
  return true;
}

void BackgroundWrites::write_failed(FrameId id, uint64_t now_ns) {
  DirtyBlocks& dirty = ctx_.map.dirty();
  dirty.put_off(id, now_ns, DirtyFrame::Overdue::failed);
  failed_until_ns_ = now_ns + dirty.interval_ns();
}

// Waiting would not help: the writers go on, and the files lack more if the process is killed.
void BackgroundWrites::give_up(uint64_t now_ns) {
  DirtyBlocks& dirty = ctx_.map.dirty();
  dirty.lift(now_ns + kLift);
  VMEM_LOG_OFTEN(core::Level::warning,
                 "%s of shared files are dirty, dirty_limit is %s, and none of it can be written now (leases for "
                 "writing, pinned pages, or a file that takes no write): stores no longer wait, and more may be lost "
                 "if the process is killed",
                 core::human_bytes(dirty.bytes()).c_str(), core::human_bytes(dirty.limit()).c_str());
  wake_slowed(now_ns);
}

void BackgroundWrites::wake_slowed(uint64_t now_ns) {
  uint64_t woken = 0;
  for (BlockSpan s = ctx_.map.dirty().wake_one(now_ns, woken); s.region != nullptr;
       s = ctx_.map.dirty().wake_one(now_ns, woken)) {
    woken += s.region->block_size;
    ctx_.trap.wake(s.region->address(s.first), s.region->block_size).ignore();
  }
}

}  // namespace vmem::pager
