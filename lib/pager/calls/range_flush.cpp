#include "pager/calls/range_flush.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "core/thread.h"
#include "pager/calls/calls.h"

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
    : ctx_(ctx), host_(calls.host), leases_(calls.leases), calls_(calls) {}

// For blocks that came to a device after RangeDemoter had passed, or were on their way then.
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
    const Status from_device = calls_.range_demoter.run(lock, r, span.first, span.last, late.how, scan);
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
    const Status s = calls_.range_demoter.run(lock, r, b, b, late.how, scan);
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

}  // namespace vmem::pager
