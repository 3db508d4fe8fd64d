#include "pager/host/isolated_blocks.h"

#include <cerrno>

#include "core/break.h"
#include "pager/block/block_run.h"
#include "pager/host/drop_pages.h"
#include "pager/host/host_tier.h"

namespace vmem::pager {

IsolatedBlocks::IsolatedBlocks(PagerContext& ctx, HostTier& host) : ctx_(ctx), host_(host) {}

void IsolatedBlocks::keep_frame(Transition* m, DeferredWork& after) {
  Region& r = *m->region;
  const BlockIndex b = m->block;
  const FrameId id = r.table[b].aux;
  r.table.keep_staged(b);
  ctx_.map.frame_table()[id].bytes = m->image;
  ctx_.map.policy(id).unhold(id);
  if ((r.table[b].flags & core::kFaultPending) != 0) {
    ctx_.map.policy(id).touched(id);
    host_.installer.begin_install(r, b, after);
  }
  ctx_.map.free_transition(m);
}

void IsolatedBlocks::give_buffers(Transition* m) {
  const Region& r = *m->region;
  if (m->coded != nullptr) ctx_.frames.put_bounce(m->coded, r.block_size);
  if (m->write.aside != nullptr && !m->write.spare) {
    if (r.bounces) {
      ctx_.frames.put_bounce(m->write.aside, r.block_size);
    } else {
      ctx_.frames.put(m->write.aside, r.block_size);
    }
  }
  m->coded = m->write.aside = nullptr;
}

void IsolatedBlocks::let_go(Transition* m, DeferredWork& after) {
  Region& r = *m->region;
  const Block& block = r.table[m->block];
  core::add(ctx_.counters.evictions);
  ctx_.map.progress().made();
  if ((block.flags & core::kReadAhead) != 0) {
    core::add(ctx_.counters.prefetch_wasted);
    r.use.readahead.on_waste(m->block);
  }
  r.table.forget_read_ahead(m->block);
  r.table.clear(m->block, core::kProtected | core::kDirty);
  give_buffers(m);
  if (m->write.in_place) {
    if (!core::broken("credit")) ctx_.budget.credit(r.block_size);
  } else if (m->write.emptied) {
    ctx_.frames.put_slot(m->image, r.block_size);
    ctx_.budget.credit(r.block_size);
  } else if (m->write.from_staged || in_slot(*m)) {
    host_.installer.give_frame(r, m->image);
  } else {
    ctx_.frames.put(m->image, r.block_size);
  }
  ctx_.writes.settled(m->write.leaving);
  ctx_.map.free_entry(m->block, r);
  if (r.from_file() && !block.extent) r.table.forget_digest(m->block);
  r.table.let_go(m->block);
  ctx_.tables.charge(r);
  const BlockIndex b = m->block;
  ctx_.map.free_transition(m);
  host_.page_in.settle(r, b, after);
}

// The block's pages never left. After a failure the kernel's protection may be stronger than the
// flag; the next store lifts it.
void IsolatedBlocks::stay_in_place(Transition* m) {
  Region& r = *m->region;
  const Block& block = r.table[m->block];
  if (!m->write.in_place && r.transfer != Transfer::install) ctx_.frames.put_slot(m->image, r.block_size);
  Frame& frame = ctx_.map.frame_table()[block.aux];
  const bool proven = m->write.in_place && frame.proven && (block.flags & core::kProtected) != 0;
  r.table.keep_in_place(m->block);
  const bool differs = m->write.only_clean && !m->write.clean;
  const bool same = m->status.ok() && m->write.in_place && !differs && (block.flags & core::kDigest) != 0 &&
                    !lent_for_writing(r, m->block) && !frame.holed;
  bool stays = same && (block.flags & core::kStorePending) == 0;
  if (!stays && m->write.in_place)
    stays = ctx_.trap.unprotect(r.address(m->block), r.block_size).code() == -EPERM && same;
  r.table.clear(m->block, core::kProtected);
  // A device that pinned pages before they were protected stores unseen. If the trap cannot see
  // pins, the block counts as proven all the same, except after a background write, which comes at
  // any time.
  const bool seen =
      ctx_.trap.caps().pins == trap::Pins::unseen && (!m->write.background || core::broken("compare_again"));
  frame.proven = stays && (proven || seen);
  if (stays) {
    r.table.mark(m->block, core::kProtected);
  } else {
    ctx_.map.note_dirty(r, m->block);
  }
  if ((block.flags & core::kFaultPending) != 0) ctx_.trap.wake(r.address(m->block), r.block_size).ignore();
  r.table.answer_faults(m->block);
  ctx_.map.admit(r, m->block, ctx_.map.nonresident_age().shadow());
  const BlockIndex b = m->block;
  ctx_.map.free_transition(m);
  ctx_.map.look_for_overdue(r, b);
}

void IsolatedBlocks::put_back(Transition* m, DeferredWork& after) {
  Region& r = *m->region;
  const Block& block = r.table[m->block];
  ctx_.writes.settled(m->write.leaving);
  give_buffers(m);
  Frame& frame = ctx_.map.frame_table()[block.aux];
  if ((m->write.keep || m->write.probe) && frame.admitted) ctx_.map.policy(block.aux).unhold(block.aux);
  // A dirty block that had to be clean is set aside when it is chosen next.
  frame.could_not_leave =
      m->write.reclaims && !m->write.probe && !m->write.only_clean && (block.flags & core::kFaultPending) == 0;
  const bool same_in_store = m->status.ok() && !m->write.probe && (m->write.clean || m->io.size != 0);
  if (same_in_store) ctx_.map.note_clean(r, m->block);

  if (m->write.in_place || (!m->status.ok() && !m->write.from_staged && !m->write.out)) {
    stay_in_place(m);
    return;
  }
  frame.bytes = m->image;
  if (frame.lent_to_kernels) {
    r.table.keep_staged(m->block);
    r.table.begin_isolate(m->block);
    ctx_.map.free_transition(m);
    return;
  }
  const bool wanted = (block.flags & core::kFaultPending) != 0;
  if (m->write.from_staged && (!wanted || m->in_staging)) {
    r.table.keep_staged(m->block);
    ctx_.map.admit(r, m->block, ctx_.map.nonresident_age().shadow());
    const BlockIndex b = m->block;
    ctx_.map.free_transition(m);
    if (wanted) host_.installer.begin_install(r, b, after);
    return;
  }
  frame.shadow = ctx_.map.nonresident_age().shadow();
  // If the trap keeps frames, the block goes back protected, so that its next store is seen.
  m->protect = m->write.background && same_in_store && r.transfer == Transfer::install &&
               ctx_.trap.caps().write_protect &&
               (block.flags & (core::kDigest | core::kStorePending)) == core::kDigest && !lent_for_writing(r, m->block);
  host_.installer.start_installing(m, after.install);
}

void IsolatedBlocks::lose_taken(Transition* m) {
  Region& r = *m->region;
  const FrameId id = r.table[m->block].aux;
  ctx_.writes.settled(m->write.leaving);
  give_buffers(m);
  if ((m->write.keep || m->write.probe) && ctx_.map.frame_table()[id].admitted) ctx_.map.policy(id).unhold(id);
  ctx_.frames.put_slot(m->image, r.block_size);
  ctx_.budget.credit(r.block_size);
  ctx_.map.free_entry(m->block, r);
  host_.failed.mark_lost(r, m->block, m->status);
  m->status = r.reason(m->block);
  if (m->completion != nullptr && m->completion->status.ok()) r.table.mark(m->block, core::kTold);
  ctx_.map.free_transition(m);
}

Transition* IsolatedBlocks::hold_for_drop(Region& r, BlockIndex b) {
  const Block& block = r.table[b];
  ctx_.map.withdraw(block.aux);
  r.table.begin_isolate(b);
  return ctx_.map.new_transition(r, b);
}

void IsolatedBlocks::drop_held(Region& r, BlockIndex b, DeferredWork& after) {
  Transition* m = hold_for_drop(r, b);
  const Frame& frame = ctx_.map.frame_table()[r.table[b].aux];
  m->image = frame.bytes;
  m->write.from_staged = true;
  m->in_staging = in_staging(frame.pool);
  leaves(m);
  let_go(m, after);
}

Status IsolatedBlocks::drop_contents(Lock& lock, Region& r, BlockIndex b, DeferredWork& after) {
  if (!ctx_.map.reserve_transition()) return error(ENOMEM, "no memory for bookkeeping");
  if (r.table[b].state == State::staged) {
    host_.failed.forget_store_copy(r, b);
    drop_held(r, b, after);
    return {};
  }
  Transition* m = hold_for_drop(r, b);
  Frame& frame = ctx_.map.frame_table()[r.table[b].aux];
  m->write.in_place = r.transfer != Transfer::install;
  frame.in_place = m->write.in_place;
  frame.dropping = true;
  m->image = m->write.in_place ? r.address(b) : frame.bytes;
  leaves(m);
  lock.unlock();
  Status dropped = drop_one(ctx_.trap, r, b) ? Status() : error(EBUSY, "a page of the block is pinned");
  lock.lock();
  if (!dropped.ok()) {
    m->write.in_place = true;
    m->status = dropped;
    put_back(m, after);
    return dropped;
  }
  host_.failed.forget_store_copy(r, b);
  let_go(m, after);
  return {};
}

}  // namespace vmem::pager
