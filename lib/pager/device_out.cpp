// The way out of a device.
//
//   on_device ─> leaving: hold writers, copy to a staging frame, take the block out, trap ─> held (its frame)
//                leaving, with a host copy:                  take the block out, trap ─> held (the copy's frame)
//                leaving, clean:                             take the block out, trap ─> stored, untouched
//                leaving, shown to the CPU (device_views.cpp): take the block out      ─> resident
//                leaving, synced: hold writers, copy, write, open                      ─> on_device
//                leaving, synced, newer where it is shown: copy that, write            ─> on_device
//
// A block is clean while no WRITE lease touched it and the CPU could not store to it since it came (kDirty).
#include <algorithm>
#include <array>
#include <cerrno>
#include <functional>

#include "core/at_exit.h"
#include "core/break.h"
#include "core/log.h"
#include "core/step.h"
#include "core/thread.h"
#include "pager/clock.h"
#include "pager/drop.h"
#include "pager/insist.h"
#include "pager/pager.h"

namespace vmem::pager {

using core::Block;
using core::BlockIndex;
using core::error;
using core::ResidentId;
using core::State;
using core::Status;
using core::Urgency;

namespace {

// Of those that do not stay, all of one device.
core::Few<device::Range, Batch::capacity()> gone_of(const OutPart& part) {
  core::Few<device::Range, Batch::capacity()> gone;
  for (const Move* m : part.moves) {
    if (m->leave != Leave::sync)
      gone.push_back({reinterpret_cast<uintptr_t>(m->region->address(m->block)), m->region->block_size});
  }
  return gone;
}

}  // namespace

// Locked. Claims a block on a device for the way out; the policy must not know it any more, except for a sync. nullptr:
// no staging frame for its bytes, or its accesses get SIGBUS and the trap does not take that back.
Move* Pager::begin_leave(Region& r, BlockIndex b, Leave how) {
  if (!map_.reserve_move() || !shown_.unrefuse(r, b)) return nullptr;
  Block& block = r.table[b];
  const bool dirty = !proven_clean(block);
  const bool shown = map_.residents()[block.aux].shown && how != Leave::sync;
  const bool kept = how != Leave::drop && !shown && map_.copies().has(block.aux);
  const bool copy = !shown && !kept && (how == Leave::host || how == Leave::sync || (how == Leave::evict && dirty));
  // The device has it no more as it should be written, or has it no more at all.
  const bool from_cpu =
      copy && map_.residents()[block.aux].shown && (map_.residents()[block.aux].stale || gpus_[block.device].lost);
  std::byte* frame = nullptr;
  if (kept) frame = map_.copies().hold(block.aux);
  if (copy) {
    frame = supply_.frame(r, 0);
    if (frame == nullptr) return nullptr;
  }
  Move* m = map_.new_move(r, b);
  m->image = frame;
  m->shown = shown;
  if (from_cpu) m->source = r.address(b);
  m->device = block.device;
  m->way = core::Way::from_device;
  m->leave = how;
  m->clean = !copy;
  m->kept = kept;
  m->staged = true;
  m->has_digest = (block.flags & core::kDigest) != 0 && (block.flags & core::kUnknown) == 0;
  m->elsewhere = (block.flags & core::kUnknown) != 0;
  r.table.change(b, State::on_device, State::leaving);
  Resident& resident = map_.residents()[block.aux];
  resident.in_place = from_cpu;
  if (how == Leave::sync) {
    resident.saved = core::exiting();  // will_change() takes it back, also while it is copied and written
    if (resident.admitted) map_.policy(block.aux).hold(block.aux);
  } else {
    m->was_guest = map_.guests().remove(block.aux);
    if (resident.admitted) map_.policy(block.aux).remove(block.aux);
    resident.admitted = false;
    gpus_[block.device].budget.leaves(r.block_size);
  }
  return m;
}

// The trap stands at holes again, and their parked threads with it.
void Pager::restore_trap(std::span<const device::Range> ranges) {
  if (own_page_tables()) return;  // it never went
  // Regions may lie side by side, and each has a range of the trap of its own.
  core::Few<uintptr_t, Batch::capacity()> limits;
  {
    const Lock lock(map_.mutex());
    for (const device::Range& range : ranges) {
      const Region* const region = map_.find(range.address);
      limits.push_back(reinterpret_cast<uintptr_t>(region->base) + region->span);
    }
  }
  for (size_t i = 0; i < ranges.size();) {
    size_t n = 1;
    uintptr_t end = ranges[i].address + ranges[i].size;
    while (i + n < ranges.size() && ranges[i + n].address == end && end < limits[i]) end += ranges[i + n++].size;
    Status s =
        trap_->attach_at(reinterpret_cast<void*>(ranges[i].address), end - ranges[i].address, trap::Transfer::copy);
    for (int tries = 0; !s.ok() && tries < 100; ++tries) {  // mappings may come free again
      usleep(1000);
      s = trap_->attach_at(reinterpret_cast<void*>(ranges[i].address), end - ranges[i].address, trap::Transfer::copy);
    }
    if (!s.ok()) {
      core::fatal("the trap cannot be put back where a block left its device (vm.max_map_count?): %.*s",
                  static_cast<int>(s.text().size()), s.text().data());
    }
    i += n;
  }
  devices_->settle(ranges).ignore();
}

// Unlocked. A copy of a lost device may still be ending when its ticket says that the device is lost.
Status Pager::punch(std::span<const device::Range> ranges) {
  Status s = devices_->punch(ranges);
  for (int tries = 0; s.code() == -EBUSY && tries < 1000; ++tries) {
    usleep(1000);
    s = devices_->punch(ranges);
  }
  return s;
}

// Unlocked. Nobody stores to them or sees them there any more, and their bytes are on the way.
void Pager::begin_out(OutPart& part) {
  core::Few<device::Range, Batch::capacity()> all;
  core::Few<device::Copy, Batch::capacity()> copies;
  const auto gone = gone_of(part);
  for (const Move* m : part.moves) {
    const device::Range range{reinterpret_cast<uintptr_t>(m->region->address(m->block)), m->region->block_size};
    all.push_back(range);
    if (m->image != nullptr && !m->kept && m->source == nullptr)
      copies.push_back({range.address, m->image, range.size});
  }
  for (const device::Copy& copy : copies) part.bytes += copy.size;
  core::step("device.leaving");
  part.status = devices_->hold(all.all(), device::Access::read);
  if (part.status.ok() && !gone.empty()) {
    part.status = devices_->unmap(gone.all());
    part.hidden = part.status.ok();
  }
  part.copied = part.status;
  if (part.status.ok() && !copies.empty()) {
    part.copied = devices_->copy_out(part.device, copies.all(), &part.ticket);
    core::step("device.copying_out");
  }
}

// Unlocked. Their bytes are in host memory, and the device's memory is nobody's. `unmapped`: those that stay, which the
// device has not mapped again, for keep_mapped(): others are not to wait for them.
void Pager::end_out(OutPart& part, Batch& writes, Batch& unmapped, After& after) {
  const int d = part.device;
  const auto gone = gone_of(part);
  Status& s = part.status;
  Status& copied = part.copied;
  // The copy goes on whatever a wait says, and its frame is to be somebody else's.
  if (part.ticket != nullptr && !core::broken("copy_wait")) copied = wait_for_copy(*devices_, d, part.ticket);
  part.ticket.reset();
  if (!copied.ok() && devices_->health(d).ok()) s = copied;  // they have the only copy: nothing may be destroyed
  if (s.ok() && !gone.empty()) {
    core::step("device.punching");
    s = punch(gone.all());
    if (s.ok()) {
      core::step("device.punched");
      restore_trap(gone.all());
    }
  }
  core::Few<trap::Range, Batch::capacity()> dropped;
  for (Move* m : part.moves) {
    if (m->source != nullptr) m->status = copy_shown(m);
    if (s.ok() && m->shown && m->leave == Leave::drop)
      dropped.push_back({reinterpret_cast<uintptr_t>(m->region->address(m->block)), m->region->block_size});
  }
  if (!dropped.empty()) insist_on_drop(*trap_, dropped.all());
  const bool refused = !s.ok() && !gone.empty() && devices_->health(d).ok();
  if (refused) {
    devices_->open(gone.all(), device::Access::read).ignore();  // those that were not held yet have it anyway
    part.hidden = part.hidden && !devices_->map(gone.all()).ok();
    usleep(1000);  // tried again by whoever wants room
  }
  core::step("device.left");
  const Status health = copied.ok() ? Status() : devices_->health(d);
  Lock lock(map_.mutex());
  if (!copied.ok()) gpus_.saw_loss(d, health);
  if (copied.ok()) {
    gpus_[static_cast<size_t>(d)].out_bytes += part.bytes;
    core::add(counters_.device_to_host_bytes, part.bytes);
  }
  for (Move* m : part.moves) {
    if (m->leave == Leave::sync) {
      if (m->source == nullptr) m->status = m->kept ? s : copied;
      writes.push_back(m);
    } else if (refused && part.hidden) {
      m->status = s;
      unmapped.push_back(m);
    } else if (refused) {
      undo_leaving(m, s);
    } else {
      settle_left(m, copied, !s.ok(), after);
    }
  }
  came_free(after);
}

// Unlocked; state leaving, their status says why they stay. A lease that they get, or have, is worth nothing to a
// kernel that does not find them.
void Pager::keep_mapped(Batch& unmapped, After& after) {
  for (Move* m : unmapped) {
    const device::Range range{reinterpret_cast<uintptr_t>(m->region->address(m->block)), m->region->block_size};
    insist(*devices_, m->device, "mapping a block that stays", [&] { return devices_->map({&range, 1}); }).ignore();
    Lock lock(map_.mutex());
    undo_leaving(m, Status(m->status));
    came_free(after);
  }
  unmapped.clear();
}

// Locked on entry and on return, and not meanwhile.
void Pager::leave_batch(Lock& lock, std::span<Move*> batch) {
  lock.unlock();
  leave_batch(batch);
  lock.lock();
}

// Unlocked; every move is in state leaving, of one device each or several. No more than a Batch holds.
void Pager::leave_batch(std::span<Move*> batch) {
  std::sort(batch.begin(), batch.end(), [](const Move* a, const Move* b) {
    return a->device != b->device   ? a->device < b->device
           : a->region != b->region ? a->region->id < b->region->id
                                    : a->block < b->block;
  });
  Batch writes, unmapped;
  After after;
  core::Few<OutPart, Batch::capacity()> parts;
  for (size_t i = 0; i < batch.size();) {
    // With page tables of their own each block is a part: the next is unmapped while one is copied, and one is given
    // back while the next are copied. Managed blocks go together: the driver destroys none beside a copy without a
    // wait.
    size_t n = 1;
    while (!own_page_tables() && i + n < batch.size() && batch[i + n]->device == batch[i]->device) ++n;
    parts.push_back({.moves = batch.subspan(i, n), .device = batch[i]->device});
    begin_out(parts.back());
    i += n;
  }
  size_t ended = 0;
  const auto finish = [&] {
    for (; ended < parts.size(); ++ended) end_out(parts[ended], writes, unmapped, after);
    keep_mapped(unmapped, after);
    // Those that stay are written while they are held.
    Batch changed;
    for (Move* m : writes) {
      if (!m->status.ok()) continue;
      m->digest = store::digest(m->image, m->region->block_size);
      m->clean = m->has_digest && m->digest == m->region->table[m->block].digest;
      if (!m->clean) changed.push_back(m);
    }
    writer_.prepare_writes(changed.all());
    for (Move* m : writes) {
      if (!m->status.ok() || m->clean) {
        finish_device_write(m, after);
        continue;
      }
      Lock lock(map_.mutex());
      writer_.to_store(m, *this, after);
    }
    page_in_.run(after);
  };
  // core::broken("signals_in_copies"), in wait_in_call(): for that this file is compiled again.
  for (; ended < parts.size() && wait_in_call(*devices_, parts[ended].ticket); ++ended)
    end_out(parts[ended], writes, unmapped, after);
  // A signal's handler may want what is on its way: another thread ends it meanwhile.
  if (ended == parts.size() || !core::run_aside(std::ref(finish))) finish();
}

// Locked; state leaving. `lost`: the addresses are nobody's any more.
void Pager::settle_left(Move* m, const Status& copied, bool lost, After& after) {
  Region& r = *m->region;
  const BlockIndex b = m->block;
  Block& block = r.table[b];
  Gpu& g = gpus_[static_cast<size_t>(m->device)];
  g.budget.left(r.block_size);
  const bool dirty = !proven_clean(block) && m->leave != Leave::drop && !m->shown;
  shown_.forget(r, b);
  if (m->shown && m->leave == Leave::drop) budget_.credit(r.block_size);
  lost = lost && !own_page_tables();  // the trap stands there still
  if (lost) {
    m->status = error(EIO, "the addresses of %s went with device %d", map_.where(r, b).c_str(), m->device);
  } else if (dirty && !m->kept) {
    m->status = copied;
  }
  if (map_.residents()[block.aux].hinted && m->leave == Leave::evict) core::add(counters_.prefetch_wasted);
  block.flags &= static_cast<uint16_t>(~(core::kReadAhead | core::kPrefetched));
  if (lost) r.lost = true;
  if (dirty && !m->kept && !copied.ok()) {
    map_.free_resident(b, r);
    if (m->image != nullptr) staging_.of(r).frames.put(m->image);
    core::log(core::Level::error, "%.*s: the contents are lost, %s", static_cast<int>(copied.text().size()),
              copied.text().data(), map_.where(r, b).c_str());
    failed_.mark_lost(r, b, State::leaving, copied);
    m->status = error(EIO, "%.*s: the contents are lost, %s", static_cast<int>(copied.text().size()),
                      copied.text().data(), map_.where(r, b).c_str());
    if (m->job != nullptr && m->job->status.ok()) block.flags |= core::kTold;
    map_.free_move(m);
    return;
  }
  if (m->shown && m->leave != Leave::drop) {  // what is in place is the block now
    map_.free_resident(b, r);
    ++g.evictions;
    map_.new_resident(r, b, nullptr);
    map_.residents()[block.aux].stamp = map_.clock().stamp();
    r.table.change(b, State::leaving, State::resident);
    block.flags &= static_cast<uint16_t>(~(core::kDirty | core::kProtected | core::kWanted | core::kWantedWrite));
    trap_->unprotect(r.address(b), r.block_size).ignore();
    map_.admit(r, b, map_.clock().stamp());
  } else if (m->kept) {
    ++g.evictions;
    ++g.clean_drops;
    core::add(counters_.clean_drops);
    const ResidentId id = map_.copies().become(block.aux);
    map_.free_resident(b, r);
    map_.residents()[id].stamp = map_.clock().stamp();
    block.aux = id;
    map_.match_hold(r, b);
    r.table.change(b, State::leaving, State::held);
  } else if (m->image != nullptr && copied.ok()) {
    map_.free_resident(b, r);
    ++g.evictions;
    const core::ResidentId id = map_.new_resident(r, b, m->image, staging_pool(r));
    map_.residents()[id].stamp = map_.clock().stamp();
    r.table.change(b, State::leaving, State::held);
    map_.admit(r, b, map_.clock().stamp());
  } else {
    map_.free_resident(b, r);
    if (m->image != nullptr) staging_.of(r).frames.put(m->image);
    ++g.evictions;
    ++g.clean_drops;
    core::add(counters_.clean_drops);
    block.flags &= static_cast<uint16_t>(~core::kDirty);
    if (m->leave == Leave::drop) failed_.forget_store_copy(r, b);  // older still: nobody may be given it
    if (r.from_file() && !block.extent) block.flags &= static_cast<uint16_t>(~core::kDigest);
    r.table.change(b, State::leaving, block.extent ? State::stored : State::untouched);
  }
  map_.free_move(m);
  if (!r.lost) page_in_.settle(r, b, after);
}

// Locked; state leaving. The device would not let go of it, and nothing has changed: it stays there.
void Pager::undo_leaving(Move* m, const Status& why) {
  Region& r = *m->region;
  Gpu& g = gpus_[static_cast<size_t>(m->device)];
  g.budget.stays(r.block_size);
  g.failure = why;
  ++g.failures;
  if (m->kept) {
    map_.copies().unhold(r.table[m->block].aux);
  } else if (m->image != nullptr) {
    staging_.of(r).frames.put(m->image);
  }
  m->status = core::error(-why.code(), "%.*s: it stays on its device, %s", static_cast<int>(why.text().size()),
                          why.text().data(), map_.where(r, m->block).c_str());
  blocks_.stays(r, m->block, m);
  blocks_.know_again(*m);
  map_.free_move(m);
}

// Unlocked; state leaving, held on its device, and now written, or not.
void Pager::finish_device_write(Move* m, After& after) {
  Region& r = *m->region;
  const device::Range range{reinterpret_cast<uintptr_t>(r.address(m->block)), r.block_size};
  core::step("device.written");
  // Open before the books say that it stays: a store that asks meanwhile waits for them (on_touch).
  const Status opened = devices_->open({&range, 1}, device::Access::read);
  core::step("device.opened");
  const bool cut = m->status.ok() && !m->clean && r.backing == Backing::file_shared && m->io.transferred < m->stored;
  if (cut) {
    core::log(core::Level::warning, "the file became shorter: %zu changed bytes beyond its end were not written, %s",
              m->stored - m->io.transferred, map_.place(r, m->block).c_str());
  }
  Lock lock(map_.mutex());
  Block& block = r.table[m->block];
  if (m->coded != nullptr) frames_.put_bounce(m->coded, r.block_size);
  m->coded = nullptr;
  if (!m->status.ok() && m->stored == 0) {
    m->status = error(-m->status.code(), "%.*s: not written, %s", static_cast<int>(m->status.text().size()),
                      m->status.text().data(), map_.where(r, m->block).c_str());
  }
  if (m->status.ok()) {
    if (!m->clean) {
      core::add(counters_.write_bytes, cut ? m->io.transferred : m->stored);
      if (r.backing != Backing::file_shared) {
        // Under the lock, as finish_write() has it.
        if (m->new_extent && block.extent) space_->release(block.extent);
        block.extent = m->extent;
      }
      block.digest = m->digest;
      block.flags |= core::kDigest;
      if (cut) block.flags &= static_cast<uint16_t>(~core::kDigest);  // not all of it is there
      failed_.clear_unknown(block);
    }
    // Under a lease for writing the device may have stored more since, and the CPU to what it is shown.
    if (!cut && !lent_for_writing(r, m->block) && !map_.residents()[block.aux].stale)
      block.flags &= static_cast<uint16_t>(~core::kDirty);
  } else if (m->stored != 0) {
    writer_.note_write_failure(m);
    writer_.give_back_extent(m);
  }
  if (!m->status.ok() || cut) map_.residents()[block.aux].saved = false;
  if (m->kept) {
    map_.copies().unhold(block.aux);
  } else if (m->image != nullptr) {
    staging_.of(r).frames.put(m->image);
  }
  if (!opened.ok() && m->status.ok()) m->status = opened;
  blocks_.stays(r, m->block);
  const core::ResidentId id = block.aux;
  if (map_.residents()[id].admitted) map_.policy(id).unhold(id);
  map_.free_move(m);
  came_free(after);
}

// Locked. A few blocks of the oldest hint that asks blocks away from a device.
bool Pager::serve_departure(Lock& lock) {
  if (!queues_.departures.empty()) releases_.reap(lock);
  while (!queues_.departures.empty()) {
    Departure& it = queues_.departures.front();
    Region& r = *it.region;
    Batch batch;
    std::optional<SpanOf> on;
    BlockIndex b = r.table.next_touched(it.next);
    for (; b <= it.last && b < r.blocks && batch.size() < staging_.of(r).frames.batch();
         b = r.table.next_touched(b + 1)) {
      if (comes_to_device(map_.residents(), r.table[b])) break;  // not there yet
      if (r.table[b].state != State::on_device || leased(r, b)) continue;
      Move* m = begin_leave(r, b, it.to_ssd ? Leave::evict : Leave::host);
      if (m == nullptr) break;
      batch.push_back(m);
    }
    it.next = b;
    if (batch.empty() && b <= it.last && b < r.blocks) return false;  // tried again when something has moved
    if (b > it.last || b >= r.blocks) {
      if (it.to_ssd) on = SpanOf{&r, it.first, it.last};
      queues_.departures.pop_front();
    }
    ++r.in_flight;
    leave_batch(lock, batch.all());
    // What is in staging frames now goes on.
    if (on && !r.dying && !evict_requests_.full() && evict_requests_.add(*on, false)) pressure_.call_evictor();
    --r.in_flight;
    map_.notify();
    return true;
  }
  return false;
}

// Locked. Why a block cannot leave its device: nothing went on for the whole time-out.
Status Pager::cannot_leave(const Region& r, BlockIndex b) {
  if (const Resident& resident = map_.residents()[r.table[b].aux]; resident.refused || resident.apart) {
    return error(EIO, "accesses of a block get SIGBUS, and for %u ms the trap has not taken that back, %s",
                 config_.fault_timeout_ms, map_.where(r, b).c_str());
  }
  Status why = writes_.take_error();
  if (!why.ok()) return why;
  return error(ENOMEM, "no staging frame came free for %u ms: of host_budget %s, %s are staging frames",
               config_.fault_timeout_ms, core::human_bytes(budget_.limit()).c_str(),
               core::human_bytes(budget_.charged(Use::staging)).c_str());
}

// Locked; on a device. At exit: its file got it, and then its context went, which ended what it was leased for.
bool Pager::went_with_its_context(const Region& r, BlockIndex b) {
  const Resident& resident = map_.residents()[r.table[b].aux];
  return core::exiting() && gpus_[r.table[b].device].lost && !resident.shown && resident.saved;
}

// Brings the blocks of a range away from their devices (host, evict), or writes what is dirty there (sync). Returns
// when it is done. Leased blocks (sync: those under WRITE) are skipped, unless `all`.
Status Pager::leave_range(Lock& lock, Region& r, BlockIndex first, BlockIndex last, Leave how, Sweep* sweep) {
  Job job;
  Batch batch;
  // With page tables of their own, and nothing to be written, a block is on its way as soon as it is met: the next is
  // unmapped while it is copied, and the oldest is ended when enough are under way.
  const bool one_by_one = own_page_tables() && how != Leave::sync;
  std::array<Move*, kDeviceBatch> moves = {};
  std::array<OutPart, kDeviceBatch> parts;
  size_t oldest = 0, under_way = 0;
  Batch unmapped;
  const auto keep = [&] {
    After after;
    keep_mapped(unmapped, after);
    page_in_.run(after);
  };
  const auto end_one = [&] {
    if (unmapped.full()) keep();
    Batch writes;
    After after;
    end_out(parts[oldest % parts.size()], writes, unmapped, after);
    page_in_.run(after);
    ++oldest, --under_way;
  };
  const auto end_all = [&] {
    while (under_way != 0) end_one();
    if (!unmapped.empty()) keep();
  };
  const auto end_oldest = [&]() VMEM_LOCKED {
    lock.unlock();
    if (wait_in_call(*devices_, parts[oldest % parts.size()].ticket) || !core::run_aside(std::ref(end_all))) end_one();
    lock.lock();
  };
  const auto begin = [&](Move* m) VMEM_LOCKED {
    const size_t i = (oldest + under_way++) % parts.size();
    moves[i] = m;
    parts[i] = {.moves = {&moves[i], 1}, .device = m->device};
    lock.unlock();
    begin_out(parts[i]);
    lock.lock();
  };
  const auto flush = [&]() VMEM_LOCKED {
    while (under_way != 0) end_oldest();
    if (batch.empty() && unmapped.empty()) return;
    lock.unlock();
    if (!unmapped.empty()) keep();
    if (!batch.empty()) leave_batch(batch.all());
    lock.lock();
    batch.clear();
  };
  // Where a device is lost, what host memory has of its blocks is written.
  for (size_t d = 0; how == Leave::sync && d < gpus_.size(); ++d) {
    if (gpus_[d].budget.charged() == 0 || gpus_[d].lost) continue;
    lock.unlock();
    const Status health = devices_->health(static_cast<int>(d));
    lock.lock();
    gpus_.saw_loss(static_cast<int>(d), health);
  }
  uint64_t mark = Progress::kNone;
  Status starved;
  for (BlockIndex b = r.table.next_touched(first); b <= last && b < r.blocks;) {
    const State state = r.table[b].state;
    if (state == State::leaving || comes_to_device(map_.residents(), r.table[b])) {
      flush();
      if (!map_.wait_stable(lock, r, b, sweep)) break;
      if (core::in_transition(r.table[b].state)) b = r.table.next_touched(b + 1);
      continue;
    }
    core::add(counters_.swept_blocks);
    const bool busy = how == Leave::sync ? lent_for_writing(r, b) : leased(r, b);
    if (how == Leave::sync && state == State::on_device && sweep->nobody_asks() && went_with_its_context(r, b)) {
      b = r.table.next_touched(b + 1);
      continue;
    }
    if (state != State::on_device || (busy && !sweep->all) ||
        (how == Leave::sync && (proven_clean(r.table[b]) || !r.writable()))) {
      if (state == State::on_device && busy && !sweep->all) sweep->skipped = true;
      b = r.table.next_touched(b + 1);
      continue;
    }
    if (sweep->wait != Sweep::Wait::always && awaits_writes(r, b)) {
      sweep->leave(b);
      if (sweep->wait == Sweep::Wait::never) {
        b = r.table.next_touched(b + 1);
        continue;
      }
    }
    if (one_by_one && under_way == std::min(staging_.of(r).frames.batch(), parts.size())) {
      end_oldest();  // before the next is claimed: signals may come in
      continue;
    }
    // What cannot be copied from a device that is lost cannot stay there either: it gets its mark.
    const bool on_lost = how == Leave::sync && gpus_[r.table[b].device].lost && !leased(r, b);
    // .. nor what is stale there and nobody leases. What is leased a kernel may use: it stays, and the CPU's is
    // written.
    const bool goes = on_lost || (how == Leave::sync && map_.residents()[r.table[b].aux].stale && !leased(r, b));
    Move* m = begin_leave(r, b, goes ? Leave::evict : how);
    if (m == nullptr) {
      flush();
      if (mark == Progress::kNone) mark = progress_clock_.look(now_ns());
      if (progress_clock_.hopeless(mark)) {
        starved = cannot_leave(r, b);
        break;
      }
      lock.sleep_for(map_.changed(), std::chrono::milliseconds(20));
      continue;
    }
    mark = Progress::kNone;
    m->job = &job;
    ++job.outstanding;
    b = r.table.next_touched(b + 1);
    if (one_by_one) {
      begin(m);
      continue;
    }
    batch.push_back(m);
    if (batch.size() >= staging_.of(r).frames.batch()) flush();
  }
  flush();
  while (job.outstanding != 0) lock.sleep(map_.changed());
  return job.status.ok() ? starved : job.status;
}

}  // namespace vmem::pager
