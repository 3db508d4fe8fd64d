#include "pager/calls/range_flush.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "core/clock.h"
#include "core/process/at_exit.h"
#include "core/signals.h"
#include "core/thread.h"
#include "pager/calls/calls.h"
#include "pager/tier/retry.h"

namespace vmem::pager {

namespace {

// Returns whether a lease forbids the write: any if the block leaves memory, else one for writing.
bool leased_against(const Region& r, BlockIndex b, bool keep) {
  const Leases* leases = r.leases.find(b);
  return leases != nullptr && (!keep || std::any_of(leases->begin(), leases->end(),
                                                    [](const Lease& l) { return (l.access & VMEM_WRITE) != 0; }));
}

struct FlushWait {
  std::mutex mutex;
  std::condition_variable done;
  bool finished = false;
};

}  // namespace

RangeFlush::RangeFlush(PagerContext& ctx, Calls& calls)
    : ctx_(ctx), host_(calls.host), leases_(calls.leases), tier_(calls.tier) {}

// For blocks that came to a device after demote() had passed, or were on their way then.
struct RangeFlush::Late {
  uint64_t arrived = 0;  // Region::arrived before it
  Leave how = Leave::sync;
};

void RangeFlush::write_batch(Lock& lock, Batch* batch) {
  if (batch->empty()) return;
  host_.writeback.evict_batch(lock, batch->all());
  batch->clear();
}

Status RangeFlush::write(Lock& lock, Region& r, BlockIndex first, BlockIndex last, bool keep, RangeScan* scan) {
  Writes writes;
  begin(lock, {&r, first, last}, keep, scan, &writes);
  return end(lock, &writes);
}

void RangeFlush::begin(Lock& lock, const BlockSpan& span, bool keep, RangeScan* scan, Writes* writes) {
  Region& r = *span.region;
  Batch& batch = writes->batch;
  Completion& completion = writes->completion;
  const Late late{r.counts.arrived, keep ? Leave::sync : Leave::evict};
  if (!batch.empty() && (r.gpu || (*batch.begin())->region->block_size != r.block_size)) write_batch(lock, &batch);
  if (r.gpu && !scan->host) {
    leases_.releases.wait_for_region(lock, r, scan);
    const Status from_device = demote(lock, r, span.first, span.last, late.how, scan);
    if (completion.status.ok()) completion.status = from_device;  // the rest is written all the same
  }
  const size_t most = std::max<size_t>(1, std::min<size_t>(Batch::capacity(), (8 << 20) / r.block_size));
  const uint64_t outstanding = std::max<uint64_t>(2 * ctx_.config.io_depth, most);
  bool again = false;  // look at the same block
  for (BlockIndex b = r.table.next_populated(span.first); b <= span.last && b < r.blocks;
       b = r.table.next_populated(again ? b : b + 1)) {
    again = false;
    if (b % kTurn == 0) lock.give_way();
    const bool lent = scan->all && keep && r.table[b].state == State::isolating &&
                      ctx_.map.frame_table()[r.table[b].aux].lent_to_kernels;
    if (!lent && core::in_transition(r.table[b].state)) {
      write_batch(lock, &batch);  // never wait while we own transitions
      if (!ctx_.map.wait_stable(lock, r, b, scan)) break;
    }
    if (!scan->host) write_late(lock, r, b, late, scan, &batch, &completion.status);
    if (r.dying) break;
    core::add(ctx_.counters.swept_blocks);
    const core::Block& block = r.table[b];
    if (block.state != State::resident && block.state != State::staged && !lent) continue;
    if (!scan->all && leased_against(r, b, keep)) {
      scan->skipped = true;
      continue;
    }
    if ((keep || scan->frees) &&
        (!r.writable() || stood_protected(ctx_.trap.caps().pins, block, ctx_.map.frame_table()[block.aux])))
      continue;
    if (!keep) ctx_.map.withdraw(block.aux);
    Transition* m = host_.isolator.begin_take(r, b, keep, false);
    if (m == nullptr) {
      if (!lent) ctx_.map.admit(r, b, ctx_.map.nonresident_age().shadow());
      again = completion.outstanding != 0;  // these free memory when they end
      if (again) {
        write_batch(lock, &batch);
        for (const uint64_t all = completion.outstanding; completion.outstanding == all && all != 0;)
          lock.sleep(ctx_.map.changed());
        continue;
      }
      if (completion.status.ok())
        completion.status = error(ENOMEM, "no memory, or no address space, for the image of a block");
      break;
    }
    m->completion = &completion;
    ++completion.outstanding;
    batch.push_back(m);
    if (batch.size() >= most) write_batch(lock, &batch);
    while (completion.outstanding > outstanding && batch.empty()) lock.sleep(ctx_.map.changed());
  }
}

Status RangeFlush::end(Lock& lock, Writes* writes) {
  write_batch(lock, &writes->batch);
  while (writes->completion.outstanding != 0) lock.sleep(ctx_.map.changed());
  return writes->completion.status;
}

// Writes a block that came to a device late, because the store lacks the changes that it brought.
void RangeFlush::write_late(Lock& lock, Region& r, BlockIndex b, const Late& late, RangeScan* scan, Batch* batch,
                            Status* result) {
  for (uint64_t seen = late.arrived; r.table[b].state == State::on_device && seen != r.counts.arrived;) {
    seen = r.counts.arrived;
    write_batch(lock, batch);
    const Status s = demote(lock, r, b, b, late.how, scan);
    if (result->ok()) *result = s;
    if (!s.ok() || !ctx_.map.wait_stable(lock, r, b, scan)) break;
  }
}

Status RangeFlush::flush_file(Lock& lock, Region& r) {
  FlushWait wait;
  store::Io io;
  io.op = store::Io::Op::flush;
  io.urgency = core::Urgency::acquire;
  io.file = r.source.id;
  io.user = &wait;
  io.done = [](store::Io& done) {
    FlushWait& w = *static_cast<FlushWait*>(done.user);
    std::lock_guard guard(w.mutex);
    w.finished = true;
    w.done.notify_all();
  };
  lock.unlock();
  store::Io* one = &io;
  ctx_.engine.submit({&one, 1});
  {
    std::unique_lock guard(wait.mutex);
    while (!wait.done.wait_for(guard, std::chrono::milliseconds(50), [&] { return wait.finished; })) {
      if (!core::signals_have_come()) continue;
      guard.unlock();
      core::let_signals_in();
      guard.lock();
    }
  }
  lock.lock();
  if (io.result != 0) return core::system_error(io.result, "flushing file %s failed", r.source.file.path.c_str());
  return {};
}

// The blocks that this call has claimed and not ended. If devices have their own page tables and
// blocks are not to be written, the call begins with each block as soon as it meets it: the next is
// unmapped while this one is copied, and the oldest is ended when enough are under way. Otherwise
// blocks go in batches.
class RangeFlush::UnderWay {
 public:
  // batch: blocks that are under way at most.
  UnderWay(RangeFlush& all, bool one_by_one, size_t batch)
      : all_(all), one_by_one_(one_by_one), batch_(one_by_one ? std::min(batch, parts_.size()) : batch) {}

  // Returns whether one must end before the next is claimed: signals may come in while it ends.
  bool full() const { return one_by_one_ && count_ == batch_; }
  void add(Lock& lock, Transition* m) VMEM_LOCKED {
    if (one_by_one_) return begin(lock, m);
    together_.push_back(m);
    if (together_.size() >= batch_) flush(lock);
  }
  void end_oldest(Lock& lock) VMEM_LOCKED {
    lock.unlock();
    // For core::broken("signals_in_copies") and core::broken("copy_wait") in wait_in_call(): a
    // build with one of them recompiles this file.
    if (wait_in_call(*all_.ctx_.devices, oldest().ticket) || !core::run_aside([this] { end_all(); })) end_one();
    lock.lock();
  }
  void flush(Lock& lock) VMEM_LOCKED {
    while (count_ != 0) end_oldest(lock);
    if (together_.empty() && unmapped_.empty()) return;
    lock.unlock();
    if (!unmapped_.empty()) keep();
    if (!together_.empty()) all_.tier_.demoter.run(together_.all());
    lock.lock();
    together_.clear();
  }

 private:
  OutPart& oldest() { return parts_[first_ % parts_.size()]; }
  void begin(Lock& lock, Transition* m) VMEM_LOCKED {
    const size_t i = (first_ + count_++) % parts_.size();
    transitions_[i] = m;
    parts_[i] = {.transitions = {&transitions_[i], 1}, .device = m->device};
    lock.unlock();
    all_.tier_.demoter.begin_part(parts_[i]);
    lock.lock();
  }
  void end_one() VMEM_UNLOCKED {
    if (unmapped_.full()) keep();
    Batch writes;
    DeferredWork after;
    all_.tier_.demoter.end_part(oldest(), writes, unmapped_, after);
    all_.host_.page_in.run(after);
    ++first_, --count_;
  }
  void end_all() VMEM_UNLOCKED {
    while (count_ != 0) end_one();
    if (!unmapped_.empty()) keep();
  }
  void keep() VMEM_UNLOCKED {
    DeferredWork after;
    all_.tier_.demoter.keep_mapped(unmapped_, after);
    all_.host_.page_in.run(after);
  }

  RangeFlush& all_;
  const bool one_by_one_;
  std::array<Transition*, kDeviceBatch> transitions_ = {};
  std::array<OutPart, kDeviceBatch> parts_;
  const size_t batch_;
  size_t first_ = 0, count_ = 0;  // in parts_
  Batch together_, unmapped_;
};

// Notes lost devices: the copies in host memory of their blocks are then written. Drops the lock.
void RangeFlush::look_for_loss(Lock& lock) {
  for (size_t d = 0; d < ctx_.device_set.size(); ++d) {
    if (ctx_.device_set[d].budget.charged() == 0 || ctx_.device_set[d].lost) continue;
    lock.unlock();
    const Status health = ctx_.devices->health(static_cast<int>(d));
    lock.lock();
    ctx_.device_set.saw_loss(static_cast<int>(d), health);
  }
}

// Returns, at exit, whether the block on a device reached its file before the device's context
// went. That ended the work for which the block was leased.
bool RangeFlush::went_with_its_context(const Region& r, BlockIndex b) {
  const Frame& frame = ctx_.map.frame_table()[r.table[b].aux];
  return core::exiting() && ctx_.device_set[r.table[b].device].lost && !frame.dev.cpu_mapped && frame.dev.saved;
}

// Returns whether the block, which is at rest, stays as it is: because nothing need be done, or
// because nothing can be, which it notes in the scan.
bool RangeFlush::passes_over(const Region& r, BlockIndex b, Leave how, RangeScan* scan) {
  const State state = r.table[b].state;
  const bool busy = how == Leave::sync ? lent_for_writing(r, b) : leased(r, b);
  if (how == Leave::sync && state == State::on_device && scan->nobody_asks() && went_with_its_context(r, b))
    return true;
  if (state != State::on_device || (busy && !scan->all) || (scan->at_rest && live_on_device(r, b)) ||
      (how == Leave::sync && (proven_clean(r.table[b]) || !r.writable()))) {
    if (state == State::on_device && busy && !scan->all) scan->skipped = true;
    return true;
  }
  if (scan->wait != RangeScan::Wait::never || !awaits_writes(r, b)) return false;
  scan->leave(b);
  return true;
}

Leave RangeFlush::goes_how(const Region& r, BlockIndex b, Leave how) {
  if (how != Leave::sync || leased(r, b)) return how;
  // A block that cannot be copied from a lost device cannot stay there either: it is marked as
  // lost. A block that is stale on its device leaves too. A leased block stays, because a kernel
  // may use it, and the CPU's copy is written.
  const bool goes = ctx_.device_set[r.table[b].device].lost || ctx_.map.frame_table()[r.table[b].aux].dev.stale;
  return goes ? Leave::evict : how;
}

Status RangeFlush::demote(Lock& lock, Region& r, BlockIndex first, BlockIndex last, Leave how, RangeScan* scan) {
  Completion completion;
  UnderWay under_way(*this, ctx_.device_set.own_page_tables() && how != Leave::sync,
                     ctx_.staging.of(r.block_size).frames.batch());
  if (how == Leave::sync) look_for_loss(lock);
  uint64_t mark = StallClock::kNone;
  BlockIndex waited = UINT64_MAX;  // its releases were waited for
  Status starved;
  for (BlockIndex b = r.table.next_populated(first); b <= last && b < r.blocks;) {
    if (r.table[b].state == State::demoting || comes_to_device(ctx_.map.frame_table(), r.table[b])) {
      under_way.flush(lock);
      if (!ctx_.map.wait_stable(lock, r, b, scan)) break;
      if (core::in_transition(r.table[b].state)) b = r.table.next_populated(b + 1);
      continue;
    }
    core::add(ctx_.counters.swept_blocks);
    if (passes_over(r, b, how, scan)) {
      b = r.table.next_populated(b + 1);
      continue;
    }
    if (scan->wait == RangeScan::Wait::while_it_goes_on && b != waited && awaits_writes(r, b)) {
      under_way.flush(lock);
      waited = b;
      if (!leases_.releases.wait_for_block(lock, r, b, scan)) scan->leave(b);
      if (r.dying) break;
      continue;
    }
    if (under_way.full()) {
      under_way.end_oldest(lock);
      continue;
    }
    Transition* m = tier_.demoter.begin(r, b, goes_how(r, b, how));
    if (m == nullptr) {
      under_way.flush(lock);
      if (mark == StallClock::kNone) mark = ctx_.deadline.look(now_ns());
      if (ctx_.deadline.hopeless(mark)) {
        starved = cannot_leave(r, b);
        break;
      }
      lock.sleep_for(ctx_.map.changed(), std::chrono::milliseconds(20));
      continue;
    }
    mark = StallClock::kNone;
    m->completion = &completion;
    ++completion.outstanding;
    b = r.table.next_populated(b + 1);
    under_way.add(lock, m);
  }
  under_way.flush(lock);
  while (completion.outstanding != 0) lock.sleep(ctx_.map.changed());
  return completion.status.ok() ? starved : completion.status;
}

Status RangeFlush::cannot_leave(const Region& r, BlockIndex b) {
  if (const Frame& frame = ctx_.map.frame_table()[r.table[b].aux]; frame.dev.answers_sigbus || frame.dev.apart) {
    return error(EIO, "accesses of a block get SIGBUS, and the trap has not undone that for %u ms, %s",
                 ctx_.tunables.fault_timeout_ms, ctx_.map.describe_locked(r, b).c_str());
  }
  Status why = ctx_.writeback_throttle.take_error();
  if (why.ok()) why = ctx_.map.refusal();
  if (!why.ok()) return why;
  return error(ENOMEM, "no staging frame came free for %u ms: of host_budget %s, %s are staging frames",
               ctx_.tunables.fault_timeout_ms, core::human_bytes(ctx_.budget.limit()).c_str(),
               core::human_bytes(ctx_.budget.charged(Use::staging)).c_str());
}

}  // namespace vmem::pager
