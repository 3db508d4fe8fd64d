// How much is kept free, frames that the machine refuses or wants back, and the knobs of its administrator.
#include <algorithm>

#include "core/log.h"
#include "core/step.h"
#include "pager/clock.h"
#include "pager/pager.h"

namespace vmem::pager {

using core::State;
using core::Status;
using core::Urgency;

namespace {

constexpr uint16_t kForgetReadAhead = static_cast<uint16_t>(~(core::kReadAhead | core::kMarker | core::kPrefetched));

}  // namespace

// Unlocked; the owner of a fill. Gives its frame memory where it has none yet. False: there is none, the block is
// absent again, whoever faulted on it waits for memory, and the move is over.
bool Pager::populate(Move* m, After& after) {
  if (!m->fresh) return true;
  Region& r = *m->region;
  core::step("fill.populate");
  const Status s = frames_.populate(m->image, r.block_size);
  if (s.ok()) return true;
  Lock lock(mutex_);
  core::Block& block = r.table[m->block];
  const core::BlockIndex b = m->block;
  if (m->coded != nullptr) frames_.put_bounce(m->coded, r.block_size);
  queues_.speculation.ended(*m);
  frames_.put_fresh(m->image, r.block_size);
  map_.free_resident(b, r);
  block.flags &= kForgetReadAhead;
  r.table.change(b, State::filling, block.extent ? State::stored : State::untouched);
  pressure_.hold_back_after_refusal(s);
  if ((block.flags & core::kWanted) != 0) waits_.starve_fault(r, b, m->started_ns, m->mark);
  m->status = {};  // who waits for the block looks again
  map_.free_move(m);
  pump(after);
  return false;
}

// Locked; an evictor with nothing to do. Frames that were kept for another region, and that none has asked for in time,
// go back to the system, a few at a time.
void Pager::wait_for_work(Lock& lock) {
  const uint64_t now = now_ns();
  const uint64_t next = std::min(failed_.retries().next_ns(), pressure_.next_ns());
  if (next == UINT64_MAX) {
    need_evict_.wait(lock);
  } else if (now < next) {
    need_evict_.wait_for(lock, std::chrono::nanoseconds(next - now));
  } else if (now >= pressure_.next_ns()) {
    pressure_.release_kept(now);
    lock.give_way();
  }
}

void Pager::on_pressure(uint64_t bytes) {
  Lock lock(mutex_);
  pressure_.press(bytes);
}

void Pager::on_knobs() {
  trap::Knobs knobs;
  const bool there = trap_->knobs(&knobs).ok();
  Lock lock(mutex_);
  machine_.knobs = knobs;
  reserve_.set_watermarks(knobs.watermark_low, knobs.watermark_high);
  config_.readahead_bytes =
      there ? std::min(machine_.wanted_readahead, knobs.readahead_bytes) : machine_.wanted_readahead;
  config_.fault_timeout_ms =
      there ? std::min(machine_.wanted_timeout_ms, knobs.fault_timeout_ms) : machine_.wanted_timeout_ms;
  for (auto& [base, r] : regions_) r->readahead.set_max(static_cast<uint32_t>(config_.readahead_bytes / r->block_size));
  renew_.notify_all();
  if (!there) return;
  uint64_t limit = UINT64_MAX;
  for (const uint64_t l : {knobs.frame_limit, knobs.context_limit}) limit = l != 0 ? std::min(limit, l) : limit;
  pressure_.set_ceiling(limit);
}

}  // namespace vmem::pager
