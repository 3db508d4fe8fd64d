#include "pager/calls/device_acquire.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <functional>

#include "core/break.h"
#include "core/clock.h"
#include "core/scope_guard.h"
#include "core/step.h"
#include "pager/calls/calls.h"

namespace vmem::pager {

namespace {

constexpr std::chrono::milliseconds kPause{20};  // between two tries to bring a block to a device

Status no_memory() {
  return error(ENOMEM, "no memory for bookkeeping");
}

Status shows_its_file(const BlockMap& map, const Region& r, BlockIndex b) VMEM_LOCKED {
  return error(EIO,
               "the file ends before the block does, so the block shows the file's own pages: make the file long "
               "enough, free the region and map it again, %s",
               map.describe_locked(r, b).c_str());
}

// Sets *out to the same blocks, each once: a block that is named twice is needed once. `out` has
// room for as many spans.
void join_spans(std::span<const BlockSpan> spans, std::vector<BlockSpan>* out) {
  out->assign(spans.begin(), spans.end());
  std::sort(out->begin(), out->end(), [](const BlockSpan& a, const BlockSpan& b) {
    return a.region != b.region ? std::less<>()(a.region, b.region) : a.first < b.first;
  });
  size_t kept = 0;
  for (size_t i = 1; i < out->size(); ++i) {
    BlockSpan& last = (*out)[kept];
    const BlockSpan& next = (*out)[i];
    if (next.region != last.region || next.first > last.last) {
      (*out)[++kept] = next;
    } else {
      last.last = std::max(last.last, next.last);
    }
  }
  out->resize(kept + 1);
}

}  // namespace

DeviceAcquire::DeviceAcquire(PagerContext& ctx, Calls& calls)
    : ctx_(ctx), host_(calls.host), leases_(calls.leases), tier_(calls.tier) {}

// Finds the blocks of each range. Fails if a region has no device tier or must not be accessed so.
Status DeviceAcquire::check_ranges(std::span<const vmem_range> ranges, std::span<BlockSpan> out) {
  for (size_t i = 0; i < ranges.size(); ++i) {
    if (Status s = ctx_.map.check_range(ranges[i].ptr, ranges[i].size, &out[i]); !s.ok()) return s;
    const Region& r = *out[i].region;
    if (!r.gpu) {
      return error(EINVAL, "range %zu is in a region without a device tier (VMEM_HOST_ONLY); make it without that flag",
                   i);
    }
    if (r.backing == Backing::file_read && (ranges[i].access & VMEM_WRITE) != 0) {
      return error(EACCES, "range %zu is in a region mapped with VMEM_MAP_READ; lease it with VMEM_READ", i);
    }
  }
  return {};
}

// Tells the policies that blocks are leased at device d, and counts those that are there already.
// Drops the lock now and then.
void DeviceAcquire::hold_leased(Lock& lock, std::span<const BlockSpan> spans, int d) {
  for (const BlockSpan& s : spans) {
    Region& r = *s.region;
    uint64_t hits = 0;
    for (BlockIndex b = r.table.next_populated(s.first); b <= s.last; b = r.table.next_populated(b + 1)) {
      if (r.table[b].state == State::on_device && r.table[b].device == d) {
        ++hits;
        tier_.blocks.adopt(r, b);
      }
      ctx_.map.match_hold(r, b);
      if (b % kTurn == 0) lock.give_way();
    }
    core::add(ctx_.counters.lease_blocks, s.last - s.first + 1);
    core::add(ctx_.counters.lease_hits, hits);
  }
}

// Makes room on device d for missing blocks of the spans, as far as others can leave. Drops the
// lock.
void DeviceAcquire::make_room(Lock& lock, std::span<const BlockSpan> spans, int d, const AcquireRequest* ask) {
  uint64_t missing = 0;
  for (const BlockSpan& s : spans) {
    for (BlockIndex b = s.first; b <= s.last; ++b) {
      const Block& block = s.region->table[b];
      missing += core::on_a_device(block.state) && block.device == d ? 0 : s.region->block_size;
    }
  }
  DeviceState& g = ctx_.device_set[static_cast<size_t>(d)];
  const uint64_t failures = g.failures;  // if the driver refuses, stop: the wait for room returns its error in time
  for (bool left = true; left && AcquireRequest::check(ask).ok() && g.failures == failures;) {
    g.budget.want(missing);  // each time: others set it, too
    left = g.budget.missing() != 0 && tier_.device_reclaim.make(lock, d);
  }
}

// Makes failed blocks ready for another try: the disk may have recovered. Drops the lock.
Status DeviceAcquire::revive_failed(Lock& lock, Region& r, BlockIndex first, BlockIndex last) {
  if (r.reasons.empty() && r.table.count(State::poisoned) == 0) return {};
  for (BlockIndex i = first; i <= last; ++i) {
    const bool lost = r.lost || (r.table[i].flags & core::kLost) != 0;
    // In a PRIVATE region, the mapping of the file has the only copy of what was stored since.
    const bool only_copy = (r.table[i].flags & core::kShowsFile) != 0 && r.backing == Backing::file_private;
    if (r.table[i].state == State::poisoned && !lost && !only_copy) {
      if ((r.table[i].flags & core::kShowsFile) == 0) {
        if (Status revived = host_.failed.revive(r, i); !revived.ok()) return revived;
      } else if (ctx_.device_set
                     .own_page_tables()) {  // nothing could hold back accesses while the trap replaces the pages
        return shows_its_file(ctx_.map, r, i);
      } else if (Status shown = host_.truncated_files.revive(lock, r, i); !shown.ok()) {
        return shown;
      }
    }
    if (r.table[i].state != State::poisoned) r.reasons.erase(i);
  }
  return {};
}

// Requests every block that is not on device d, before the acquire waits for any. `spans` is the
// owner of the requests. Tries failed blocks again. Drops the lock.
Status DeviceAcquire::ask_for_missing(Lock& lock, std::span<const BlockSpan> spans, int d, const AcquireRequest* ask) {
  bool missing = false;
  for (const BlockSpan& s : spans) {
    Region& r = *s.region;
    BlockIndex b = s.first;
    while (b <= s.last && r.table[b].state == State::on_device && r.table[b].device == d) ++b;
    if (b > s.last) continue;
    if (Status revived = revive_failed(lock, r, b, s.last); !revived.ok()) return revived;
    const auto at = std::find_if(ctx_.queues.promotion_requests.begin(), ctx_.queues.promotion_requests.end(),
                                 [](const PromotionRequest& w) { return w.owner == nullptr; });
    if (!ctx_.queues.promotion_requests.insert(at, PromotionRequest{&r, b, s.last, d, Urgency::acquire, spans.data()}))
      return no_memory();
    missing = true;
  }
  if (!missing) return {};
  DeferredWork after;
  tier_.promoter.pump(after, false);
  Batch mine;
  // An ask may be withdrawn at any time, and must not wait for driver calls unless it allows that.
  if ((ask == nullptr || ask->moves_blocks) && ctx_.device_set.own_page_tables())
    mine = tier_.copy_in.take_ready(spans, d);
  tier_.promoter.wake_for_ready();
  lock.unlock();
  core::step("acquire.started");
  host_.page_in.run(after);
  if (!mine.empty()) tier_.copy_in.begin(mine, d);
  lock.lock();
  return {};
}

// Returns whether all blocks leased for writing are there, and the stream ordered after their
// copies.
bool DeviceAcquire::stores_may_begin(std::span<const BlockSpan> spans, std::span<const vmem_range> ranges,
                                     const std::vector<device::Ticket>& ordered, int d) {
  for (size_t i = 0; i < spans.size(); ++i) {
    if ((ranges[i].access & VMEM_WRITE) == 0) continue;
    const Region& r = *spans[i].region;
    for (BlockIndex b = spans[i].first; b <= spans[i].last; ++b) {
      if (!tier_.blocks.has_come(r, b, d)) return false;
      const Frame& frame = ctx_.map.frame_table()[r.table[b].aux];
      if (frame.dev.cpu_mapped) return false;
      const device::Ticket& copy = frame.dev.ticket;  // a new one if the block left and came again
      if (copy != nullptr && std::find(ordered.rbegin(), ordered.rend(), copy) == ordered.rend()) return false;
    }
  }
  return true;
}

// Marks blocks leased for writing as changed. Not sooner: no kernel stores before the acquire
// returns, and until then a lost device costs nothing, since host memory or the store still has the
// bytes. The caller has found all of them there under the same hold of the lock. decided: the lease's
// owner will not report later whether it stored.
void DeviceAcquire::mark_changed(std::span<const BlockSpan> spans, std::span<const vmem_range> ranges, bool decided) {
  for (size_t i = 0; i < spans.size() && !core::broken("kernel_writes"); ++i) {
    if ((ranges[i].access & VMEM_WRITE) == 0) continue;
    for (BlockIndex b = spans[i].first; b <= spans[i].last; ++b)
      decided ? tier_.blocks.will_change(*spans[i].region, b) : tier_.blocks.may_change(*spans[i].region, b);
  }
}

Status DeviceAcquire::acquire(std::span<const vmem_range> ranges, int d, void* stream, const AcquireRequest* ask) {
  // ask() has checked the stream on the asker's thread, on which "the default stream" depends.
  if (Status s = ask == nullptr ? ctx_.device_set.check_stream(d, stream) : ctx_.device_set.use(d); !s.ok()) return s;
  // Declared before the lock, so that tickets are destroyed after it. Reserved, so that nothing
  // grows under it.
  std::vector<BlockSpan> spans(ranges.size()), apart;
  std::vector<device::Ticket> tickets;
  size_t most = ranges.size();
  for (const vmem_range& range : ranges) most += std::min(range.size / core::kHugePage, size_t{1} << 20) + 1;
  apart.reserve(ranges.size());
  tickets.reserve(std::min(most, size_t{1} << 20));
  Lock lock(ctx_.map.mutex());
  if (Status s = check_ranges(ranges, spans); !s.ok()) return s;
  if (Status s = check_asked(spans, ask); !s.ok()) return s;
  join_spans(spans, &apart);
  for (const BlockSpan& s : spans) ++s.region->counts.in_flight;  // regions stay while we wait
  const core::ScopeGuard let_regions_go([&] {
    lock.hold();
    ctx_.queues.promotion_requests.erase_if([&](const PromotionRequest& w) { return w.owner == spans.data(); });
    for (const BlockSpan& span : spans) --span.region->counts.in_flight;
    ctx_.map.notify();
  });
  if (Status s = leases_.releases.wait_for_turn(lock, spans, apart, d, ask); !s.ok()) return s;
  // On any failure, also for want of memory, nothing is leased.
  size_t done = 0;
  core::ScopeGuard undo([&] {
    lock.hold();
    // Under the same hold of the lock as the leases end: a promotion request does not check who has
    // leased the block since.
    ctx_.queues.promotion_requests.erase_if([&](const PromotionRequest& w) { return w.owner == spans.data(); });
    for (size_t i = 0; i < done; ++i) leases_.lease_manager.take_back(spans[i], ranges[i].access, d, stream);
    for (size_t i = 0; i < done; ++i) ctx_.map.match_holds(lock, spans[i]);
    ctx_.device_set.work().notify_all();
  });
  for (; done < spans.size(); ++done) {
    if (Status s = leases_.lease_manager.grant(spans[done], ranges[done].access, d, stream); !s.ok()) return s;
  }
  hold_leased(lock, spans, d);
  // Before the requests: workers would begin with the blocks for which there is room.
  if (ask != nullptr && ask->moves_blocks && ctx_.device_set.own_page_tables()) make_room(lock, spans, d, ask);
  if (Status s = ask_for_missing(lock, spans, d, ask); !s.ok()) return s;
  size_t ordered = 0;
  do {
    for (size_t i = 0; i < spans.size(); ++i) {
      if (Status s = bring(lock, spans[i], ranges[i].access, d, spans.data(), &tickets, ask); !s.ok()) return s;
    }
    lock.unlock();
    core::step("acquire.ordering");
    Status s;
    for (; ordered < tickets.size() && s.ok(); ++ordered) {
      if (!core::broken("stream_order")) s = ctx_.devices->order_after(tickets[ordered], stream, d);
    }
    lock.lock();
    if (!s.ok()) return s;
  } while (!stores_may_begin(spans, ranges, tickets, d));
  mark_changed(spans, ranges, ask == nullptr || !ask->tells_stores);
  undo.dismiss();
  return {};
}

// Notes that a block has come, and collects the ticket of a copy that is under way.
void DeviceAcquire::note_come(Region& r, BlockIndex b, std::vector<device::Ticket>* tickets) {
  const Block& block = r.table[b];
  Frame& frame = ctx_.map.frame_table()[block.aux];
  frame.dev.displaced = false;
  if (frame.dev.hinted) {
    frame.dev.hinted = false;
    r.table.clear(b, core::kReadAhead | core::kPrefetched);
    core::add(ctx_.counters.prefetch_hits);
  }
  if (block.state == State::promoting) {
    if (frame.dev.ticket != nullptr && (tickets->empty() || tickets->back() != frame.dev.ticket))
      tickets->push_back(frame.dev.ticket);
  } else if (frame.admitted) {
    ctx_.map.policy(block.aux).touched(block.aux);
  }
}

// Returns why a block does not come to device d, after nothing went on for the whole time-out.
Status DeviceAcquire::cannot_come(const Region& r, int d) {
  const DeviceState& g = ctx_.device_set[static_cast<size_t>(d)];
  if (!ctx_.writeback_throttle.error().ok()) return ctx_.writeback_throttle.take_error();
  if (g.failures != 0 && !g.failure.ok()) return Status(-g.failure.code(), g.failure.text());
  if (Status s = ctx_.map.refusal(); !s.ok()) return s;
  return error(ENOMEM,
               "no room on device %d (device_budget %s, %s used) or in staging frames (%zu of %zu free) for %u ms", d,
               core::human_bytes(g.budget.limit()).c_str(), core::human_bytes(g.budget.charged()).c_str(),
               ctx_.staging.of(r.block_size).frames.free(), ctx_.staging.of(r.block_size).frames.total(),
               ctx_.tunables.fault_timeout_ms);
}

struct DeviceAcquire::Coming {
  uint64_t failures;  // of the device, at the last look
  uint64_t mark = StallClock::kNone;
  std::chrono::milliseconds paused{0};  // in all, after failed transitions
  bool refused = false;                 // the kernel had no memory to read the block
};

// Returns why the block does not come, if that is known. tried: the last block whose older failure
// was forgotten.
Status DeviceAcquire::failure_of(Region& r, BlockIndex b, BlockIndex* tried) {
  const Block& block = r.table[b];
  // A thread whose access met the cut of the file may go on before the block is marked, so check
  // here, too.
  if (block.state == State::poisoned && (block.flags & (core::kShowsFile | core::kLost)) == core::kShowsFile &&
      ctx_.device_set.own_page_tables() && !r.lost && r.backing != Backing::file_private)
    return shows_its_file(ctx_.map, r, b);
  if (const auto why = r.reasons.find(b); why != r.reasons.end() && !core::in_transition(block.state)) {
    if (*tried == b || block.state == State::poisoned) {
      if ((block.flags & core::kLost) != 0) r.table.mark(b, core::kTold);
      return Status(why->second.code() == -ENOMEM ? ENOMEM : EIO, why->second.text());
    }
    r.reasons.erase(why);  // of an older try, which was still under way
    *tried = b;
  } else if (block.state == State::poisoned) {
    if ((block.flags & core::kLost) != 0) r.table.mark(b, core::kTold);
    return r.reason(b);
  }
  return {};
}

// Requests a block that has no request (any more): it may have gone another way. Drops the lock.
Status DeviceAcquire::ask_again(Lock& lock, Region& r, BlockIndex b, int d, const void* owner, Coming* coming) {
  const DeviceState& g = ctx_.device_set[static_cast<size_t>(d)];
  if (g.failures == coming->failures) {
    if (!ctx_.queues.promotion_requests.push_front(PromotionRequest{&r, b, b, d, Urgency::acquire, owner}))
      return no_memory();
    DeferredWork after;
    tier_.promoter.pump(after);
    host_.page_in.run(lock, after);
    return {};
  }
  // A promotion failed: try again after a pause, and not for ever, even if other work goes on.
  coming->failures = g.failures;
  coming->paused += kPause;
  if (coming->paused >= std::chrono::milliseconds(ctx_.tunables.fault_timeout_ms) && !g.failure.ok())
    return Status(-g.failure.code(), g.failure.text());
  const auto until = std::chrono::steady_clock::now() + kPause;
  for (auto now = until - kPause; now < until; now = std::chrono::steady_clock::now())
    lock.sleep_for(ctx_.map.changed(), until - now);
  lock.unlock();
  Status health = ctx_.devices->health(d);
  lock.lock();
  return health;
}

// Waits until something has, or may have, happened to blocks of the span. Begins to copy those that
// are ready, if it may. Drops the lock.
Status DeviceAcquire::wait_for_some(Lock& lock, const BlockSpan& span, int d, const AcquireRequest* ask) {
  DeviceState& g = ctx_.device_set[static_cast<size_t>(d)];
  const bool begins = ask == nullptr && ctx_.device_set.own_page_tables();  // an ask may be withdrawn at any time
  const Batch mine = begins ? tier_.copy_in.take_ready({&span, 1}, d) : Batch();
  if (begins && !g.ready.empty()) tier_.promoter.wake_for_ready();  // others': maybe only this thread was told of them
  if (!mine.empty()) {
    lock.unlock();
    tier_.copy_in.begin(mine, d);
    lock.lock();
    return {};
  }
  g.sleepers += begins ? 1 : 0;
  const std::cv_status woken = lock.sleep_for(ctx_.map.changed(), std::chrono::milliseconds(20));
  g.sleepers -= begins ? 1 : 0;
  if (woken != std::cv_status::timeout) return {};
  DeferredWork after;
  tier_.promoter.pump(after);
  lock.unlock();
  host_.page_in.run(after);
  Status health = ctx_.devices->health(d);
  lock.lock();
  return health;
}

// Waits until every block of the span is there or its copy is issued. Collects the tickets of
// copies under way.
Status DeviceAcquire::bring(Lock& lock, const BlockSpan& span, unsigned access, int d, const void* owner,
                            std::vector<device::Ticket>* tickets, const AcquireRequest* ask) {
  Region& r = *span.region;
  Coming coming{.failures = ctx_.device_set[static_cast<size_t>(d)].failures};
  BlockIndex tried = UINT64_MAX;
  const uint64_t begun = now_ns();
  for (BlockIndex b = span.first; b <= span.last;) {
    if (r.dying) return error(EINVAL, "region %llu was freed meanwhile", static_cast<unsigned long long>(r.id));
    if (Status s = AcquireRequest::check(ask); !s.ok()) return s;
    const Block& block = r.table[b];
    if (block.state == State::on_device && ctx_.map.frame_table()[block.aux].dev.cpu_mapped &&
        !ctx_.map.frame_table()[block.aux].dev.stale && (block.device != d || (access & VMEM_WRITE) != 0)) {
      if (!tier_.cpu_mapper.hide(lock, r, b)) lock.sleep_for(ctx_.map.changed(), kPause);
      continue;
    }
    if (tier_.blocks.has_come(r, b, d)) {
      if (block.state == State::on_device) tier_.blocks.adopt(r, b);  // its promotion request may not have reached it
      note_come(r, b, tickets);
      coming.mark = StallClock::kNone;
      coming.paused = {};
      coming.refused = false;
      ++b;
      continue;
    }
    if (Status s = failure_of(r, b, &tried); !s.ok()) return s;
    // Lent to kernels of another range, whose thread may wait for blocks that this one has lent.
    if (ask != nullptr && block.state == State::isolating && ctx_.map.frame_table()[block.aux].lent_to_kernels &&
        now_ns() - begun > ask->patience_ns)
      return error(EALREADY, "a block is lent to kernels of another range");
    if (block.state == State::unpopulated && !ctx_.metadata_charges.may_grow(r, b)) return host_.failed.no_table(r, b);
    if (coming.mark == StallClock::kNone) coming.mark = ctx_.deadline.look(now_ns());
    const bool pauses =
        (block.state == State::unpopulated || block.state == State::stored) && host_.failed.asleep(r, b);
    coming.refused |= pauses;
    if (ctx_.deadline.hopeless(coming.mark)) return coming.refused ? host_.failed.not_read(r, b) : cannot_come(r, d);
    const bool requested = std::any_of(
        ctx_.queues.promotion_requests.begin(), ctx_.queues.promotion_requests.end(),
        [&](const PromotionRequest& w) { return w.owner == owner && w.region == &r && w.next <= b && b <= w.last; });
    const bool comes =
        pauses || requested || block.state == State::promoting || (block.state == State::demoting && block.device == d);
    Status s = comes ? wait_for_some(lock, span, d, ask) : ask_again(lock, r, b, d, owner, &coming);
    if (!s.ok()) return s;
  }
  return {};
}

}  // namespace vmem::pager
