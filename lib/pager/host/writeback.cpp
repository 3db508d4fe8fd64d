#include "pager/host/writeback.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "core/break.h"
#include "core/clock.h"
#include "core/log.h"
#include "core/process/guarded_read.h"
#include "core/step.h"
#include "pager/block/block_run.h"
#include "pager/host/drop_pages.h"
#include "pager/host/host_tier.h"

namespace vmem::pager {

namespace {

// Returns why the block could not be taken out; 0 if it was, or if only its write could not begin.
int untaken(const Transition& m) {
  return m.write.stored != 0 ? 0 : m.status.code();
}

}  // namespace

Writeback::Writeback(PagerContext& ctx, HostTier& host) : ctx_(ctx), host_(host) {}

void Writeback::evict_batch(Lock& lock, std::span<Transition*> batch) {
  if (batch.empty()) return lock.give_way();
  lock.unlock();
  evict_batch(batch);
  lock.lock();
}

void Writeback::evict_batch(std::span<Transition*> batch) {
  Batch writes;
  host_.isolator.isolate(batch, &writes);
  host_.writer.prepare_writes(writes.all());
  core::step("evict.decided");

  DeferredWork after;
  {
    Lock lock(ctx_.map.mutex());
    // Reclaim threads choose blocks that could not be taken lately only if there are no others. If
    // the whole batch is such blocks, they pause.
    bool all_pinned = true;
    for (const Transition* m : batch) {
      const Frame& frame = ctx_.map.frame_table()[m->region->table[m->block].aux];
      all_pinned = all_pinned && untaken(*m) != 0 && m->write.reclaims && frame.pins.passed_over(m->begun_ns);
    }
    if (all_pinned) ctx_.writeback_throttle.pinned(now_ns());
    for (Transition* m : batch) settle_taken(m, after);
    ctx_.upcalls.memory_freed(after);
  }
  host_.page_in.run(after);
}

// State isolating, or writing_back if the block is lent. Goes on with the block as its transition
// says.
void Writeback::settle_taken(Transition* m, DeferredWork& after) {
  Region& r = *m->region;
  if (!m->write.keep)  // pages that stay in place are not checked for pins
    ctx_.map.frame_table()[r.table[m->block].aux].pins.found(untaken(*m), now_ns());
  if (m->write.probe && m->status.ok()) {
    keep_frame(m, after);
  } else if (m->torn) {
    lose_taken(m);
  } else if (!m->status.ok() && m->write.background) {
    put_back_dirty(m, after);
  } else if (!m->status.ok()) {
    if (m->write.stored != 0) {
      ctx_.map.frame_table()[r.table[m->block].aux].unwritten = true;
      host_.writer.note_write_failure(m);
    } else {
      ctx_.map.frame_table()[r.table[m->block].aux].unwritten |=
          m->write.only_clean;  // or it would be tried over and over
      if (m->status.code() == -EBUSY && m->completion != nullptr) {
        m->status =
            core::error(EBUSY, "%s stays in memory: I/O in flight or a registered buffer has pinned a page of it",
                        ctx_.map.describe_locked(r, m->block).c_str());
      }
    }
    put_back(m, after);
  } else if (m->write.clean) {
    finish_clean(m, after);
  } else if (m->write.only_clean) {
    ctx_.map.frame_table()[r.table[m->block].aux].unwritten = true;
    put_back(m, after);
  } else {
    if (r.table[m->block].state == State::isolating) r.table.begin_write(m->block);
    host_.writer.to_store(m, *this, after);
  }
}

// A write in the background failed or could not begin. No call waits for the write, and no other
// write waits for its file. The file is left alone for a growing pause, a pinned block for one
// interval.
void Writeback::put_back_dirty(Transition* m, DeferredWork& after) {
  Region& r = *m->region;
  const uint64_t now = now_ns();
  if (m->io.size != 0 && m->status.code() != -EFAULT) {
    core::add(ctx_.counters.io_errors);
    if (ctx_.writeback_throttle.file_failed(r, m->status, true, now)) {  // a sync tries the write again, and reports it
      VMEM_LOG_OFTEN(core::Level::warning, "writing failed in the background (%s), the block stays in memory, %s",
                     vmem_strerror(m->status.code()), ctx_.map.describe_locked(r, m->block).c_str());
    }
  }
  if (m->io.size != 0) host_.failed.mark_unknown(r, m->block);
  host_.background.write_failed(r.table[m->block].aux, now);
  put_back(m, after);
}

// The store has these bytes: the memory goes, unless a fault wants the block or it is to stay.
void Writeback::finish_clean(Transition* m, DeferredWork& after) {
  Region& r = *m->region;
  const Block& block = r.table[m->block];
  const bool gone = (m->write.in_place && !m->write.keep) || m->write.emptied;
  if (m->write.zeros) {  // the store's copy, if any, is out of date; zeros need none
    host_.failed.forget_store_copy(r, m->block);
    r.table.set_digest(m->block, m->digest);
  }
  if (m->write.keep || (!gone && (block.flags & core::kFaultPending) != 0)) {
    put_back(m, after);
    return;
  }
  core::add(ctx_.counters.clean_drops);
  let_go(m, after);
}

void Writeback::io_ended(Transition* m) {
  if (m->io.result != 0) m->status = Status(m->io.result, "");
  DeferredWork after;
  finish_write(m, after);
  host_.page_in.run(after);
}

// State writing_back. The block was written from its place, and the program has revoked the right
// to read a page of it. Writes a copy instead, now or when the emergency buffer is free. Returns
// false if there is no memory for a copy, or the pages cannot be read.
bool Writeback::write_aside(Transition* m) {
  const Region& r = *m->region;
  std::byte* copy = nullptr;
  {
    Lock lock(ctx_.map.mutex());
    copy = m->write.aside = r.bounces ? ctx_.frames.get_bounce(r.block_size) : ctx_.frames.get(r.block_size, 0);
    if (copy == nullptr && core::broken("spare_copy")) return false;
    if (copy == nullptr) {
      m->write.spare = true;
      if (!spare_.take(m)) return true;
    }
  }
  if (copy == nullptr) copy = m->write.aside = spare_.memory(r.block_size);
  return copy != nullptr && write_copy(m, copy);
}

// Returns false if the pages cannot be read.
bool Writeback::write_copy(Transition* m, std::byte* copy) {
  const Region& r = *m->region;
  if (core::read_guarded_at_once(copy, r.address(m->block), r.block_size, r.absent) != 0) return false;
  core::step("evict.aside");
  m->image = copy;
  m->digest = store::digest(copy, r.block_size);  // a page may have become a guard page since it was hashed
  m->status = {};
  DeferredWork after;
  {
    Lock lock(ctx_.map.mutex());
    host_.writer.to_store(m, *this, after);
  }
  host_.page_in.run(after);
  return true;
}

// A transition that had the emergency buffer has ended: the next one gets it. Waiting blocks that a
// fault wants stay, and are written another time, unless a call waits for the write.
void Writeback::pass_spare(DeferredWork& after) {
  for (;;) {
    TransitionList wanted;
    {
      Lock lock(ctx_.map.mutex());
      wanted = spare_.give_up([](const Transition& m) VMEM_LOCKED {
        return m.completion == nullptr && (m.region->table[m.block].flags & core::kFaultPending) != 0;
      });
    }
    while (!wanted.empty()) settle_write(wanted.pop(), after);
    Transition* const m = spare_.pass(ctx_.map.mutex());
    if (m == nullptr) return;
    m->write.aside = spare_.memory(m->region->block_size);
    if (m->write.aside != nullptr && write_copy(m, m->write.aside)) return;
    settle_write(m, after);
  }
}

void Writeback::finish_write(Transition* m, DeferredWork& after) {
  Region& r = *m->region;
  core::step("evict.written");
  if (m->status.code() == -EFAULT && m->write.in_place && m->write.aside == nullptr && write_aside(m)) return;
  if (host_.writer.find_elsewhere(m)) {
    Lock lock(ctx_.map.mutex());
    host_.writer.to_store(m, *this, after);
    return;
  }
  m->cut = m->status.ok() && r.backing == Backing::file_shared && m->io.transferred < m->write.stored;
  if (m->cut) drop_cut_off(m);
  end_write(m, after);
}

void Writeback::end_write(Transition* m, DeferredWork& after) {
  const bool spare = m->write.spare;
  settle_write(m, after);
  if (spare) pass_spare(after);
}

void Writeback::settle_write(Transition* m, DeferredWork& after) {
  Region& r = *m->region;
  const bool cut = m->cut;
  const bool dropped =
      m->status.ok() && (m->write.in_place || in_slot(*m)) && !m->write.keep && (cut || drop_written(m));
  const bool same = !m->status.ok() || !m->write.in_place || !m->write.keep || host_.isolator.still_same(m);
  Lock lock(ctx_.map.mutex());
  const Block& block = r.table[m->block];
  if (!m->status.ok() && m->write.background) {
    put_back_dirty(m, after);
    ctx_.upcalls.memory_freed(after);
    return;
  }
  if (!m->status.ok()) {
    if (m->status.code() == -EFAULT && m->write.in_place &&
        m->completion == nullptr) {  // no memory for the copy: later
      host_.failed.mark_unknown(r, m->block);
      if (m->write.reclaims) ctx_.writeback_throttle.pinned(now_ns());
    } else {
      ctx_.map.frame_table()[block.aux].unwritten = true;
      host_.writer.note_write_failure(m);
    }
    host_.writer.give_back_extent(m);
    put_back(m, after);
    ctx_.upcalls.memory_freed(after);
    return;
  }
  r.backing == Backing::file_shared ? ctx_.writeback_throttle.file_succeeded(r) : ctx_.writeback_throttle.succeeded();
  ctx_.map.progress().made();
  core::add(ctx_.counters.write_bytes, m->io.transferred);
  if (m->write.background) core::add(ctx_.counters.background_write_bytes, m->io.transferred);
  if (r.backing != Backing::file_shared) {
    // Under the lock: after it is dropped, the region may be freed and the store may end.
    if (m->write.new_extent && block.extent) ctx_.space.release(block.extent);
    r.table.set_extent(m->block, m->write.extent);
  }
  r.table.set_digest(m->block, m->digest);
  // The file has only a part of the block, or other bytes may have been written than were hashed.
  if (cut || !same || ctx_.map.frame_table()[block.aux].holed) r.table.forget_digest(m->block);
  r.table.clear(m->block, core::kDirty);
  ctx_.map.frame_table()[block.aux].unwritten = ctx_.map.frame_table()[block.aux].droppable = false;
  host_.failed.clear_unknown(r, m->block);
  if (!dropped && (m->write.keep || (!cut && (block.flags & core::kFaultPending) != 0))) {
    put_back(m, after);
  } else {
    let_go(m, after);  // let_go() reads the block back if it is wanted
  }
  ctx_.upcalls.memory_freed(after);
  host_.failed.revive_dropped();
}

// State writing_back, and the pages are in place or in a slot: drops them. Returns false if the
// block stays because a fault wants it or a page is pinned.
bool Writeback::drop_written(Transition* m) {
  Region& r = *m->region;
  {
    Lock lock(ctx_.map.mutex());
    if ((r.table[m->block].flags & core::kFaultPending) != 0) {
      m->write.keep = true;  // saves a read
      ctx_.writeback_throttle.settled(m->write.leaving);
      return false;
    }
    ctx_.map.frame_table()[r.table[m->block].aux].dropping = m->write.in_place;
  }
  if (in_slot(*m)) {
    ctx_.trap.release_frames(m->image, r.block_size).ignore();
    m->write.emptied = true;
    return true;
  }
  if (drop_one(ctx_.trap, r, m->block)) return true;
  Lock lock(ctx_.map.mutex());
  ctx_.map.frame_table()[r.table[m->block].aux].dropping = false;
  m->write.keep = true;
  ctx_.writeback_throttle.settled(m->write.leaving);
  if (m->write.reclaims) ctx_.writeback_throttle.pinned(now_ns());
  return false;
}

// State writing_back. The file ends before the block does, so the rest was not written. As in a
// mapping, those bytes are gone. The block leaves memory; otherwise a later write of the block
// would bring them to the file when it has grown again. The block stays, and counts as dirty, if
// - it is leased or lent,
// - the program has dropped a page, and may have stored to it since, or
// - a device has pinned a page, and may have stored inside the file.
void Writeback::drop_cut_off(Transition* m) {
  Region& r = *m->region;
  {
    Lock lock(ctx_.map.mutex());
    const FrameId id = r.table[m->block].aux;
    Frame& frame = ctx_.map.frame_table()[id];
    if (frame.holed || (m->write.keep && (leased(r, m->block) || frame.lent_to_kernels))) {
      stays_cut_off(m);
      return;
    }
    if (m->write.keep) {
      if (frame.admitted) ctx_.map.policy(id).unhold(id);
      ctx_.map.withdraw(id);
      m->write.keep = false;
      count_leaving(m);
    }
    frame.dropping = true;
  }
  if (m->write.in_place && !(host_.isolator.still_same(m) && drop_one(ctx_.trap, r, m->block))) {
    Lock lock(ctx_.map.mutex());
    ctx_.map.frame_table()[r.table[m->block].aux].dropping = false;
    stays_cut_off(m);
    return;
  }
  VMEM_LOG_OFTEN(core::Level::info, "the file became shorter: %zu changed bytes beyond its end are dropped, %s",
                 m->write.stored - m->io.transferred, ctx_.map.describe(r, m->block).c_str());
}

void Writeback::stays_cut_off(Transition* m) {
  if (!std::exchange(m->write.keep, true)) ctx_.writeback_throttle.settled(m->write.leaving);
}

void Writeback::keep_frame(Transition* m, DeferredWork& after) {
  Region& r = *m->region;
  const BlockIndex b = m->block;
  const FrameId id = r.table[b].aux;
  r.table.keep_staged(b);
  ctx_.map.frame_table()[id].bytes = m->image;
  ctx_.map.policy(id).unhold(id);
  if ((r.table[b].flags & core::kFaultPending) != 0) {
    ctx_.map.policy(id).touched(id);
    host_.installer.install_or_wait(r, b, after);
  }
  ctx_.map.free_transition(m);
}

void Writeback::give_buffers(Transition* m) {
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

void Writeback::let_go(Transition* m, DeferredWork& after) {
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
  ctx_.writeback_throttle.settled(m->write.leaving);
  ctx_.map.free_entry(m->block, r);
  if (r.from_file() && !block.extent) r.table.forget_digest(m->block);
  r.table.let_go(m->block);
  ctx_.metadata_charges.charge(r);
  const BlockIndex b = m->block;
  ctx_.map.free_transition(m);
  host_.page_in.settle(r, b, after);
}

// The block's pages never left. After a failure the kernel's protection may be stronger than the
// flag; the next store lifts it.
void Writeback::stay_in_place(Transition* m) {
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

void Writeback::put_back(Transition* m, DeferredWork& after) {
  Region& r = *m->region;
  const Block& block = r.table[m->block];
  ctx_.writeback_throttle.settled(m->write.leaving);
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
    if (wanted) host_.installer.install_or_wait(r, b, after);
    return;
  }
  frame.shadow = ctx_.map.nonresident_age().shadow();
  // If the trap keeps frames, the block goes back protected, so that its next store is seen.
  m->protect = m->write.background && same_in_store && r.transfer == Transfer::install &&
               ctx_.trap.caps().write_protect &&
               (block.flags & (core::kDigest | core::kStorePending)) == core::kDigest && !lent_for_writing(r, m->block);
  host_.installer.queue_install(m, after.install);
}

void Writeback::lose_taken(Transition* m) {
  Region& r = *m->region;
  const FrameId id = r.table[m->block].aux;
  ctx_.writeback_throttle.settled(m->write.leaving);
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

Transition* Writeback::hold_for_drop(Region& r, BlockIndex b) {
  const Block& block = r.table[b];
  ctx_.map.withdraw(block.aux);
  r.table.begin_isolate(b);
  return ctx_.map.new_transition(r, b);
}

void Writeback::drop_held(Region& r, BlockIndex b, DeferredWork& after) {
  Transition* m = hold_for_drop(r, b);
  const Frame& frame = ctx_.map.frame_table()[r.table[b].aux];
  m->image = frame.bytes;
  m->write.from_staged = true;
  m->in_staging = in_staging(frame.pool);
  count_leaving(m);
  let_go(m, after);
}

Status Writeback::drop_contents(Lock& lock, Region& r, BlockIndex b, DeferredWork& after) {
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
  count_leaving(m);
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
