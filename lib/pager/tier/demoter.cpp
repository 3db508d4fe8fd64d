#include "pager/tier/demoter.h"

#include <algorithm>
#include <cerrno>
#include <functional>

#include "core/break.h"
#include "core/log.h"
#include "core/process/at_exit.h"
#include "core/step.h"
#include "core/thread.h"
#include "pager/host/drop_pages.h"
#include "pager/tier/device_tier.h"
#include "pager/tier/retry.h"

namespace vmem::pager {

namespace {

// Returns the address ranges of the blocks that leave the device.
core::InplaceVector<device::Range, Batch::capacity()> gone_of(const OutPart& part) {
  core::InplaceVector<device::Range, Batch::capacity()> gone;
  for (const Transition* m : part.transitions) {
    if (m->move.leave != Leave::sync)
      gone.push_back({reinterpret_cast<uintptr_t>(m->region->address(m->block)), m->region->block_size});
  }
  return gone;
}

}  // namespace

Demoter::Demoter(PagerContext& ctx, DeviceTier& tier) : ctx_(ctx), host_(tier.host), tier_(tier) {}

Transition* Demoter::begin(Region& r, BlockIndex b, Leave how) {
  if (!ctx_.map.reserve_transition() || !ctx_.cpu_mappings.unrefuse(r, b)) return nullptr;
  const Block& block = r.table[b];
  const bool dirty = !proven_clean(block);
  const bool shown = ctx_.map.frame_table()[block.aux].dev.cpu_mapped && how != Leave::sync;
  const bool kept = how != Leave::drop && !shown && ctx_.map.copies().has(block.aux);
  const bool copy = !shown && !kept && (how == Leave::host || how == Leave::sync || (how == Leave::evict && dirty));
  // The shown copy is newer than the device's, or the device is lost.
  const bool from_cpu = copy && ctx_.map.frame_table()[block.aux].dev.cpu_mapped &&
                        (ctx_.map.frame_table()[block.aux].dev.stale || ctx_.device_set[block.device].lost);
  std::byte* bytes = nullptr;
  if (kept) bytes = ctx_.map.copies().hold(block.aux);
  if (copy) {
    bytes = tier_.staging_allocator.frame(r, 0);
    if (bytes == nullptr) return nullptr;
  }
  Transition* m = ctx_.map.new_transition(r, b);
  m->image = bytes;
  m->move.cpu_mapped = shown;
  if (from_cpu) m->move.source = r.address(b);
  m->device = block.device;
  m->way = core::Way::from_device;
  m->move.leave = how;
  m->write.clean = !copy;
  m->move.kept = kept;
  m->in_staging = true;
  m->write.has_digest = (block.flags & core::kDigest) != 0 && (block.flags & core::kUnknown) == 0;
  m->write.elsewhere = (block.flags & core::kUnknown) != 0;
  r.table.begin_demote(b);
  Frame& frame = ctx_.map.frame_table()[block.aux];
  frame.in_place = from_cpu;
  if (how == Leave::sync) {
    frame.dev.saved = core::exiting();  // will_change() clears it, also during the copy and the write
    if (frame.admitted) ctx_.map.policy(block.aux).hold(block.aux);
  } else {
    m->move.was_spilled = ctx_.map.spilled().remove(block.aux);
    if (frame.admitted) ctx_.map.policy(block.aux).remove(block.aux);
    frame.admitted = false;
    ctx_.device_set[block.device].budget.count_leaving(r.block_size);
  }
  return m;
}

void Demoter::begin_part(OutPart& part) {
  core::InplaceVector<device::Range, Batch::capacity()> all;
  core::InplaceVector<device::Copy, Batch::capacity()> copies;
  const auto gone = gone_of(part);
  for (const Transition* m : part.transitions) {
    const device::Range range{reinterpret_cast<uintptr_t>(m->region->address(m->block)), m->region->block_size};
    all.push_back(range);
    if (m->image != nullptr && !m->move.kept && m->move.source == nullptr)
      copies.push_back({range.address, m->image, range.size});
  }
  for (const device::Copy& copy : copies) part.bytes += copy.size;
  core::step("device.leaving");
  part.status = ctx_.devices->write_protect(all.all(), device::Access::read);
  if (part.status.ok() && !gone.empty()) {
    part.status = ctx_.devices->unmap(gone.all());
    part.hidden = part.status.ok();
  }
  part.copied = part.status;
  if (part.status.ok() && !copies.empty()) {
    part.copied = ctx_.devices->copy_out(part.device, copies.all(), &part.ticket);
    core::step("device.copying_out");
  }
}

// State demoting. Copies the bytes that the CPU is shown, to be written.
Status Demoter::copy_shown(Transition* m) {
  Region& r = *m->region;
  Status s = ctx_.trap.protect(m->move.source, r.block_size);
  core::step("device.copying_shown");
  if (s.ok() && copy_protected(r, m->image, m->move.source) != 0)
    s = core::error(EFAULT, "pages of the CPU's copy are unreadable");
  if (s.ok()) {
    core::add(ctx_.counters.copied_bytes, r.block_size);
  }
  Lock lock(ctx_.map.mutex());
  Frame& frame = ctx_.map.frame_table()[r.table[m->block].aux];
  frame.in_place = false;
  if (frame.dev.stale) ctx_.trap.unprotect(m->move.source, r.block_size).ignore();  // stores continue during the write
  return s;
}

void Demoter::end_part(OutPart& part, Batch& writes, Batch& unmapped, DeferredWork& after) {
  const int d = part.device;
  const auto gone = gone_of(part);
  Status& s = part.status;
  Status& copied = part.copied;
  // Wait: the copy continues whatever the status, and its frame is about to be reused.
  if (part.ticket != nullptr && !core::broken("copy_wait")) copied = wait_for_copy(*ctx_.devices, d, part.ticket);
  part.ticket.reset();
  if (!copied.ok() && ctx_.devices->health(d).ok()) s = copied;  // the device has the only copy: destroy nothing
  if (s.ok() && !gone.empty()) {
    core::step("device.punching");
    s = tier_.managed_holes.punch(gone.all());
    if (s.ok()) {
      core::step("device.punched");
      tier_.managed_holes.restore_trap(gone.all());
    }
  }
  const bool well = s.ok() || ctx_.devices->health(d).ok();
  // The device was lost after it refused. A block that stays made could not be made on another
  // device.
  if (!well && ctx_.device_set.own_page_tables() && !gone.empty()) {
    s = ctx_.devices->unmap(gone.all());
    if (s.ok()) s = tier_.managed_holes.punch(gone.all());
  }
  core::InplaceVector<trap::Range, Batch::capacity()> dropped;
  for (Transition* m : part.transitions) {
    if (m->move.source != nullptr) m->status = copy_shown(m);
    if (s.ok() && m->move.cpu_mapped && m->move.leave == Leave::drop)
      dropped.push_back({reinterpret_cast<uintptr_t>(m->region->address(m->block)), m->region->block_size});
  }
  if (!dropped.empty()) drop_until_unpinned(ctx_.trap, dropped.all());
  const bool refused = !s.ok() && !gone.empty() && well;
  if (refused) {
    ctx_.devices->open(gone.all(), device::Access::read).ignore();  // the others are open anyway
    part.hidden = part.hidden && !ctx_.devices->map(gone.all()).ok();
    usleep(1000);  // the caller that needs room tries again
  }
  core::step("device.left");
  const Status health = copied.ok() ? Status() : ctx_.devices->health(d);
  Lock lock(ctx_.map.mutex());
  if (!copied.ok()) ctx_.device_set.saw_loss(d, health);
  if (copied.ok()) {
    ctx_.device_set[static_cast<size_t>(d)].out_bytes += part.bytes;
    core::add(ctx_.counters.device_to_host_bytes, part.bytes);
  }
  for (Transition* m : part.transitions) {
    if (m->move.leave == Leave::sync) {
      if (m->move.source == nullptr) m->status = m->move.kept ? s : copied;
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
  ctx_.upcalls.memory_freed(after);
}

// State demoting; each status says why the block stays. Map the blocks before they are at rest: a
// kernel with a lease must find them.
void Demoter::keep_mapped(Batch& unmapped, DeferredWork& after) {
  for (Transition* m : unmapped) {
    const device::Range range{reinterpret_cast<uintptr_t>(m->region->address(m->block)), m->region->block_size};
    retry_until_done(*ctx_.devices, m->device, "mapping a block that stays", [&] {
      return ctx_.devices->map({&range, 1});
    }).ignore();
    Lock lock(ctx_.map.mutex());
    undo_leaving(m, Status(m->status));
    ctx_.upcalls.memory_freed(after);
  }
  unmapped.clear();
}

void Demoter::run(Lock& lock, std::span<Transition*> batch) {
  lock.unlock();
  run(batch);
  lock.lock();
}

void Demoter::run(std::span<Transition*> batch) {
  std::sort(batch.begin(), batch.end(), [](const Transition* a, const Transition* b) {
    return a->device != b->device   ? a->device < b->device
           : a->region != b->region ? a->region->id < b->region->id
                                    : a->block < b->block;
  });
  Batch writes, unmapped;
  DeferredWork after;
  core::InplaceVector<OutPart, Batch::capacity()> parts;
  for (size_t i = 0; i < batch.size();) {
    // With own page tables each block is a part: the next block is unmapped while one is copied,
    // and one is freed while the next are copied. Managed blocks go together: the driver destroys
    // none beside a copy without a wait.
    size_t n = 1;
    while (!ctx_.device_set.own_page_tables() && i + n < batch.size() && batch[i + n]->device == batch[i]->device) ++n;
    parts.push_back({.transitions = batch.subspan(i, n), .device = batch[i]->device});
    begin_part(parts.back());
    i += n;
  }
  size_t ended = 0;
  const auto finish = [&] {
    for (; ended < parts.size(); ++ended) end_part(parts[ended], writes, unmapped, after);
    keep_mapped(unmapped, after);
    write(writes.all(), after);
    host_.page_in.run(after);
  };
  // For core::broken("signals_in_copies") in wait_in_call(): a build with it recompiles this file.
  for (; ended < parts.size() && wait_in_call(*ctx_.devices, parts[ended].ticket); ++ended)
    end_part(parts[ended], writes, unmapped, after);
  // A signal handler may need these blocks: another thread ends their copies while it runs.
  if (ended == parts.size() || !core::run_aside(std::ref(finish))) finish();
}

// State demoting. `lost`: the addresses are not ours any more.
void Demoter::settle_left(Transition* m, const Status& copied, bool lost, DeferredWork& after) {
  Region& r = *m->region;
  const BlockIndex b = m->block;
  const Block& block = r.table[b];
  ctx_.device_set[static_cast<size_t>(m->device)].budget.left(r.block_size);
  const bool dirty = !proven_clean(block) && m->move.leave != Leave::drop && !m->move.cpu_mapped;
  ctx_.cpu_mappings.forget(r, b);
  if (m->move.cpu_mapped && m->move.leave == Leave::drop) ctx_.budget.credit(r.block_size);
  lost = lost && !ctx_.device_set.own_page_tables();  // the trap is still in place there
  if (lost) {
    m->status =
        error(EIO, "the addresses of %s were lost with device %d", ctx_.map.describe_locked(r, b).c_str(), m->device);
  } else if (dirty && !m->move.kept) {
    m->status = copied;
  }
  if (ctx_.map.frame_table()[block.aux].dev.hinted && m->move.leave == Leave::evict)
    core::add(ctx_.counters.prefetch_wasted);
  r.table.clear(b, core::kReadAhead | core::kPrefetched);
  if (lost) r.lost = true;
  if (dirty && !m->move.kept && !copied.ok()) {
    lose_left(m, copied);
    ctx_.map.free_transition(m);
    return;
  }
  rest_in_host(m, copied.ok());
  ctx_.map.free_transition(m);
  if (!r.lost) host_.page_in.settle(r, b, after);
}

// The only copy of the block was on a lost device.
void Demoter::lose_left(Transition* m, const Status& why) {
  Region& r = *m->region;
  const BlockIndex b = m->block;
  ctx_.map.free_entry(b, r);
  if (m->image != nullptr) ctx_.staging.of(r.block_size).frames.put(m->image);
  VMEM_LOG_OFTEN(core::Level::error, "%.*s: the contents are lost, %s", static_cast<int>(why.text().size()),
                 why.text().data(), ctx_.map.describe_locked(r, b).c_str());
  host_.failed.mark_lost(r, b, why);
  m->status = error(EIO, "%.*s: the contents are lost, %s", static_cast<int>(why.text().size()), why.text().data(),
                    ctx_.map.describe_locked(r, b).c_str());
  if (m->completion != nullptr && m->completion->status.ok()) r.table.mark(b, core::kTold);
}

// Makes the host copy, in place or in a frame, the block; otherwise the store has the block, or its
// contents are dropped.
void Demoter::rest_in_host(Transition* m, bool copied) {
  Region& r = *m->region;
  const BlockIndex b = m->block;
  const Block& block = r.table[b];
  DeviceState& g = ctx_.device_set[static_cast<size_t>(m->device)];
  if (m->move.cpu_mapped && m->move.leave != Leave::drop) {  // the pages in place become the block
    ctx_.map.free_entry(b, r);
    ++g.evictions;
    ctx_.map.new_entry(r, b, nullptr);
    ctx_.map.frame_table()[block.aux].shadow = ctx_.map.nonresident_age().shadow();
    r.table.end_demote_in_place(b);
    r.table.clear(b, core::kDirty | core::kProtected | core::kFaultPending | core::kStorePending);
    ctx_.trap.unprotect(r.address(b), r.block_size).ignore();
    ctx_.map.note_dirty(r, b);
    ctx_.map.admit(r, b, ctx_.map.nonresident_age().shadow());
  } else if (m->move.kept) {
    ++g.evictions;
    ++g.clean_drops;
    core::add(ctx_.counters.clean_drops);
    const FrameId id = ctx_.map.copies().become(block.aux);
    ctx_.map.free_entry(b, r);
    ctx_.map.frame_table()[id].shadow = ctx_.map.nonresident_age().shadow();
    r.table.set_aux(b, id);
    ctx_.map.match_hold(r, b);
    r.table.end_demote_staged(b);
    if (!proven_clean(block)) ctx_.map.note_dirty(r, b);
  } else if (m->image != nullptr && copied) {
    ctx_.map.free_entry(b, r);
    ++g.evictions;
    const core::FrameId id = ctx_.map.new_entry(r, b, m->image, staging_pool(r));
    ctx_.map.frame_table()[id].shadow = ctx_.map.nonresident_age().shadow();
    r.table.end_demote_staged(b);
    if (!proven_clean(block)) ctx_.map.note_dirty(r, b);
    ctx_.map.admit(r, b, ctx_.map.nonresident_age().shadow());
  } else {
    ctx_.map.free_entry(b, r);
    if (m->image != nullptr) ctx_.staging.of(r.block_size).frames.put(m->image);
    ++g.evictions;
    ++g.clean_drops;
    core::add(ctx_.counters.clean_drops);
    r.table.clear(b, core::kDirty);
    if (m->move.leave == Leave::drop)
      host_.failed.forget_store_copy(r, b);  // an older version, which must not be read again
    if (r.from_file() && !block.extent) r.table.forget_digest(b);
    r.table.end_demote(b);
  }
}

// State demoting. The device did not release the block; nothing has changed, and the block stays
// there.
void Demoter::undo_leaving(Transition* m, const Status& why) {
  Region& r = *m->region;
  DeviceState& g = ctx_.device_set[static_cast<size_t>(m->device)];
  g.budget.stays(r.block_size);
  g.failure = why;
  ++g.failures;
  give_back_frame(m);
  m->status = core::error(-why.code(), "%.*s: it stays on its device, %s", static_cast<int>(why.text().size()),
                          why.text().data(), ctx_.map.describe_locked(r, m->block).c_str());
  tier_.blocks.stays(r, m->block, m);
  ctx_.map.frame_table()[r.table[m->block].aux].could_not_leave = true;
  tier_.blocks.know_again(*m);
  ctx_.map.free_transition(m);
}

void Demoter::write(std::span<Transition* const> transitions, DeferredWork& after) {
  Batch changed;
  for (Transition* m : transitions) {
    if (!m->status.ok()) continue;
    m->digest = store::digest(m->image, m->region->block_size);
    m->write.clean = m->write.has_digest && m->digest == m->region->table[m->block].digest;
    if (!m->write.clean) changed.push_back(m);
  }
  host_.writer.prepare_writes(changed.all());
  for (Transition* m : transitions) {
    if (!m->status.ok() || m->write.clean) {
      finish_write(m, after);
      continue;
    }
    Lock lock(ctx_.map.mutex());
    host_.writer.to_store(m, *this, after);
  }
}

void Demoter::io_ended(Transition* m) {
  DeferredWork after;
  if (m->io.result != 0) m->status = Status(m->io.result, "");
  finish_write(m, after);
  host_.page_in.run(after);
}

void Demoter::give_back_frame(Transition* m) {
  Region& r = *m->region;
  if (m->move.kept) {
    ctx_.map.copies().unhold(r.table[m->block].aux);
  } else if (m->image != nullptr) {
    ctx_.staging.of(r.block_size).frames.put(m->image);
  }
}

// Notes a successful write. cut: only a part of the block was written.
void Demoter::note_written(Transition* m, bool cut) {
  Region& r = *m->region;
  const Block& block = r.table[m->block];
  if (!m->write.clean) {
    core::add(ctx_.counters.write_bytes, cut ? m->io.transferred : m->write.stored);
    if (r.backing != Backing::file_shared) {
      // Under the lock, as in finish_write().
      if (m->write.new_extent && block.extent) ctx_.space.release(block.extent);
      r.table.set_extent(m->block, m->write.extent);
    }
    r.table.set_digest(m->block, m->digest);
    if (cut) r.table.forget_digest(m->block);  // only a part is in the file
    host_.failed.clear_unknown(r, m->block);
    ctx_.map.frame_table()[block.aux].droppable = false;
    if (r.backing == Backing::file_shared) ctx_.writeback_throttle.file_succeeded(r);
  }
  // Under a lease for writing the device may have stored more since; so may the CPU to a shown
  // copy.
  if (!cut && !lent_for_writing(r, m->block) && !ctx_.map.frame_table()[block.aux].dev.stale)
    r.table.clear(m->block, core::kDirty);
}

// State demoting, write-protected on its device; the write has ended or there was none.
void Demoter::finish_write(Transition* m, DeferredWork& after) {
  Region& r = *m->region;
  const device::Range range{reinterpret_cast<uintptr_t>(r.address(m->block)), r.block_size};
  core::step("device.written");
  if (host_.writer.find_elsewhere(m)) {
    Lock lock(ctx_.map.mutex());
    host_.writer.to_store(m, *this, after);
    return;
  }
  // Open before the state says that the block stays: a store that traps before that waits for the
  // state (on_touch).
  const Status opened = ctx_.devices->open({&range, 1}, device::Access::read);
  core::step("device.opened");
  const bool cut =
      m->status.ok() && !m->write.clean && r.backing == Backing::file_shared && m->io.transferred < m->write.stored;
  if (cut) {
    VMEM_LOG_OFTEN(core::Level::info, "the file became shorter: %zu changed bytes beyond its end were not written, %s",
                   m->write.stored - m->io.transferred, ctx_.map.describe(r, m->block).c_str());
  }
  Lock lock(ctx_.map.mutex());
  const Block& block = r.table[m->block];
  if (m->coded != nullptr) ctx_.frames.put_bounce(m->coded, r.block_size);
  m->coded = nullptr;
  if (!m->status.ok() && m->write.stored == 0) {
    m->status = error(-m->status.code(), "%.*s: not written, %s", static_cast<int>(m->status.text().size()),
                      m->status.text().data(), ctx_.map.describe_locked(r, m->block).c_str());
  }
  if (m->status.ok()) {
    note_written(m, cut);
  } else if (m->write.stored != 0) {
    host_.writer.note_write_failure(m);
    host_.writer.give_back_extent(m);
  }
  if (!m->status.ok() || cut) ctx_.map.frame_table()[block.aux].dev.saved = false;
  give_back_frame(m);
  if (!opened.ok() && m->status.ok()) m->status = opened;
  tier_.blocks.stays(r, m->block);
  const core::FrameId id = block.aux;
  if (ctx_.map.frame_table()[id].admitted) ctx_.map.policy(id).unhold(id);
  ctx_.map.free_transition(m);
  ctx_.upcalls.memory_freed(after);
}

}  // namespace vmem::pager
