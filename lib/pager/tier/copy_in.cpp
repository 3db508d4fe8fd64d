#include "pager/tier/copy_in.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/fatal.h"
#include "core/fault_server.h"
#include "core/log.h"
#include "core/process/guarded_read.h"
#include "core/process/unwatched_reads.h"
#include "core/step.h"
#include "pager/block/block_run.h"
#include "pager/host/drop_pages.h"
#include "pager/tier/device_tier.h"
#include "pager/tier/retry.h"

namespace vmem::pager {

CopyIn::CopyIn(PagerContext& ctx, DeviceTier& tier) : ctx_(ctx), host_(tier.host), tier_(tier) {}

int copy_protected(const Region& r, std::byte* to, const std::byte* from) {
  if (r.guarded || !may_load(core::MappingQuery(), r, from, r.block_size)) {
    return core::read_guarded(to, from, r.block_size, r.absent);
  }
  core::may_wait_for_a_fault("a block is copied from its place");
  const core::UnwatchedReads unwatched;
  memcpy(to, from, r.block_size);
  return 0;
}

void CopyIn::run(Batch& batch, int d) {
  pull(batch, d);
  if (batch.empty()) return;
  InBatch in{.transitions = batch, .device = d};
  begin_in(in);
  if (in.status.ok()) {
    Lock lock(ctx_.map.mutex());
    note_issued(in);
  }
  end_in(in);
}

// Copies blocks from ordinary host memory to their staging frames. A block that cannot be copied
// stays where it is and leaves the batch.
void CopyIn::pull(Batch& batch, int d) {
  core::InplaceVector<trap::Range, Batch::capacity()> drops;
  for (Transition* m : batch) {
    if (m->move.source != nullptr) copy_aside(m);
  }
  core::step("device.pulled");
  {
    Lock lock(ctx_.map.mutex());
    for (Transition* m : batch) {
      if (m->move.source == nullptr || !m->status.ok() || m->write.out) continue;
      Frame& frame = ctx_.map.frame_table()[m->region->table[m->block].aux];
      if (frame.holed) {  // the program may have stored to it since the copy
        m->status = core::error(EBUSY, "the program dropped a page of the block meanwhile");
        continue;
      }
      frame.dropping = true;
      if (m->move.source == m->region->address(m->block))
        drops.push_back({reinterpret_cast<uintptr_t>(m->move.source), m->region->block_size});
    }
  }
  if (!drops.empty() && !drop_pages(ctx_.trap, drops.all())) {
    for (Transition* m : batch) {
      if (m->move.source == nullptr || !m->status.ok() || m->write.out ||
          m->move.source != m->region->address(m->block))
        continue;
      if (!drop_one(ctx_.trap, *m->region, m->block)) m->status = core::error(EBUSY, "a page of the block is pinned");
    }
  }
  DeferredWork after;
  {
    Lock lock(ctx_.map.mutex());
    for (Transition* m : batch) {
      if (m->move.source != nullptr) pulled(m, d);
    }
    batch.erase_if([&](Transition* m) {
      lock.hold();
      const bool failed = !m->status.ok();
      if (failed) ctx_.map.free_transition(m);
      return failed;
    });
    ctx_.upcalls.memory_freed(after);
  }
  host_.page_in.run(after);
}

// State isolating if the block is in place. m->status says whether the staging frame has the bytes.
void CopyIn::copy_aside(Transition* m) {
  Region& r = *m->region;
  if (m->move.source == r.address(m->block)) {
    core::step("device.taking");
    m->status = ctx_.trap.caps().pins == trap::Pins::taken_away ? take_aside(m)
                                                                : ctx_.trap.protect(m->move.source, r.block_size);
    if (!m->status.ok()) return;
    if (!m->write.out && copy_protected(r, m->image, m->move.source) != 0) {
      m->status = core::error(EFAULT, "pages of the block are unreadable: it stays in host memory");
      return;
    }
  } else {
    memcpy(m->image, m->move.source, r.block_size);
  }
  core::add(ctx_.counters.copied_bytes, r.block_size);
}

// State isolating. A driver that pinned a page could store to it after the copy in spite of the
// write protection, so the pages are taken away first. On error they are in place.
Status CopyIn::take_aside(Transition* m) {
  Region& r = *m->region;
  std::byte* slot = nullptr;
  {
    Lock lock(ctx_.map.mutex());
    slot = ctx_.frames.get_slot(r.block_size);
    ctx_.map.frame_table()[r.table[m->block].aux].in_place = false;
  }
  if (slot == nullptr) return core::error(ENOMEM, "no address space for the image of a block");
  Status s = ctx_.trap.take(m->move.source, r.block_size, slot, trap::Transfer::copy);
  m->write.out = s.ok();
  if (m->write.out) memcpy(m->image, slot, r.block_size);
  if (m->write.out || half_way(s)) ctx_.trap.release_frames(slot, r.block_size).ignore();
  if (half_way(s)) {
    VMEM_LOG_OFTEN(core::Level::error, "%.*s: the contents are lost, %s", static_cast<int>(s.text().size()),
                   s.text().data(), ctx_.map.describe(r, m->block).c_str());
    drop_torn(ctx_.trap, r, m->block);
  }
  Lock lock(ctx_.map.mutex());
  ctx_.frames.put_slot(slot, r.block_size);
  return s;
}

// State isolating. Some of the block's pages could not be put back in place.
void CopyIn::lose_taken(Transition* m) {
  Region& r = *m->region;
  ctx_.map.free_entry(m->block, r);
  ctx_.budget.credit(r.block_size);
  host_.failed.mark_lost(r, m->block, m->status);
}

// Ends copy_aside(): only the staging frame has the bytes now or, on failure, the block stays where
// it is.
void CopyIn::pulled(Transition* m, int d) {
  Region& r = *m->region;
  DeviceState& g = ctx_.device_set[static_cast<size_t>(d)];
  const Block& block = r.table[m->block];
  Frame& frame = ctx_.map.frame_table()[block.aux];
  if (!m->status.ok()) {
    g.budget.credit(r.block_size);
    g.failure = m->status;
    ++g.failures;
    ctx_.staging.of(r.block_size).frames.put(m->image);
    if (half_way(m->status)) return lose_taken(m);
    r.table.clear(m->block, core::kProtected | core::kDirty | core::kFaultPending | core::kStorePending);
    frame.promoted = false;
    r.table.keep_in_place(m->block);
    ctx_.trap.unprotect(r.address(m->block), r.block_size).ignore();
    ctx_.map.note_dirty(r, m->block);
    ctx_.map.admit(r, m->block, ctx_.map.nonresident_age().shadow());
    return;
  }
  if (m->move.source != r.address(m->block)) {
    ctx_.frames.put_bounce(m->move.source, r.block_size);
  } else {
    ctx_.map.note_clean(r, m->block);
    r.table.begin_promote(m->block, d);
    frame.pool = static_cast<uint8_t>(kDevicePools + d);
  }
  ctx_.budget.credit(r.block_size);
  r.table.clear(m->block, core::kProtected);
  frame.in_place = frame.dropping = frame.promoted = false;
  frame.bytes = nullptr;
  m->move.source = nullptr;
}

// Makes the blocks on their device and issues the copies.
void CopyIn::begin_in(InBatch& in) {
  const Batch& batch = in.transitions;
  const int d = in.device;
  core::InplaceVector<device::Range, Batch::capacity()> all, to_make;
  core::InplaceVector<device::Copy, Batch::capacity()> frames;
  size_t smallest = SIZE_MAX;
  for (const Transition* m : batch) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(m->region->address(m->block));
    const size_t size = m->region->block_size, copied = m->move.parts.copied;
    all.push_back({at, size});
    if (!m->move.parts.made) to_make.push_back({at, size});
    // populate() clears a managed block. Elsewhere a copy of zeros clears it, so that map() need
    // not wait for the device.
    if (m->image == nullptr && !ctx_.device_set.own_page_tables()) continue;
    frames.push_back({at + copied, m->image == nullptr ? nullptr : m->image + copied, size - copied, copied != 0,
                      m->move.parts.ticket});
    smallest = std::min(smallest, size);
  }
  const std::span<const device::Range> ranges = all.all();
  const std::span<const device::Copy> copies = frames.all();
  core::step("device.preparing");
  Status& s = in.status;
  if (!to_make.empty()) s = ctx_.devices->populate(to_make.all(), d, &in.torn);
  if (s.code() == -device::kIntruder)
    core::fatal("a block was touched while it was made on device %d: %.*s", d, static_cast<int>(s.text().size()),
                s.text().data());
  in.made = s.ok();
  if (!in.made) {
    for (Transition* m : batch)
      if (m->move.parts.made) tier_.pipelined_copy.give_back(m);
    return;
  }
  // Wake threads that faulted before populate() replaced the trap: they retry, and park in the
  // device's fault handler.
  for (const device::Range& range : ranges)
    if (!ctx_.device_set.own_page_tables()) ctx_.trap.wake(reinterpret_cast<void*>(range.address), range.size).ignore();
  core::step("device.prepared");
  const bool ahead = !copies.empty() && ctx_.devices->maps_ahead(d, smallest);
  if (ahead) s = ctx_.devices->map_ahead(ranges);
  if (s.ok() && !copies.empty()) s = ctx_.devices->copy_in(d, copies, &in.ticket);
  if (s.ok() && !ahead) s = ctx_.devices->map(ranges);
  for (Transition* m : batch) {
    // Otherwise in.ticket covers the copies of the parts, too.
    if (m->move.parts.ticket != nullptr && in.ticket == nullptr)
      wait_for_copy(*ctx_.devices, d, m->move.parts.ticket).ignore();
    m->move.parts.ticket.reset();
  }
}

// Lets acquires of the blocks return: their streams wait for the copies.
void CopyIn::note_issued(const InBatch& in) {
  uint64_t copied = 0;
  for (Transition* m : in.transitions) {
    Frame& frame = ctx_.map.frame_table()[m->region->table[m->block].aux];
    frame.dev.issued = true;
    ++m->region->counts.issued;
    frame.dev.ticket = in.ticket;
    if (m->image != nullptr) copied += m->region->block_size;
  }
  ctx_.device_set[static_cast<size_t>(in.device)].in_bytes += copied;
  core::add(ctx_.counters.host_to_device_bytes, copied);
  ctx_.map.notify();
}

// Ends the batch: each block is on the device or back where it was.
void CopyIn::end_in(InBatch& in) {
  open(in);
  const int d = in.device;
  const Status& s = in.status;
  const bool over_trap = !ctx_.device_set.own_page_tables();
  core::step("device.entered");
  DeferredWork after;
  const Status health = s.ok() ? Status() : ctx_.devices->health(d);
  const bool full = !in.made && s.code() == -ENOMEM;
  const uint64_t kept = full ? ctx_.device_set.kept(d) : 0;
  Lock lock(ctx_.map.mutex());
  if (!s.ok()) ctx_.device_set.saw_loss(d, health);  // before undo() changes the tables
  if (!over_trap) ctx_.device_set[static_cast<size_t>(d)].budget.set_keeps(true);
  for (Transition* m : in.transitions) {
    if (!s.ok()) {
      undo(m, s, !over_trap || !in.made || in.torn, after);
      continue;
    }
    arrived(m);
    ctx_.map.free_transition(m);
  }
  if (full) ctx_.device_set.follow_down(d, kept);
  if (!ctx_.queues.demotion_requests.empty()) ctx_.device_set.work().notify_one();
  ctx_.upcalls.memory_freed(after);
  lock.unlock();
  host_.page_in.run(after);
}

// Opens the blocks for reading by the CPU when their copies have ended. On failure unmaps the
// blocks and punches holes in their place.
void CopyIn::open(InBatch& in) {
  const int d = in.device;
  Status& s = in.status;
  core::InplaceVector<device::Range, Batch::capacity()> made_of;
  for (const Transition* m : in.transitions)
    made_of.push_back({reinterpret_cast<uintptr_t>(m->region->address(m->block)), m->region->block_size});
  const std::span<const device::Range> ranges = made_of.all();
  if (s.ok()) core::step("device.issued");
  if (in.ticket != nullptr) {
    // Wait even after another error: a kernel may have the blocks, and their frames are about to be
    // reused.
    const Status copied = wait_for_copy(*ctx_.devices, d, in.ticket);
    if (s.ok()) s = copied;
  }
  if (s.ok()) {
    s = ctx_.devices->open(ranges, device::Access::read);
    if (!s.ok() && ctx_.devices->health(d).ok()) {
      core::fatal("blocks on device %d cannot be opened for the CPU, which waits for them: %.*s", d,
                  static_cast<int>(s.text().size()), s.text().data());
    }
  }
  if (!s.ok() && in.made) {
    const Status hidden =
        retry_until_done(*ctx_.devices, d, "unmapping a block", [&] { return ctx_.devices->unmap(ranges); });
    const auto give_up = [&] { return tier_.managed_holes.punch(ranges); };
    // A block that stays made could not be made again. If the trap is gone from its addresses,
    // those are lost.
    if (hidden.ok())
      in.torn = (ctx_.device_set.own_page_tables() ? retry_until_done(*ctx_.devices, d, "giving a block up", give_up)
                                                   : give_up())
                    .ok();
  }
  if (in.torn) tier_.managed_holes.restore_trap(ranges);
}

// State promoting.
void CopyIn::arrived(Transition* m) {
  Region& r = *m->region;
  const Block& block = r.table[m->block];
  Frame& frame = ctx_.map.frame_table()[block.aux];
  frame.dev.issued = false;
  --r.counts.issued;
  frame.dev.ticket.reset();
  frame.bytes = nullptr;
  const uint32_t shadow = frame.shadow;
  r.table.end_promote(m->block);
  ++r.counts.arrived;
  if (!ctx_.device_set.own_page_tables()) r.table.answer_faults(m->block);  // begin_in() woke them
  if (frame.dev.hinted) r.table.mark(m->block, core::kReadAhead | core::kPrefetched);
  if (m->image != nullptr && !tier_.staging_allocator.keep_copy(r, m->block, m->image))
    ctx_.staging.of(r.block_size).frames.put(m->image);
  ctx_.map.admit(r, m->block, shadow);
  tier_.blocks.answer(r, m->block);
}

// State promoting. `trapped`: the trap is in place (again). The staging frame still has the bytes,
// unless a kernel may have changed them since.
void CopyIn::undo(Transition* m, const Status& why, bool trapped, DeferredWork& after) {
  Region& r = *m->region;
  const BlockIndex b = m->block;
  const Block& block = r.table[b];
  DeviceState& g = ctx_.device_set[static_cast<size_t>(m->device)];
  g.budget.credit(r.block_size);
  g.failure = why;
  ++g.failures;
  m->status = why;
  Frame& frame = ctx_.map.frame_table()[block.aux];
  const bool lent = frame.dev.issued && frame.dev.changed;
  r.counts.issued -= frame.dev.issued ? 1 : 0;
  frame.dev.issued = false;
  frame.dev.ticket.reset();
  if (!trapped) r.lost = true;
  if (lent) {
    if (m->image != nullptr) ctx_.staging.of(r.block_size).frames.put(m->image);
    ctx_.map.free_entry(b, r);
    host_.failed.mark_lost(r, b, why);
    ctx_.map.free_transition(m);
    return;
  }
  if (m->image == nullptr) {
    ctx_.map.free_entry(b, r);
    r.table.abandon_promote(b);
  } else {
    frame.bytes = m->image;
    frame.pool = staging_pool(r);
    r.table.abandon_promote_staged(b);
    if (!proven_clean(block)) ctx_.map.note_dirty(r, b);
    ctx_.map.admit(r, b, ctx_.map.nonresident_age().shadow());
  }
  ctx_.map.free_transition(m);
  if (!r.lost) host_.page_in.settle(r, b, after);
}

Batch CopyIn::take_ready(std::span<const BlockSpan> spans, int d) {
  Batch mine;
  uint64_t bytes = 0;
  core::OwnVector<Transition*>& ready = ctx_.device_set[static_cast<size_t>(d)].ready;
  const auto rest = std::remove_if(ready.begin(), ready.end(), [&](Transition* m) {
    const size_t size = m->region->block_size;
    const bool is_mine = m->move.source == nullptr && !mine.full() &&
                         (mine.size() < 2 || bytes + size <= kBatchBytes) &&
                         std::any_of(spans.begin(), spans.end(), [&](const BlockSpan& s) {
                           return s.region == m->region && s.first <= m->block && m->block <= s.last;
                         });
    if (is_mine) mine.push_back(m);
    bytes += is_mine ? size : 0;
    return is_mine;
  });
  ready.erase(rest, ready.end());
  std::sort(mine.begin(), mine.end(), address_order);
  return mine;
}

void CopyIn::begin(const Batch& batch, int d) {
  InBatch in{.transitions = batch, .device = d};
  begin_in(in);
  if (!in.status.ok()) return end_in(in);
  Lock lock(ctx_.map.mutex());
  note_issued(in);
  for (Transition* m : in.transitions) ctx_.device_set[static_cast<size_t>(d)].issued.push_back(m);
  ctx_.device_set.work().notify_one();
}

bool CopyIn::end_issued(Lock& lock, int d) {
  TransitionList& issued = ctx_.device_set[static_cast<size_t>(d)].issued;
  if (issued.empty()) return false;
  const auto ticket_of = [&](const Transition* m) VMEM_LOCKED -> const device::Ticket& {
    return ctx_.map.frame_table()[m->region->table[m->block].aux].dev.ticket;
  };
  {
    InBatch in{.device = d, .ticket = ticket_of(issued.head), .made = true};
    while (!issued.empty() && !in.transitions.full() && ticket_of(issued.head) == in.ticket)
      in.transitions.push_back(issued.pop());
    lock.unlock();
    end_in(in);
  }
  lock.lock();
  return true;
}

}  // namespace vmem::pager
