#include "pager/calls/prefetch.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <list>
#include <optional>

#include "core/step.h"
#include "pager/calls/calls.h"

namespace vmem::pager {

namespace {

Status no_memory() {
  return error(ENOMEM, "no memory for bookkeeping");
}

}  // namespace

Prefetch::Prefetch(PagerContext& ctx, Calls& calls)
    : ctx_(ctx), host_(calls.host), leases_(calls.leases), tier_(calls.tier) {}

// Records a point on the stream, which may be of any device: tries all that are in use.
Status Prefetch::mark_stream(void* stream, int location, device::Ticket* out) {
  Status why = error(EINVAL, "%p is not a stream of a device that has blocks here", stream);
  for (int i = -1; i < ctx_.devices->count(); ++i) {
    const int d = i < 0 ? location : i;
    if (d < 0 || (i >= 0 && d == location)) continue;
    if (Lock lock(ctx_.map.mutex()); !ctx_.device_set[static_cast<size_t>(d)].budget.begun()) continue;
    why = ctx_.devices->check_stream(stream, d);
    if (why.ok()) return ctx_.devices->record(stream, d, out);
    if (why.code() != -EINVAL) return why;
  }
  return why;
}

Status Prefetch::prefetch(const void* ptr, size_t size, int location, void* stream) {
  if (Status s = check_location(location, ctx_.device_set.size(), true); !s.ok()) return s;
  if (location >= 0) {
    if (Status s = ctx_.device_set.use(location); !s.ok()) return s;
  }
  BlockSpan span;
  {
    Lock lock(ctx_.map.mutex());
    if (!leases_.releases.empty()) leases_.releases.reap(lock);
    if (Status s = ctx_.map.check_range(ptr, size, &span); !s.ok()) return s;
    if (location >= 0 && !span.region->gpu)
      return error(EINVAL, "%p is in a region without a device tier (VMEM_HOST_ONLY)", ptr);
    if (!span.region->gpu) stream = nullptr;  // no stream's work uses such a region
  }
  std::list<StreamHint> later;  // before the lock: its ticket is destroyed after it
  if (stream != nullptr) {
    later.emplace_back().location = location;
    if (Status s = mark_stream(stream, location, &later.back().ticket); !s.ok()) return s;
  }
  DeferredWork after;
  {
    Lock lock(ctx_.map.mutex());
    if (Status s = ctx_.map.check_range(ptr, size, &span); !s.ok()) return s;
    if (location >= 0 && !span.region->gpu) return error(EINVAL, "the region at %p was freed meanwhile", ptr);
    if (!later.empty()) {
      if (ctx_.queues.stream_hints.size() >= DeviceQueues::kMaxSpeculative) return {};
      StreamHint& hint = later.back();
      hint.id = ++ctx_.queues.last_hint;
      hint.region = span.region;
      hint.first = span.first;
      hint.last = span.last;
      ctx_.queues.stream_hints.splice(ctx_.queues.stream_hints.end(), later);
      ctx_.device_set.work().notify_one();
      return {};
    }
    if (Status s = start(span, location, after); !s.ok()) return s;
  }
  host_.page_in.run(after);
  return {};
}

// If this fails, nothing has begun.
Status Prefetch::start(const BlockSpan& span, int location, DeferredWork& after) {
  if (location >= 0) return start_to_device(span, location, after);
  forget_hints(ctx_.queues.promotion_requests, span);
  if (span.region->gpu && ctx_.queues.demotion_requests.size() < DeviceQueues::kMaxSpeculative) {
    if (!ctx_.queues.demotion_requests.push_back(
            {span.region, span.first, span.first, span.last, location == VMEM_SSD}))
      return no_memory();
    ctx_.device_set.work().notify_one();
    if (location == VMEM_SSD) return {};
  }
  if (location == VMEM_SSD) {
    if (!host_.reclaim_requests.full() && !host_.reclaim_requests.add(span, false)) return no_memory();
    host_.pressure.wake_reclaim();
    return {};
  }
  // Fetching more than the cache holds would only evict the blocks that were fetched first.
  const uint64_t most = std::max<uint64_t>(1, ctx_.frames.room() / 4 * 3 / span.region->block_size);
  const policy::Window window{span.first, 1, static_cast<uint32_t>(std::min(span.last - span.first + 1, most)),
                              UINT64_MAX};
  host_.readahead.speculate(*span.region, window, Urgency::prefetch);
  host_.readahead.pump_speculative(after);
  return {};
}

Status Prefetch::start_to_device(const BlockSpan& span, int device, DeferredWork& after) {
  if (ctx_.queues.promotion_requests.size() >= DeviceQueues::kMaxSpeculative) return {};
  const DeviceBudget& budget = ctx_.device_set[static_cast<size_t>(device)].budget;
  if (budget.budget() < span.region->block_size) {
    return error(ENOMEM, "device_budget %s of device %d holds no block of %s",
                 core::human_bytes(budget.budget()).c_str(), device,
                 core::human_bytes(span.region->block_size).c_str());
  }
  // More blocks than the budget holds would only evict those that came first.
  const uint64_t most = std::max<uint64_t>(1, budget.limit() / span.region->block_size);
  if (!ctx_.queues.promotion_requests.push_back(
          {span.region, span.first, std::min(span.last, span.first + most - 1), device, Urgency::prefetch, nullptr})) {
    return no_memory();
  }
  tier_.promoter.pump(after);
  return {};
}

// Serves hints whose streams have got there; returns false if there is none. Drops the lock to ask
// the driver.
bool Prefetch::serve_stream_hints(Lock& lock) {
  struct Look {
    uint64_t id = 0;
    device::Ticket ticket;
    bool reached = false;
  };
  std::array<Look, 16> looks;
  std::list<StreamHint> over;  // their tickets are destroyed without the lock
  auto& hints = ctx_.queues.stream_hints;
  size_t count = 0;
  for (size_t left = hints.size(); left != 0 && count < looks.size(); --left) {
    looks[count++] = {hints.front().id, hints.front().ticket, false};
    hints.splice(hints.end(), hints, hints.begin());
  }
  if (count == 0) return false;
  lock.unlock();
  for (Look& look : std::span(looks.data(), count)) {
    bool reached = false;
    // A lost device never answers.
    look.reached = !ctx_.devices->poll(look.ticket, &reached).ok() || reached;
    look.ticket.reset();
  }
  lock.lock();
  DeferredWork after;
  for (const Look& look : std::span(looks.data(), count)) {
    const auto h = std::find_if(hints.begin(), hints.end(), [&](const StreamHint& x) { return x.id == look.id; });
    if (!look.reached || h == hints.end()) continue;
    if (h->region != nullptr && !h->region->dying && !h->region->lost)
      start({h->region, h->first, h->last}, h->location, after).ignore();  // a hint may be dropped
    over.splice(over.end(), hints, h);
  }
  if (over.empty()) return false;
  lock.unlock();
  host_.page_in.run(after);
  over.clear();
  core::step("hint.served");
  lock.lock();
  return true;
}

// Demotes a few blocks of the oldest hint that sends blocks away from a device. Drops the lock.
bool Prefetch::serve_demotion(Lock& lock) {
  if (!ctx_.queues.demotion_requests.empty()) leases_.releases.reap(lock);
  while (!ctx_.queues.demotion_requests.empty()) {
    DemotionRequest& it = ctx_.queues.demotion_requests.front();
    Region& r = *it.region;
    Batch batch;
    std::optional<BlockSpan> on;
    BlockIndex b = r.table.next_populated(it.next);
    for (; b <= it.last && b < r.blocks && batch.size() < ctx_.staging.of(r.block_size).frames.batch();
         b = r.table.next_populated(b + 1)) {
      if (comes_to_device(ctx_.map.frame_table(), r.table[b])) break;  // still on its way there
      if (r.table[b].state != State::on_device || leased(r, b)) continue;
      Transition* m = tier_.demoter.begin(r, b, it.to_ssd ? Leave::evict : Leave::host);
      if (m == nullptr) break;
      batch.push_back(m);
    }
    it.next = b;
    if (batch.empty() && b <= it.last && b < r.blocks) return false;  // try again when a transition has ended
    if (b > it.last || b >= r.blocks) {
      if (it.to_ssd) on = BlockSpan{&r, it.first, it.last};
      ctx_.queues.demotion_requests.pop_front();
    }
    ++r.counts.in_flight;
    tier_.demoter.run(lock, batch.all());
    // The blocks are in staging frames now and go on to the SSD.
    if (on && !r.dying && !host_.reclaim_requests.full() && host_.reclaim_requests.add(*on, false))
      host_.pressure.wake_reclaim();
    --r.counts.in_flight;
    ctx_.map.notify();
    return true;
  }
  return false;
}

}  // namespace vmem::pager
