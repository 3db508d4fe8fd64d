#include "pager/host/writeback.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "core/break.h"
#include "core/clock.h"
#include "core/guarded_read.h"
#include "core/log.h"
#include "core/step.h"
#include "pager/block/block_run.h"
#include "pager/host/drop_pages.h"

namespace vmem::pager {

// Locked on entry and on return, and not meanwhile.
void Writeback::evict_batch(Lock& lock, std::span<Transition*> batch) {
  if (batch.empty()) return lock.give_way();
  lock.unlock();
  evict_batch(batch);
  lock.lock();
}

// Unlocked; every transition is in state isolating. No more than a Batch holds.
void Writeback::evict_batch(std::span<Transition*> batch) {
  Batch writes;
  isolator_.isolate(batch, &writes);
  writer_.prepare_writes(writes.all());
  core::step("evict.decided");

  DeferredWork after;
  {
    Lock lock(map_.mutex());
    // Reclaim threads pause where they chose what they knew to be pinned, which they do when there is nothing else.
    const auto pinned = [&](const Transition* m) {
      const Frame& frame = map_.frame_table()[m->region->table[m->block].aux];
      return m->status.code() == -EBUSY && m->reclaims && m->begun_ns < frame.pinned_until_ns;
    };
    if (std::all_of(batch.begin(), batch.end(), pinned)) writes_.pinned(now_ns());
    for (Transition* m : batch) settle_taken(m, after);
    freed_.memory_freed(after);
  }
  page_in_.run(after);
}

// Locked; state isolating, or writing back (lent), and it is known what becomes of the block.
void Writeback::settle_taken(Transition* m, DeferredWork& after) {
  Region& r = *m->region;
  if (!m->keep)  // a block that stays in its place is not looked at
    found_pinned(map_.frame_table()[r.table[m->block].aux], m->status.code() == -EBUSY, now_ns());
  if (m->probe && m->status.ok()) {
    isolated_.keep_frame(m, after);
  } else if (m->torn) {
    isolated_.lose_taken(m);
  } else if (!m->status.ok() && m->background) {
    put_back_dirty(m, after);
  } else if (!m->status.ok()) {
    if (m->stored != 0) {
      map_.frame_table()[r.table[m->block].aux].unwritten = true;
      writer_.note_write_failure(m);
    } else {
      map_.frame_table()[r.table[m->block].aux].unwritten |= m->only_clean;  // not to be tried again and again
      if (m->status.code() == -EBUSY && m->completion != nullptr) {
        m->status =
            core::error(EBUSY, "%s stays in memory: I/O in flight or a registered buffer has pinned a page of it",
                        map_.where(r, m->block).c_str());
      }
      if (m->status.code() != -EBUSY && m->reclaims) writes_.pinned(now_ns());
    }
    isolated_.put_back(m, after);
  } else if (m->clean) {
    finish_clean(m, after);
  } else if (m->only_clean) {
    map_.frame_table()[r.table[m->block].aux].unwritten = true;
    isolated_.put_back(m, after);
  } else {
    if (r.table[m->block].state == State::isolating) r.table.change(m->block, State::isolating, State::writing_back);
    writer_.to_store(m, *this, after);
  }
}

// Locked; a write in the background failed, or could not begin. Nobody waits for it, and other writes do not wait for
// its file: the file is left alone for a while that grows, a pinned block for one interval.
void Writeback::put_back_dirty(Transition* m, DeferredWork& after) {
  Region& r = *m->region;
  const uint64_t now = now_ns();
  if (m->io.size != 0 && m->status.code() != -EFAULT) {
    core::add(counters_.io_errors);
    if (writes_.file_failed(r, m->status, true, now)) {  // a sync tries it again, and tells
      VMEM_LOG_OFTEN(core::Level::warning, "writing failed in the background (%s), the block stays in memory, %s",
                     vmem_strerror(m->status.code()), map_.where(r, m->block).c_str());
    }
  }
  if (m->io.size != 0) failed_.mark_unknown(r, m->block);
  map_.dirty().put_off(r.table[m->block].aux, now);
  isolated_.put_back(m, after);
}

// Locked. The store has these bytes: the memory may go, unless somebody wants the block back or it is to stay.
void Writeback::finish_clean(Transition* m, DeferredWork& after) {
  Region& r = *m->region;
  Block& block = r.table[m->block];
  const bool gone = (m->in_place && !m->keep) || m->emptied;
  if (m->zeros) {  // the store's copy, if any, is out of date: zeros need none
    failed_.forget_store_copy(r, m->block);
    block.digest = m->digest;
    block.flags |= core::kDigest;
  }
  if (m->keep || (!gone && (block.flags & core::kFaultPending) != 0)) {
    isolated_.put_back(m, after);
    return;
  }
  core::add(counters_.clean_drops);
  isolated_.let_go(m, State::isolating, after);
}

void Writeback::io_ended(Transition* m) {
  if (m->io.result != 0) m->status = Status(m->io.result, "");
  DeferredWork after;
  finish_write(m, after);
  page_in_.run(after);
}

// Unlocked; state writing back. The program has taken the right to read a page of what was written from its place: a
// copy is written, now or when its turn has come. False: there is no memory for one, or it cannot be had.
bool Writeback::write_aside(Transition* m) {
  const Region& r = *m->region;
  std::byte* copy = nullptr;
  {
    Lock lock(map_.mutex());
    copy = m->aside = r.bounces ? frames_.get_bounce(r.block_size) : frames_.get(r.block_size, 0);
    if (copy == nullptr && core::broken("spare_copy")) return false;
    if (copy == nullptr) {
      m->spare = true;
      if (!spare_.take(m)) return true;
    }
  }
  if (copy == nullptr) copy = m->aside = spare_.memory(r.block_size);
  return copy != nullptr && write_copy(m, copy);
}

// Unlocked. False: nobody may read the block.
bool Writeback::write_copy(Transition* m, std::byte* copy) {
  const Region& r = *m->region;
  if (core::read_guarded_at_once(copy, r.address(m->block), r.block_size, r.absent) != 0) return false;
  core::step("evict.aside");
  m->image = copy;
  m->digest = store::digest(copy, r.block_size);  // a page may have become a guard page since
  m->status = {};
  DeferredWork after;
  {
    Lock lock(map_.mutex());
    writer_.to_store(m, *this, after);
  }
  page_in_.run(after);
  return true;
}

// Unlocked. A transition that had the spare copy has ended; those that wait for it go on, one by one. What somebody
// wants meanwhile stays, and is written another time, unless a call waits for that.
void Writeback::pass_spare(DeferredWork& after) {
  for (;;) {
    TransitionList wanted;
    {
      Lock lock(map_.mutex());
      wanted = spare_.give_up([](const Transition& m) VMEM_LOCKED {
        return m.completion == nullptr && (m.region->table[m.block].flags & core::kFaultPending) != 0;
      });
    }
    while (!wanted.empty()) settle_write(wanted.pop(), after);
    Transition* const m = spare_.pass(map_.mutex());
    if (m == nullptr) return;
    m->aside = spare_.memory(m->region->block_size);
    if (m->aside != nullptr && write_copy(m, m->aside)) return;
    settle_write(m, after);
  }
}

// Unlocked; state writing back.
void Writeback::finish_write(Transition* m, DeferredWork& after) {
  Region& r = *m->region;
  core::step("evict.written");
  if (m->status.code() == -EFAULT && m->in_place && m->aside == nullptr && write_aside(m)) return;
  if (writer_.find_elsewhere(m)) {
    Lock lock(map_.mutex());
    writer_.to_store(m, *this, after);
    return;
  }
  m->cut = m->status.ok() && r.backing == Backing::file_shared && m->io.transferred < m->stored;
  if (m->cut) drop_cut_off(m);
  end_write(m, after);
}

// Locked on entry and on return.
void Writeback::retry_pinned(Lock& lock) {
  DeferredWork after;
  installer_.retry_pinned(lock, after);
  lock.unlock();
  page_in_.run(after);
  lock.lock();
}

// Unlocked; state writing back.
void Writeback::end_write(Transition* m, DeferredWork& after) {
  const bool spare = m->spare;
  settle_write(m, after);
  if (spare) pass_spare(after);
}

// Unlocked; state writing back.
void Writeback::settle_write(Transition* m, DeferredWork& after) {
  Region& r = *m->region;
  const bool cut = m->cut;
  const bool dropped = m->status.ok() && (m->in_place || in_slot(*m)) && !m->keep && (cut || drop_written(m));
  const bool same = !m->status.ok() || !m->in_place || !m->keep || isolator_.still_same(m);
  Lock lock(map_.mutex());
  Block& block = r.table[m->block];
  if (!m->status.ok() && m->background) {
    put_back_dirty(m, after);
    freed_.memory_freed(after);
    return;
  }
  if (!m->status.ok()) {
    if (m->status.code() == -EFAULT && m->in_place && m->completion == nullptr) {  // no room for the copy: later
      failed_.mark_unknown(r, m->block);
      if (m->reclaims) writes_.pinned(now_ns());
    } else {
      map_.frame_table()[block.aux].unwritten = true;
      writer_.note_write_failure(m);
    }
    writer_.give_back_extent(m);
    isolated_.put_back(m, after);
    freed_.memory_freed(after);
    return;
  }
  r.backing == Backing::file_shared ? writes_.file_succeeded(r) : writes_.succeeded();
  map_.progress().made();
  core::add(counters_.write_bytes, m->io.transferred);
  if (m->background) core::add(counters_.background_write_bytes, m->io.transferred);
  if (r.backing != Backing::file_shared) {
    // Under the lock: when it is let go, the region may be freed, and the store end.
    if (m->new_extent && block.extent) space_.release(block.extent);
    block.extent = m->extent;
  }
  block.digest = m->digest;
  block.flags |= core::kDigest;
  // Not all of it is there; or other bytes are than were looked at.
  if (cut || !same || map_.frame_table()[block.aux].holed) block.flags &= static_cast<uint16_t>(~core::kDigest);
  block.flags &= static_cast<uint16_t>(~core::kDirty);
  map_.frame_table()[block.aux].unwritten = map_.frame_table()[block.aux].droppable = false;
  failed_.clear_unknown(block);
  if (!dropped && (m->keep || (!cut && (block.flags & core::kFaultPending) != 0))) {
    isolated_.put_back(m, after);
  } else {
    isolated_.let_go(m, State::writing_back, after);  // wanted again meanwhile: let_go() reads it back
  }
  freed_.memory_freed(after);
  failed_.revive_dropped();
}

// Unlocked; state writing back, and its pages are in place or in a slot. False: somebody wants the block, so that it
// stays.
bool Writeback::drop_written(Transition* m) {
  Region& r = *m->region;
  {
    Lock lock(map_.mutex());
    if ((r.table[m->block].flags & core::kFaultPending) != 0) {
      m->keep = true;  // spare the read
      writes_.settled(m->leaving);
      return false;
    }
    map_.frame_table()[r.table[m->block].aux].dropping = m->in_place;
  }
  if (in_slot(*m)) {
    trap_.release_frames(m->image, r.block_size).ignore();
    m->emptied = true;
    return true;
  }
  if (drop_one(trap_, r, m->block)) return true;
  Lock lock(map_.mutex());
  map_.frame_table()[r.table[m->block].aux].dropping = false;
  m->keep = true;
  writes_.settled(m->leaving);
  if (m->reclaims) writes_.pinned(now_ns());
  return false;
}

// Unlocked; state writing back. The file ends before the block does, so the rest of it was not written. As in a mapping
// those bytes are gone: the block leaves memory, else they would reach the file with the next store to the block when
// the file has grown again. It stays, and counts as changed, for a lease, a loan, a page that the program has dropped
// and may have stored to, or a device that has pinned a page, and may have stored inside the file.
void Writeback::drop_cut_off(Transition* m) {
  Region& r = *m->region;
  {
    Lock lock(map_.mutex());
    const FrameId id = r.table[m->block].aux;
    Frame& frame = map_.frame_table()[id];
    if (frame.holed || (m->keep && (leased(r, m->block) || frame.lent_to_kernels))) {
      stays_cut_off(m);
      return;
    }
    if (m->keep) {
      if (frame.admitted) map_.policy(id).unhold(id);
      map_.withdraw(id);
      m->keep = false;
      isolated_.leaves(m);
    }
    frame.dropping = true;
  }
  if (m->in_place && !(isolator_.still_same(m) && drop_one(trap_, r, m->block))) {
    Lock lock(map_.mutex());
    map_.frame_table()[r.table[m->block].aux].dropping = false;
    stays_cut_off(m);
    return;
  }
  VMEM_LOG_OFTEN(core::Level::info, "the file became shorter: %zu changed bytes beyond its end are dropped, %s",
                 m->stored - m->io.transferred, map_.place(r, m->block).c_str());
}

void Writeback::stays_cut_off(Transition* m) {
  if (!std::exchange(m->keep, true)) writes_.settled(m->leaving);
}

}  // namespace vmem::pager
