#include "pager/write_back.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "core/break.h"
#include "core/guarded_read.h"
#include "core/log.h"
#include "core/step.h"
#include "pager/clock.h"
#include "pager/drop.h"
#include "pager/neighbours.h"

namespace vmem::pager {

using core::Block;
using core::BlockIndex;
using core::ResidentId;
using core::State;
using core::Status;
using trap::Transfer;

// Locked on entry and on return, and not meanwhile.
void WriteBack::evict_batch(Lock& lock, std::span<Move*> batch) {
  lock.unlock();
  evict_batch(batch);
  lock.lock();
}

// Unlocked; every move is in state taking. No more than a Batch holds.
void WriteBack::evict_batch(std::span<Move*> batch) {
  Batch writes;
  isolator_.isolate(batch, &writes);
  writer_.prepare_writes(writes.all());
  core::step("evict.decided");

  DeferredWork after;
  {
    Lock lock(map_.mutex());
    for (Move* m : batch) settle_taken(m, after);
    room_.came_free(after);
  }
  page_in_.run(after);
}

// Locked; state taking, or writing (lent), and it is known what becomes of the block.
void WriteBack::settle_taken(Move* m, DeferredWork& after) {
  Region& r = *m->region;
  if (m->probe && m->status.ok()) {
    r.table.change(m->block, State::taking, State::held);
    map_.residents()[r.table[m->block].aux].frame = m->image;
    map_.policy(r.table[m->block].aux).unhold(r.table[m->block].aux);
    settle_probe(r, m->block, after);
    map_.free_move(m);
  } else if (m->torn) {
    lose_taken(m);
  } else if (!m->status.ok()) {
    if (m->stored != 0) {
      writer_.note_write_failure(m);
    } else {
      writes_.pinned(now_ns());
    }
    put_back(m, after);
  } else if (m->clean) {
    finish_clean(m, after);
  } else {
    if (r.table[m->block].state == State::taking) r.table.change(m->block, State::taking, State::writing);
    writer_.to_store(m, *this, after);
  }
}

void WriteBack::settle_probe(Region& r, BlockIndex b, DeferredWork& after) {
  if ((r.table[b].flags & core::kWanted) == 0) return;
  map_.policy(r.table[b].aux).touched(r.table[b].aux);
  installer_.begin_install(r, b, after);
}

// Locked. The store has these bytes: the memory may go, unless somebody wants the block back or it is to stay.
void WriteBack::finish_clean(Move* m, DeferredWork& after) {
  Region& r = *m->region;
  Block& block = r.table[m->block];
  const bool gone = m->in_place && !m->keep;
  if (m->zeros) {  // the store's copy, if any, is out of date: zeros need none
    failed_.forget_store_copy(r, m->block);
    block.digest = m->digest;
    block.flags |= core::kDigest;
  }
  if (m->keep || (!gone && (block.flags & core::kWanted) != 0)) {
    put_back(m, after);
    return;
  }
  core::add(counters_.clean_drops);
  let_go(m, State::taking, after);
}

void WriteBack::give_buffers(Move* m) {
  const Region& r = *m->region;
  if (m->coded != nullptr) frames_.put_bounce(m->coded, r.block_size);
  if (m->aside != nullptr && r.bounces) frames_.put_bounce(m->aside, r.block_size);
  if (m->aside != nullptr && !r.bounces) frames_.put(m->aside, r.block_size);
  m->coded = m->aside = nullptr;
}

// Locked. Ends an eviction: memory back, block absent.
void WriteBack::let_go(Move* m, State from, DeferredWork& after) {
  Region& r = *m->region;
  Block& block = r.table[m->block];
  core::add(counters_.evictions);
  map_.progress().made();
  if ((block.flags & core::kReadAhead) != 0) {
    core::add(counters_.prefetch_wasted);
    r.readahead.on_waste(m->block);
  }
  block.flags &= core::kForgetReadAhead;
  block.flags &= static_cast<uint16_t>(~(core::kProtected | core::kDirty));
  give_buffers(m);
  if (m->in_place) {
    if (!core::broken("credit")) budget_.credit(r.block_size);
  } else if (m->from_held) {
    installer_.give_frame(r, m->image);
  } else {
    frames_.put(m->image, r.block_size);
  }
  writes_.settled(m->leaving);
  map_.free_resident(m->block, r);
  if (r.from_file() && !block.extent) block.flags &= static_cast<uint16_t>(~core::kDigest);
  r.table.change(m->block, from, block.extent ? State::stored : State::untouched);
  tables_.charge(r);
  const BlockIndex b = m->block;
  map_.free_move(m);
  page_in_.settle(r, b, after);
}

// Locked. Its pages never left. After a failure the kernel's protection may be stronger than the flag: the next store
// undoes it.
void WriteBack::stay_in_place(Move* m, State from) {
  Region& r = *m->region;
  Block& block = r.table[m->block];
  if (!m->in_place && r.transfer == Transfer::move) frames_.put_slot(m->image, r.block_size);
  r.table.change(m->block, from, State::resident);
  if (m->status.ok() && m->in_place && (block.flags & core::kWantedWrite) == 0 && (block.flags & core::kDigest) != 0 &&
      !lent_for_writing(r, m->block) && !map_.residents()[block.aux].holed) {
    block.flags |= core::kProtected;
  } else {
    block.flags &= static_cast<uint16_t>(~core::kProtected);
    if (m->in_place) trap_.unprotect(r.address(m->block), r.block_size).ignore();
  }
  if ((block.flags & core::kWanted) != 0) trap_.wake(r.address(m->block), r.block_size).ignore();
  block.flags &= static_cast<uint16_t>(~(core::kWanted | core::kWantedWrite));
  map_.admit(r, m->block, map_.clock().stamp());
  map_.free_move(m);
}

// Locked. The block stays in memory: wanted, synced, pinned by somebody, or its write failed.
void WriteBack::put_back(Move* m, DeferredWork& after) {
  Region& r = *m->region;
  Block& block = r.table[m->block];
  const State from = block.state;
  writes_.settled(m->leaving);
  give_buffers(m);
  Resident& resident = map_.residents()[block.aux];
  if ((m->keep || m->probe) && resident.admitted) map_.policy(block.aux).unhold(block.aux);

  if (m->in_place || (!m->status.ok() && !m->from_held && !m->out)) {
    stay_in_place(m, from);
    return;
  }
  resident.frame = m->image;
  if (resident.lent) {
    r.table.change(m->block, from, State::held);
    r.table.change(m->block, State::held, State::taking);
    map_.free_move(m);
    return;
  }
  const bool wanted = (block.flags & core::kWanted) != 0;
  if (m->from_held && (!wanted || m->staged)) {
    r.table.change(m->block, from, State::held);
    map_.admit(r, m->block, map_.clock().stamp());
    const BlockIndex b = m->block;
    map_.free_move(m);
    if (wanted) installer_.begin_install(r, b, after);
    return;
  }
  resident.stamp = map_.clock().stamp();
  m->protect = false;
  installer_.start_installing(m, from, after.install);
}

void WriteBack::io_ended(Move* m) {
  if (m->io.result != 0) m->status = Status(m->io.result, "");
  DeferredWork after;
  finish_write(m, after);
  page_in_.run(after);
}

// Unlocked; state writing. The program has taken the right to read a page of what was written from its place: a copy is
// written. False: there is no memory for one, or it cannot be had.
bool WriteBack::write_aside(Move* m) {
  Region& r = *m->region;
  std::byte* copy = nullptr;
  {
    Lock lock(map_.mutex());
    copy = m->aside = r.bounces ? frames_.get_bounce(r.block_size) : frames_.get(r.block_size, 0);
  }
  if (copy == nullptr || core::read_guarded_at_once(copy, r.address(m->block), r.block_size) != 0) return false;
  m->image = copy;
  m->status = {};
  DeferredWork after;
  {
    Lock lock(map_.mutex());
    writer_.to_store(m, *this, after);
  }
  page_in_.run(after);
  return true;
}

// Unlocked; state writing.
void WriteBack::finish_write(Move* m, DeferredWork& after) {
  Region& r = *m->region;
  core::step("evict.written");
  if (m->status.code() == -EFAULT && m->in_place && m->aside == nullptr && write_aside(m)) return;
  m->cut = m->status.ok() && r.backing == Backing::file_shared && m->io.transferred < m->stored;
  if (!m->cut || drop_cut_off(m)) end_write(m, after);
}

// Locked on entry and on return.
void WriteBack::retry_pinned(Lock& lock) {
  DeferredWork after;
  installer_.retry_pinned(lock, after);
  MoveList now, still;
  now.append(pinned_);
  lock.unlock();
  while (!now.empty()) {
    Move* const m = now.pop();
    if (drop_one(trap_, *m->region, m->block)) {
      end_write(m, after);
    } else {
      still.push_back(m);
    }
  }
  page_in_.run(after);
  lock.lock();
  pinned_.append(still);
}

// Unlocked; state writing.
void WriteBack::end_write(Move* m, DeferredWork& after) {
  Region& r = *m->region;
  const bool cut = m->cut;
  const bool dropped = m->status.ok() && m->in_place && !m->keep && (cut || drop_written(m));
  Lock lock(map_.mutex());
  Block& block = r.table[m->block];
  if (!m->status.ok()) {
    if (m->status.code() == -EFAULT && m->in_place && m->job == nullptr) {  // no room for the copy: later
      failed_.mark_unknown(r, m->block);
      writes_.pinned(now_ns());
    } else {
      writer_.note_write_failure(m);
    }
    writer_.give_back_extent(m);
    put_back(m, after);
    room_.came_free(after);
    return;
  }
  writes_.succeeded();
  map_.progress().made();
  core::add(counters_.write_bytes, m->io.transferred);
  if (r.backing != Backing::file_shared) {
    // Under the lock: when it is let go, the region may be freed, and the store end.
    if (m->new_extent && block.extent) space_.release(block.extent);
    block.extent = m->extent;
  }
  block.digest = m->digest;
  block.flags |= core::kDigest;
  // Not all of it is there; or other bytes are than were looked at.
  if (cut || map_.residents()[block.aux].holed) block.flags &= static_cast<uint16_t>(~core::kDigest);
  block.flags &= static_cast<uint16_t>(~core::kDirty);
  failed_.clear_unknown(block);
  if (!dropped && (m->keep || (!cut && (block.flags & core::kWanted) != 0))) {
    put_back(m, after);
  } else {
    let_go(m, State::writing, after);  // wanted again meanwhile: let_go() reads it back
  }
  room_.came_free(after);
  failed_.revive_dropped();
}

// Unlocked; state writing, and its pages are in place. False: somebody wants the block, so that it stays.
bool WriteBack::drop_written(Move* m) {
  Region& r = *m->region;
  {
    Lock lock(map_.mutex());
    if ((r.table[m->block].flags & core::kWanted) != 0) {
      m->keep = true;  // spare the read
      writes_.settled(m->leaving);
      return false;
    }
    map_.residents()[r.table[m->block].aux].dropping = true;
  }
  if (drop_one(trap_, r, m->block)) return true;
  Lock lock(map_.mutex());
  map_.residents()[r.table[m->block].aux].dropping = false;
  m->keep = true;
  writes_.settled(m->leaving);
  writes_.pinned(now_ns());
  return false;
}

// Unlocked; state writing. The file ends before the block does, so the rest of it was not written. As in a mapping
// those bytes are gone: the block leaves memory, else they would reach the file with the next store to the block when
// the file has grown again. Only a lease keeps it, or a loan, or a page that the program has dropped and may have
// stored to. False: a page is pinned, and the write is over when that has ended.
bool WriteBack::drop_cut_off(Move* m) {
  Region& r = *m->region;
  {
    Lock lock(map_.mutex());
    const ResidentId id = r.table[m->block].aux;
    Resident& resident = map_.residents()[id];
    if (resident.holed) {
      if (!std::exchange(m->keep, true)) writes_.settled(m->leaving);
      return true;
    }
    if (m->keep) {
      if (leased(r, m->block) || resident.lent) return true;
      if (resident.admitted) map_.policy(id).unhold(id);
      map_.withdraw(id);
      m->keep = false;
      leaves(m);
    }
    resident.dropping = true;
  }
  core::log(core::Level::warning, "the file became shorter: %zu changed bytes beyond its end are dropped, %s",
            m->stored - m->io.transferred, map_.place(r, m->block).c_str());
  if (!m->in_place || drop_one(trap_, r, m->block)) return true;
  Lock lock(map_.mutex());
  pinned_.push_back(m);
  pressure_.call_evictor();
  return false;
}

// Locked; state taking, torn.
void WriteBack::lose_taken(Move* m) {
  Region& r = *m->region;
  const core::ResidentId id = r.table[m->block].aux;
  writes_.settled(m->leaving);
  give_buffers(m);
  if ((m->keep || m->probe) && map_.residents()[id].admitted) map_.policy(id).unhold(id);
  frames_.put_slot(m->image, r.block_size);
  budget_.credit(r.block_size);
  map_.free_resident(m->block, r);
  failed_.mark_lost(r, m->block, State::taking, m->status);
  m->status = r.reason(m->block);
  if (m->job != nullptr && m->job->status.ok()) r.table[m->block].flags |= core::kTold;
  map_.free_move(m);
}

Move* WriteBack::hold_for_drop(Region& r, BlockIndex b) {
  Block& block = r.table[b];
  map_.withdraw(block.aux);
  r.table.change(b, block.state, State::taking);
  return map_.new_move(r, b);
}

void WriteBack::drop_held(Region& r, BlockIndex b, DeferredWork& after) {
  Move* m = hold_for_drop(r, b);
  const Resident& resident = map_.residents()[r.table[b].aux];
  m->image = resident.frame;
  m->from_held = true;
  m->staged = in_staging(resident.pool);
  leaves(m);
  let_go(m, State::taking, after);
}

Status WriteBack::drop_contents(Lock& lock, Region& r, BlockIndex b, DeferredWork& after) {
  if (!map_.reserve_move()) return core::error(ENOMEM, "no memory for bookkeeping");
  if (r.table[b].state == State::held) {
    failed_.forget_store_copy(r, b);
    drop_held(r, b, after);
    return {};
  }
  Move* m = hold_for_drop(r, b);
  Resident& resident = map_.residents()[r.table[b].aux];
  m->in_place = r.transfer != Transfer::install;
  resident.in_place = m->in_place;
  resident.dropping = true;
  m->image = m->in_place ? r.address(b) : resident.frame;
  leaves(m);
  lock.unlock();
  Status dropped = drop_one(trap_, r, b) ? Status() : core::error(EBUSY, "a page of the block is pinned");
  lock.lock();
  if (!dropped.ok()) {
    m->in_place = true;
    m->status = dropped;
    put_back(m, after);
    return dropped;
  }
  failed_.forget_store_copy(r, b);
  let_go(m, State::taking, after);
  return {};
}

}  // namespace vmem::pager
