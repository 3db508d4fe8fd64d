#include "pager/calls/host_acquire.h"

#include <cerrno>

#include "core/clock.h"
#include "core/scope_guard.h"
#include "core/step.h"
#include "pager/calls/calls.h"

namespace vmem::pager {

namespace {

constexpr unsigned kRefusals = 10;  // of the trap, at least, before an acquire gives up: time alone proves nothing
constexpr std::chrono::milliseconds kLookAgain{20};

Status no_memory() {
  return error(ENOMEM, "no memory for bookkeeping");
}

}  // namespace

HostAcquire::HostAcquire(PagerContext& ctx, Calls& calls)
    : ctx_(ctx), host_(calls.host), leases_(calls.leases), tier_(calls.tier), calls_(calls) {}

struct HostAcquire::Coming {
  bool tried = false;    // a failure of the block is from a try of this acquire
  unsigned refused = 0;  // times that the trap did not install it, since refused_ns
  uint64_t refused_ns = 0;
  uint64_t starving = StallClock::kNone;
};

Status HostAcquire::acquire(std::span<const vmem_range> ranges, const AcquireRequest* ask) {
  std::vector<BlockSpan> spans(ranges.size());
  Lock lock(ctx_.map.mutex());
  if (Status s = check_ranges(ranges, spans); !s.ok()) return s;
  if (Status s = check_asked(spans, ask); !s.ok()) return s;
  for (const BlockSpan& s : spans) ++s.region->counts.in_flight;
  const core::ScopeGuard let_regions_go([&] {
    lock.hold();
    for (const BlockSpan& s : spans) --s.region->counts.in_flight;
    ctx_.map.notify();
  });
  if (!leases_.releases.empty()) {
    if (Status s = leases_.releases.wait_for_turn(lock, spans, {}, VMEM_HOST, ask); !s.ok()) return s;
  }
  // On any failure, also for want of memory, nothing is leased.
  size_t done = 0;
  core::ScopeGuard undo([&] {
    lock.hold();
    for (size_t i = 0; i < done; ++i) leases_.lease_manager.take_back(spans[i], ranges[i].access, VMEM_HOST, nullptr);
    for (size_t i = 0; i < done; ++i) ctx_.map.match_holds(lock, spans[i]);
  });
  for (; done < spans.size(); ++done) {
    if (Status s = grant(lock, spans, done, ranges[done].access, ask); !s.ok()) return s;
  }
  for (const BlockSpan& s : spans) hold(lock, s);
  if (Status s = start_reads(lock, spans, ask); !s.ok()) return s;
  for (size_t i = 0; i < spans.size(); ++i) {
    for (BlockIndex b = spans[i].first; b <= spans[i].last; ++b) {
      if (Status failure = bring(lock, *spans[i].region, b, ranges[i].access, ask); !failure.ok()) return failure;
      if (b % kTurn == 0) lock.give_way();
    }
  }
  undo.dismiss();
  return {};
}

Status HostAcquire::check_ranges(std::span<const vmem_range> ranges, std::span<BlockSpan> out) {
  for (size_t i = 0; i < ranges.size(); ++i) {
    if (Status s = ctx_.map.check_range(ranges[i].ptr, ranges[i].size, &out[i]); !s.ok()) return s;
    if (out[i].region->backing == Backing::file_read && (ranges[i].access & VMEM_WRITE) != 0) {
      return error(EACCES, "range %zu is in a region mapped with VMEM_MAP_READ; lease it with VMEM_READ", i);
    }
  }
  return {};
}

// Grants the lease of one span. If memory is short, drops the lock while unneeded frames are freed.
Status HostAcquire::grant(Lock& lock, std::span<const BlockSpan> spans, size_t which, unsigned access,
                          const AcquireRequest* ask) {
  Status s = leases_.lease_manager.grant(spans[which], access, VMEM_HOST, nullptr);
  while (s.code() == -ENOMEM && tier_.staging_allocator.give_back(lock)) {
    // The lock was dropped: a stream may have leased and released the blocks, and its kernels still
    // use them.
    if (s = leases_.releases.wait_for_turn(lock, spans, {}, VMEM_HOST, ask); !s.ok()) break;
    s = leases_.lease_manager.grant(spans[which], access, VMEM_HOST, nullptr);
  }
  return s;
}

// Tells the policies that blocks in memory are leased and stay. Drops the lock now and then.
void HostAcquire::hold(Lock& lock, const BlockSpan& span) {
  Region& r = *span.region;
  uint64_t hits = 0;
  for (BlockIndex b = r.table.next_populated(span.first); b <= span.last; b = r.table.next_populated(b + 1)) {
    hits += r.table[b].state == State::resident;
    ctx_.map.match_hold(r, b);
    if (b % kTurn == 0) lock.give_way();
  }
  core::add(ctx_.counters.lease_blocks, span.last - span.first + 1);
  core::add(ctx_.counters.lease_hits, hits);
}

// Begins all reads that memory allows, before the acquire waits for the first. Drops the lock.
Status HostAcquire::start_reads(Lock& lock, std::span<const BlockSpan> spans, const AcquireRequest* ask) {
  bool room = true;
  for (size_t i = 0; i < spans.size() && room; ++i) {
    Region& r = *spans[i].region;
    for (BlockIndex next = spans[i].first; next <= spans[i].last && room && !r.dying;) {
      if (Status s = AcquireRequest::check(ask); !s.ok()) return s;
      DeferredWork after;
      room = start_fills(r, &next, spans[i].last, after);
      if (after.empty()) {
        lock.give_way();
        continue;
      }
      lock.unlock();
      core::step("acquire.started");
      host_.page_in.run(after);
      lock.lock();
    }
  }
  return {};
}

// Begins to fill the blocks of a turn, from *next on. Returns false if memory allows no more.
bool HostAcquire::start_fills(Region& r, BlockIndex* next, BlockIndex last, DeferredWork& after) {
  do {
    const Block& block = r.table[*next];
    if ((block.state != State::unpopulated && block.state != State::stored) || MemoryWaitQueue::marked(block)) continue;
    if (host_.failed.asleep(r, *next)) continue;
    try {
      if (!host_.page_in.start_fill(r, *next, Urgency::acquire, after)) return false;
    } catch (const std::bad_alloc&) {
      return false;  // fills that have begun must go on
    }
  } while (++*next <= last && *next % kTurn != 0);
  return true;
}

// Waits until leased block b is in place. The lease keeps it there.
Status HostAcquire::bring(Lock& lock, Region& r, BlockIndex b, unsigned access, const AcquireRequest* ask) {
  Coming coming;
  for (;;) {
    if (r.dying) return error(EINVAL, "region %llu was freed meanwhile", static_cast<unsigned long long>(r.id));
    if (Status s = AcquireRequest::check(ask); !s.ok()) {
      if (coming.starving != StallClock::kNone) host_.waits.queue().give_up_acquire(r, b);
      return s;
    }
    if (r.lost)
      return error(EIO, "the addresses of %s were lost with a device that was reset",
                   ctx_.map.describe_locked(r, b).c_str());
    const Block& block = r.table[b];
    DeferredWork after;
    switch (block.state) {
      case State::resident:
        return let_write(r, b, access);
      case State::poisoned:
        if (std::optional<Status> over = met_failed(lock, r, b, &coming)) return *std::move(over);
        continue;
      case State::unpopulated:
      case State::stored:
        coming.tried = true;
        if (host_.failed.asleep(r, b)) {
          if (Status s = wait_for_retry(lock, r, b, &coming); !s.ok()) return s;
          continue;
        }
        if (block.state == State::unpopulated && !ctx_.metadata_charges.may_grow(r, b))
          return host_.failed.no_table(r, b);
        if ((access & VMEM_WRITE) != 0) r.table.mark(b, core::kStorePending);
        if (!MemoryWaitQueue::marked(block) && !host_.page_in.start_fill(r, b, Urgency::acquire, after)) {
          if (!host_.waits.starve(r, b, Urgency::acquire)) return no_memory();
        }
        break;
      case State::staged:
        if (!MemoryWaitQueue::marked(block) && !host_.installer.install_or_wait(r, b, after)) return no_memory();
        break;
      case State::on_device:
        if (std::optional<Status> over = met_on_device(lock, r, b, &coming)) return *std::move(over);
        continue;
      default:
        break;
    }
    if (after.empty()) {
      if (Status s = wait(lock, r, b, &coming); !s.ok()) return s;
      continue;
    }
    const bool installs = !after.install.empty();
    host_.page_in.run(lock, after);
    if (!installs) continue;
    if (Status s = installed(lock, r, b, &coming); !s.ok()) return s;
  }
}

// Makes the pages writable. DMA needs that: its faults may not reach our handler, without which the
// kernel cannot resolve the protection.
Status HostAcquire::let_write(Region& r, BlockIndex b, unsigned access) {
  const Block& block = r.table[b];
  if ((access & VMEM_WRITE) == 0 || (block.flags & core::kProtected) == 0) return {};
  Status s = ctx_.trap.unprotect(r.address(b), r.block_size);
  if (s.code() != -EPERM) {
    r.table.clear(b, core::kProtected);
    ctx_.map.note_dirty(r, b);
  }
  return s;
}

std::optional<Status> HostAcquire::met_failed(Lock& lock, Region& r, BlockIndex b, Coming* coming) {
  const Block& block = r.table[b];
  if ((block.flags & core::kShowsFile) != 0 && (block.flags & core::kUnanswered) != 0) {
    if (Status s = host_.truncated_files.revive(lock, r, b); !s.ok()) return s;
    return std::nullopt;
  }
  if ((block.flags & core::kShowsFile) != 0) {  // the part within the file is there
    lock.unlock();
    uint64_t size = 0;
    Status s = store::current_size(r.source.file, &size);
    lock.lock();
    if (!s.ok()) return s;
    if (size > r.source.offset + b * r.block_size) return Status();
    coming->tried = true;
  }
  if (coming->tried || (block.flags & core::kLost) != 0) {
    if ((block.flags & core::kLost) != 0) r.table.mark(b, core::kTold);
    const Status why = r.reason(b);
    return Status(why.code() == -ENOMEM ? ENOMEM : EIO, why.text());
  }
  coming->tried = true;  // an old failure: the disk may have recovered
  if (Status s = host_.failed.revive(r, b); !s.ok()) return s;
  return std::nullopt;
}

std::optional<Status> HostAcquire::met_on_device(Lock& lock, Region& r, BlockIndex b, Coming* coming) {
  Completion completion{1, {}};
  Transition* m = tier_.demoter.begin(r, b, Leave::host);
  if (m == nullptr) {  // no staging frame: one comes free when a staged block has been written
    if (coming->starving == StallClock::kNone) coming->starving = ctx_.deadline.look(now_ns());
    if (ctx_.deadline.hopeless(coming->starving)) return calls_.range_flush.cannot_leave(r, b);
    lock.sleep_for(ctx_.map.changed(), kLookAgain);
    return std::nullopt;
  }
  coming->starving = StallClock::kNone;
  m->completion = &completion;
  tier_.demoter.run(lock, {&m, 1});
  if (completion.status.ok()) return std::nullopt;
  return Status(completion.status.code() == -ENOMEM ? ENOMEM : EIO, completion.status.text());
}

// Waits after a read for which the kernel had no memory.
Status HostAcquire::wait_for_retry(Lock& lock, const Region& r, BlockIndex b, Coming* coming) {
  if (coming->starving == StallClock::kNone) coming->starving = ctx_.deadline.look(now_ns());
  if (ctx_.deadline.hopeless(coming->starving)) return host_.failed.not_read(r, b);
  lock.sleep_for(ctx_.map.changed(), kLookAgain);
  return {};
}

// Checks an attempt to install the block, which the trap may have refused. Waits before the next
// one, or gives up with -EIO.
Status HostAcquire::installed(Lock& lock, const Region& r, BlockIndex b, Coming* coming) {
  if (r.table[b].state != State::staged || MemoryWaitQueue::marked(r.table[b])) return {};
  const uint64_t now = now_ns();
  if (coming->refused++ == 0) coming->refused_ns = now;
  if (coming->refused > kRefusals && now - coming->refused_ns >= ctx_.tunables.fault_timeout_ms * uint64_t{1000000}) {
    return error(EIO, "a block could not be put in place, %u times in %u ms; the log says why, %s", coming->refused,
                 ctx_.tunables.fault_timeout_ms, ctx_.map.describe_locked(r, b).c_str());
  }
  lock.sleep_for(ctx_.map.changed(), kLookAgain);
  return {};
}

// Waits for memory, or for the owner of the block's transition.
Status HostAcquire::wait(Lock& lock, Region& r, BlockIndex b, Coming* coming) {
  if (!MemoryWaitQueue::marked(r.table[b])) {
    BlockWaiter waiter(ctx_.map.waiters(), r, b);
    lock.sleep(waiter.changed);
    return {};
  }
  if (coming->starving == StallClock::kNone) coming->starving = ctx_.deadline.look(now_ns());
  if (ctx_.deadline.hopeless(coming->starving)) {
    host_.waits.queue().give_up_acquire(r, b);
    if (!ctx_.writeback_throttle.error().ok()) return ctx_.writeback_throttle.take_error();
    if (Status s = ctx_.map.refusal(); !s.ok()) return s;
    return error(ENOMEM, "no memory within host_budget %s for %u ms and nothing can be evicted; leases: %s",
                 core::human_bytes(ctx_.budget.limit()).c_str(), ctx_.tunables.fault_timeout_ms,
                 leases_.lease_manager.holders().c_str());
  }
  lock.sleep_for(ctx_.map.changed(), std::chrono::milliseconds(50));
  return {};
}

}  // namespace vmem::pager
