#include "pager/host/installer.h"

#include <cerrno>

#include "core/clock.h"
#include "core/log.h"
#include "core/step.h"
#include "pager/block/block_run.h"
#include "pager/host/drop_pages.h"
#include "pager/host/host_tier.h"

namespace vmem::pager {

Installer::Installer(PagerContext& ctx, HostTier& host) : ctx_(ctx), host_(host) {}

void Installer::queue_install(Transition* m, TransitionList& install) {
  Region& r = *m->region;
  r.table.begin_install(m->block);
  ctx_.map.frame_table()[r.table[m->block].aux].holed = false;
  host_.failed.goes_in_place(r, m->block);
  const FrameId id = r.table[m->block].aux;
  m->pinned_in_policy = ctx_.map.frame_table()[id].admitted;
  if (m->pinned_in_policy) ctx_.map.policy(id).hold(id);
  install.push_back(m);
}

bool Installer::install_or_wait(Region& r, BlockIndex b, DeferredWork& after) {
  if (r.lost) return true;  // the region's device is lost
  if (try_install(r, b, after)) return true;
  r.table.mark(b, core::kFaultPending);
  return host_.waits.starve_fault(r, b);
}

bool Installer::try_install(Region& r, BlockIndex b, DeferredWork& after, const MemoryWaiter* waited) {
  if (!ctx_.map.reserve_transition()) return false;
  const Block& block = r.table[b];
  const bool staged = in_staging(ctx_.map.frame_table()[block.aux].pool);
  // The bytes are in two places for a moment.
  if (staged && !ctx_.budget.charge(r.block_size, 0)) return false;
  Transition* m = ctx_.map.new_transition(r, b);
  m->since_ns = waited != nullptr ? waited->since_ns : now_ns();
  m->mark = waited != nullptr ? waited->mark : ctx_.deadline.look(m->begun_ns);
  m->image = ctx_.map.frame_table()[block.aux].bytes;
  m->in_staging = staged;
  m->io.size = 0;
  m->protect = r.transfer == Transfer::copy && r.writable() && (block.flags & core::kStorePending) == 0 &&
               (block.flags & core::kDigest) != 0 && (block.flags & core::kDirty) == 0;
  queue_install(m, after.install);
  return true;
}

void Installer::give_frame(Region& r, std::byte* image) {
  if (r.gpu && ctx_.staging.of(r.block_size).frames.owns(image)) {
    ctx_.staging.of(r.block_size).frames.put(image);
  } else if (r.transfer == Transfer::copy) {
    ctx_.frames.put_bounce(image, r.block_size);
    ctx_.budget.credit(r.block_size);
  } else {
    ctx_.frames.put(image, r.block_size);
  }
}

void Installer::install(TransitionList& transitions, DeferredWork& after) {
  const Batch run = take_run(transitions);
  const auto fill = [&](const Transition& first, size_t blocks) {
    const Region& r = *first.region;
    core::step("install.before");
    Status s = in_slot(first) ? ctx_.trap.put_back(r.address(first.block), r.block_size, first.image)
                              : ctx_.trap.fill(r.address(first.block), blocks * r.block_size, first.image, r.transfer,
                                               first.protect ? trap::Protect::yes : trap::Protect::no);
    core::step("install.after");
    return s;
  };
  const Status all = fill(*run[0], run.size());
  // Retry blocks one by one, so that one failure does not affect the others. After a call that
  // stopped half way it is not known which are whole.
  const bool alone = run.size() > 1 && !all.ok() && all.code() != -ENOTRECOVERABLE;
  for (Transition* m : run) installed(m, alone ? fill(*m, 1) : all, after);
}

// State mapping; the trap refused the block, which is staged again.
void Installer::refused(Transition* m, const Status& s, DeferredWork& after) {
  Region& r = *m->region;
  if (m->in_staging && (s.code() == -ENOMEM || s.code() == -EDQUOT)) {
    // The trap had no memory for its own copy: other blocks leave, as for any frame.
    r.table.abandon_install(m->block);
    ctx_.budget.credit(r.block_size);
    ctx_.map.admit(r, m->block, 0);
    host_.pressure.hold_back_after_refusal(s);
    r.table.mark(m->block, core::kFaultPending);
    host_.waits.starve_fault(r, m->block, m->since_ns, m->mark);
    ctx_.map.free_transition(m);
    ctx_.upcalls.memory_freed(after);
    return;
  }
  // The frame still has the bytes: nothing is lost, and the access waits for the next try.
  r.table.abandon_install(m->block);
  if (m->in_staging) ctx_.budget.credit(r.block_size);
  ctx_.map.admit(r, m->block, 0);
  r.table.answer_faults(m->block);
  m->status = s;
  host_.failed.answer_later(r, m->block, s);
  ctx_.map.free_transition(m);
}

// Goes on after fill(). s: the result for the block, or for all that were put in place with it.
void Installer::installed(Transition* m, const Status& s, DeferredWork& after) {
  const Region& r = *m->region;
  if (s.ok() && r.transfer == Transfer::copy) core::add(ctx_.counters.copied_bytes, r.block_size);
  const bool in_the_way = half_way(s) || s.code() == -EEXIST;
  m->torn = in_the_way && torn_by_fill(m, s);
  if (m->torn) drop_torn(ctx_.trap, r, m->block);
  if (in_the_way && !m->torn && !drop_one(ctx_.trap, r, m->block)) {
    Lock lock(ctx_.map.mutex());
    m->status = s;
    pinned_.push_back(m);
    host_.pressure.wake_reclaim();
    return;
  }
  settle_installed(m, s, after);
}

void Installer::retry_pinned(Lock& lock, DeferredWork& after) {
  TransitionList now, still;
  now.append(pinned_);
  lock.unlock();
  while (!now.empty()) {
    Transition* const m = now.pop();
    if (!drop_one(ctx_.trap, *m->region, m->block)) {
      still.push_back(m);
      continue;
    }
    const Status s = std::exchange(m->status, {});
    settle_installed(m, s, after);
  }
  lock.lock();
  pinned_.append(still);
}

// Ends the transition. After a failure no page of the block is in place any more.
void Installer::settle_installed(Transition* m, const Status& s, DeferredWork& after) {
  Region& r = *m->region;
  std::byte* const at = r.address(m->block);
  const bool torn = m->torn;
  // If pages were in place for a moment, threads that were not parked may have stored to them. The
  // trap has taken these stores back into the frame.
  const bool changed = !s.ok() && !torn && !m->protect && r.writable() && r.transfer == Transfer::copy &&
                       !(store::digest(m->image, r.block_size) == r.table[m->block].digest);
  Lock lock(ctx_.map.mutex());
  const Block& block = r.table[m->block];
  if (changed) {
    r.table.forget_digest(m->block);
    if (r.gpu) r.table.mark(m->block, core::kDirty);
  }
  if (m->pinned_in_policy) ctx_.map.policy(block.aux).unhold(block.aux);
  if (torn) {
    lose_filled(m, s);
    ctx_.upcalls.memory_freed(after);
    return;
  }
  if (!s.ok()) {
    refused(m, s, after);
    return;
  }
  Frame& frame = ctx_.map.frame_table()[block.aux];
  if (r.transfer == Transfer::move) {
    ctx_.frames.put_slot(m->image, r.block_size);
    frame.bytes = nullptr;
  } else if (m->in_staging) {  // from now on a block like any other in host memory
    ctx_.staging.of(r.block_size).frames.put(m->image);
    frame.bytes = nullptr;
    ctx_.map.withdraw(block.aux);
    frame.pool = kHostPool;
    r.table.clear(m->block, core::kDirty);
  } else if (r.transfer == Transfer::copy) {
    ctx_.frames.put_bounce(m->image, r.block_size);
    frame.bytes = nullptr;
  }
  r.table.end_install(m->block);
  r.table.clear(m->block, core::kProtected);
  frame.proven = m->protect;
  if (m->protect) {
    // A store may have met the protection between fill() and this lock. It was noted as a request,
    // and no other code answers it.
    const bool stores = (block.flags & core::kStorePending) != 0;
    const bool stays = !stores || ctx_.trap.unprotect(at, r.block_size).code() == -EPERM;
    if (stays) r.table.mark(m->block, core::kProtected);
    if (stays && stores) ctx_.trap.wake(at, r.block_size).ignore();
  }
  if ((block.flags & core::kProtected) == 0) ctx_.map.note_dirty(r, m->block);
  if (frame.holed) ctx_.trap.wake(at, r.block_size).ignore();
  r.table.answer_faults(m->block);
  ctx_.map.admit(r, m->block, frame.shadow);
  if (m->read.started_ns != 0) ctx_.counters.fault_took(now_ns() - m->read.started_ns);
  ctx_.map.free_transition(m);
  ctx_.upcalls.memory_freed(after);
}

// After a fill() that stopped half way, or found a page in its way. Returns true if the block's
// bytes are lost, false if the frame still has all of them.
bool Installer::torn_by_fill(const Transition* m, const Status& why) {
  const Region& r = *m->region;
  const core::Block& block = r.table[m->block];
  // If the block was copied and no store has to be kept, the frame still has all bytes.
  const bool whole = r.transfer == trap::Transfer::copy && (m->protect || !r.writable());
  bool torn = half_way(why) && !whole;
  if (!torn && r.transfer == trap::Transfer::move) {
    // A page was in the way: one of the frame's own that was moved already, or a foreign one. The
    // digest tells.
    torn = (block.flags & core::kDigest) == 0 || !(store::digest(m->image, r.block_size) == block.digest);
  }
  if (torn) {
    VMEM_LOG_OFTEN(core::Level::error, "%.*s: the contents are lost, %s", static_cast<int>(why.text().size()),
                   why.text().data(), ctx_.map.describe(r, m->block).c_str());
    core::settle_log();
  }
  return torn;
}

// State mapping, after torn_by_fill() has returned true.
void Installer::lose_filled(Transition* m, const Status& why) {
  Region& r = *m->region;
  ctx_.map.free_entry(m->block, r);
  if (m->in_staging) {
    ctx_.staging.of(r.block_size).frames.put(m->image);
    ctx_.budget.credit(r.block_size);
  } else {
    give_frame(r, m->image);
  }
  host_.failed.mark_lost(r, m->block, why);
  m->status = r.reason(m->block);
  ctx_.map.free_transition(m);
}

}  // namespace vmem::pager
