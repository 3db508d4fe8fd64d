// How much is kept free, frames that the machine refuses or wants back, and the knobs of its administrator.
//
// Without the module a frame is ordinary memory and nothing here happens, except that settings come into force. With it
// each frame is asked for, and a refusal is no failure: the pool is capped at what it has, so that the evictors make
// room within it, and after a while it is tried again.
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

constexpr uint64_t kAfterRefusal = 1000000000;    // ns until memory is asked for again
constexpr uint64_t kAfterPressure = 10000000000;  // .. after the machine asked for some back

constexpr uint64_t kReleasedAtOnce = 16 << 20;  // bytes, under the lock

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
  hold_back_after_refusal(s);
  if ((block.flags & core::kWanted) != 0) starve_fault(r, b, m->started_ns, m->mark);
  m->status = {};  // who waits for the block looks again
  map_.free_move(m);
  pump(after);
  return false;
}

// Locked. Somebody waits for memory, or will soon.
bool Pager::must_evict() const {
  uint64_t first = 0;  // what the first that waits needs
  if (!queues_.starved.empty()) {
    const Starved& waits = queues_.starved.front();
    first = waits.region->block_size + reserve_.left_free(waits.urgency, waits.region->block_size);
  }
  return reserve_.short_of(first, write_back_.leaving());
}

// Locked. No more than `bytes` of frames for `ns`; what is above it leaves. A refusal takes nothing back of what
// pressure asked for.
void Pager::hold_back(uint64_t bytes, uint64_t ns, bool pressed) {
  const uint64_t until = now_ns() + ns;
  budget_.set_cap(machine_.pressed && !pressed ? std::min(bytes, budget_.limit()) : bytes);
  machine_.cap_until_ns = machine_.pressed ? std::max(until, machine_.cap_until_ns) : until;
  machine_.pressed |= pressed;
  budget_.trim();
  map_.resize_policies();
  need_evict_.notify_all();
}

void Pager::hold_back_after_refusal(const Status& why) {
  hold_back(budget_.charged(), kAfterRefusal, false);
  VMEM_LOG_ONCE(core::Level::warning, "going on with %s of host_budget %s: %.*s",
                core::human_bytes(budget_.limit()).c_str(), core::human_bytes(budget_.wanted()).c_str(),
                static_cast<int>(why.text().size()), why.text().data());
}

void Pager::lift_cap(uint64_t now) {
  if (!budget_.capped() || now < machine_.cap_until_ns) return;
  budget_.lift_cap();
  machine_.pressed = false;
  map_.resize_policies();
}

// Locked; an evictor with nothing to do. Frames that were kept for another region, and that none has asked for in time,
// go back to the system, a few at a time.
void Pager::wait_for_work(Lock& lock) {
  const uint64_t now = now_ns();
  const uint64_t next = std::min(queues_.retries.next_ns(), frames_.kept() == 0 ? UINT64_MAX : machine_.keep_until_ns);
  if (next == UINT64_MAX) {
    need_evict_.wait(lock);
  } else if (now < next) {
    need_evict_.wait_for(lock, std::chrono::nanoseconds(next - now));
  } else if (frames_.kept() != 0 && now >= machine_.keep_until_ns) {
    frames_.release_kept(kReleasedAtOnce);
    lock.give_way();
  }
}

void Pager::on_pressure(uint64_t bytes) {
  Lock lock(mutex_);
  const uint64_t used = budget_.charged();
  hold_back(std::max(reserve_.least(), used - std::min(used, bytes)), kAfterPressure, true);
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
  budget_.set_ceiling(std::max(limit, reserve_.least()));
  if (!machine_.pressed) budget_.lift_cap();  // a refusal may have been of the old limit
  budget_.trim();
  map_.resize_policies();
  need_evict_.notify_all();
}

}  // namespace vmem::pager
