// Prefetch and advice.
#include <algorithm>
#include <array>
#include <cerrno>
#include <list>
#include <optional>
#include <utility>

#include "core/break.h"
#include "core/step.h"
#include "pager/pager.h"

namespace vmem::pager {

using core::Block;
using core::BlockIndex;
using core::error;
using core::State;
using core::Status;
using core::Urgency;

namespace {

Status no_memory() {
  return error(ENOMEM, "no memory for bookkeeping");
}

}  // namespace

// A point on a stream of some device that is in use: a hint's stream may be any device's.
Status Pager::mark_stream(void* stream, int location, device::Ticket* out) {
  Status why = error(EINVAL, "%p is not a stream of a device that has blocks here", stream);
  for (int i = -1; i < devices_->count(); ++i) {
    const int d = i < 0 ? location : i;
    if (d < 0 || (i >= 0 && d == location)) continue;
    if (Lock lock(map_.mutex()); !gpus_[static_cast<size_t>(d)].budget.begun()) continue;
    why = devices_->check_stream(stream, d);
    if (why.ok()) return devices_->record(stream, d, out);
    if (why.code() != -EINVAL) return why;
  }
  return why;
}

Status Pager::prefetch(const void* ptr, size_t size, int location, void* stream) {
  if (Status s = check_location(location, true); !s.ok()) return s;
  if (location >= 0) {
    if (Status s = gpus_.use(location); !s.ok()) return s;
  }
  SpanOf span;
  {
    Lock lock(map_.mutex());
    if (!releases_.empty()) releases_.reap(lock);
    if (Status s = map_.check_range(ptr, size, &span); !s.ok()) return s;
    if (location >= 0 && !span.region->gpu)
      return error(EINVAL, "%p is in a region without a device tier (VMEM_HOST_ONLY)", ptr);
    if (!span.region->gpu) stream = nullptr;  // what is in a stream's order does not use it
  }
  std::list<StreamHint> later;  // before the lock, as its ticket ends after it
  if (stream != nullptr) {
    later.emplace_back().location = location;
    if (Status s = mark_stream(stream, location, &later.back().ticket); !s.ok()) return s;
  }
  After after;
  {
    Lock lock(map_.mutex());
    if (Status s = map_.check_range(ptr, size, &span); !s.ok()) return s;
    if (location >= 0 && !span.region->gpu) return error(EINVAL, "the region at %p was freed meanwhile", ptr);
    if (!later.empty()) {
      if (queues_.stream_hints.size() >= Queues::kMaxSpeculative) return {};
      StreamHint& hint = later.back();
      hint.id = ++queues_.last_hint;
      hint.region = span.region;
      hint.first = span.first;
      hint.last = span.last;
      queues_.stream_hints.splice(queues_.stream_hints.end(), later);
      gpus_.work().notify_one();
      return {};
    }
    if (Status s = start_hint(span, location, after); !s.ok()) return s;
  }
  page_in_.run(after);
  return {};
}

// Locked. Where it fails nothing has begun.
Status Pager::start_hint(const SpanOf& span, int location, After& after) {
  if (location >= 0) {
    if (queues_.wishes.size() >= Queues::kMaxSpeculative) return {};
    const DeviceBudget& budget = gpus_[static_cast<size_t>(location)].budget;
    if (budget.budget() < span.region->block_size) {
      return error(ENOMEM, "device_budget %s of device %d holds no block of %s",
                   core::human_bytes(budget.budget()).c_str(), location,
                   core::human_bytes(span.region->block_size).c_str());
    }
    // More than the budget holds would only chase out what came first.
    const uint64_t most = std::max<uint64_t>(1, budget.limit() / span.region->block_size);
    if (!queues_.wishes.push_back({span.region, span.first, std::min(span.last, span.first + most - 1), location,
                                   Urgency::prefetch, nullptr})) {
      return no_memory();
    }
    promoter_.pump(after);
    return {};
  }
  forget_hints(queues_.wishes, span);
  if (span.region->gpu && queues_.departures.size() < Queues::kMaxSpeculative) {
    if (!queues_.departures.push_back({span.region, span.first, span.first, span.last, location == VMEM_SSD}))
      return no_memory();
    gpus_.work().notify_one();
    if (location == VMEM_SSD) return {};
  }
  if (location == VMEM_SSD) {
    if (!evict_requests_.full() && !evict_requests_.add(span, false)) return no_memory();
    pressure_.call_evictor();
    return {};
  }
  // More than the cache holds would only chase out what was fetched first.
  const uint64_t most = std::max<uint64_t>(1, frames_.room() / 4 * 3 / span.region->block_size);
  const policy::Window window{span.first, 1, static_cast<uint32_t>(std::min(span.last - span.first + 1, most)),
                              UINT64_MAX};
  read_ahead_.speculate(*span.region, window, Urgency::prefetch);
  read_ahead_.pump_speculative(after);
  return {};
}

// Locked, but not while the driver is asked. Hints whose streams have got there take effect; false: none has.
bool Pager::serve_stream_hints(Lock& lock) {
  struct Look {
    uint64_t id = 0;
    device::Ticket ticket;
    bool reached = false;
  };
  std::array<Look, 16> looks;
  std::list<StreamHint> over;  // their tickets end without the lock
  auto& hints = queues_.stream_hints;
  size_t count = 0;
  for (size_t left = hints.size(); left != 0 && count < looks.size(); --left) {
    looks[count++] = {hints.front().id, hints.front().ticket, false};
    hints.splice(hints.end(), hints, hints.begin());
  }
  if (count == 0) return false;
  lock.unlock();
  for (Look& look : std::span(looks.data(), count)) {
    bool reached = false;
    // A device that is lost never tells.
    look.reached = !devices_->poll(look.ticket, &reached).ok() || reached;
    look.ticket.reset();
  }
  lock.lock();
  After after;
  for (const Look& look : std::span(looks.data(), count)) {
    const auto h = std::find_if(hints.begin(), hints.end(), [&](const StreamHint& x) { return x.id == look.id; });
    if (!look.reached || h == hints.end()) continue;
    if (h->region != nullptr && !h->region->dying && !h->region->lost)
      start_hint({h->region, h->first, h->last}, h->location, after).ignore();  // a hint may be dropped
    over.splice(over.end(), hints, h);
  }
  if (over.empty()) return false;
  lock.unlock();
  page_in_.run(after);
  over.clear();
  core::step("hint.served");
  lock.lock();
  return true;
}

// Locked. A few blocks of the oldest hint that asks blocks away from a device.
bool Pager::serve_departure(Lock& lock) {
  if (!queues_.departures.empty()) releases_.reap(lock);
  while (!queues_.departures.empty()) {
    Departure& it = queues_.departures.front();
    Region& r = *it.region;
    Batch batch;
    std::optional<SpanOf> on;
    BlockIndex b = r.table.next_touched(it.next);
    for (; b <= it.last && b < r.blocks && batch.size() < staging_.of(r).frames.batch();
         b = r.table.next_touched(b + 1)) {
      if (comes_to_device(map_.residents(), r.table[b])) break;  // not there yet
      if (r.table[b].state != State::on_device || leased(r, b)) continue;
      Move* m = demoter_.begin(r, b, it.to_ssd ? Leave::evict : Leave::host);
      if (m == nullptr) break;
      batch.push_back(m);
    }
    it.next = b;
    if (batch.empty() && b <= it.last && b < r.blocks) return false;  // tried again when something has moved
    if (b > it.last || b >= r.blocks) {
      if (it.to_ssd) on = SpanOf{&r, it.first, it.last};
      queues_.departures.pop_front();
    }
    ++r.in_flight;
    demoter_.run(lock, batch.all());
    // What is in staging frames now goes on.
    if (on && !r.dying && !evict_requests_.full() && evict_requests_.add(*on, false)) pressure_.call_evictor();
    --r.in_flight;
    map_.notify();
    return true;
  }
  return false;
}

Status Pager::advise(const void* ptr, size_t size, int advice, int location) {
  using policy::Priority;
  using policy::Temperature;
  if (advice == VMEM_ADVISE_WILL_NEED) return prefetch(ptr, size, VMEM_HOST);
  if (advice == VMEM_ADVISE_DONT_NEED) return drop_contents(ptr, size);
  Lock lock(map_.mutex());
  SpanOf span;
  if (Status s = map_.check_range(ptr, size, &span); !s.ok()) return s;
  Region& r = *span.region;
  AdvisedRange range{span.first, span.last, Temperature::normal, false};
  switch (advice) {
    case VMEM_ADVISE_SET_PREFERRED_LOCATION:
    case VMEM_ADVISE_SET_ACCESSED_BY:
      if (Status s = check_location(location, false); !s.ok()) return s;
      [[fallthrough]];
    case VMEM_ADVISE_UNSET_PREFERRED_LOCATION:
    case VMEM_ADVISE_UNSET_ACCESSED_BY:
    case VMEM_ADVISE_SET_READ_MOSTLY:
    case VMEM_ADVISE_UNSET_READ_MOSTLY: {
      if (!r.gpu) return {};  // one copy in host memory serves every reader
      const device::Advice what =
          advice == VMEM_ADVISE_SET_PREFERRED_LOCATION || advice == VMEM_ADVISE_UNSET_PREFERRED_LOCATION
              ? device::Advice::preferred_location
          : advice == VMEM_ADVISE_SET_ACCESSED_BY || advice == VMEM_ADVISE_UNSET_ACCESSED_BY
              ? device::Advice::accessed_by
              : device::Advice::read_mostly;
      const bool set = advice == VMEM_ADVISE_SET_PREFERRED_LOCATION || advice == VMEM_ADVISE_SET_ACCESSED_BY ||
                       advice == VMEM_ADVISE_SET_READ_MOSTLY;
      return advise_device(lock, span, what, location >= 0 ? location : device::kHost, set);
    }
    case VMEM_ADVISE_SEQUENTIAL:
    case VMEM_ADVISE_RANDOM:
      r.access = advice == VMEM_ADVISE_RANDOM ? policy::Access::random : policy::Access::sequential;
      r.readahead.set_access(r.access);
      return {};
    case VMEM_ADVISE_PRIORITY_LOW:
      r.priority = Priority::low;
      break;
    case VMEM_ADVISE_PRIORITY_NORMAL:
      r.priority = Priority::normal;
      break;
    case VMEM_ADVISE_PRIORITY_HIGH:
      r.priority = Priority::high;
      break;
    case VMEM_ADVISE_NORMAL:
      r.access = policy::Access::normal;
      r.readahead.set_access(r.access);
      break;
    case VMEM_ADVISE_COLD:
      range.temperature = Temperature::cold;
      break;
    case VMEM_ADVISE_HOT:
      range.temperature = Temperature::hot;
      break;
    case VMEM_ADVISE_PIN:
      range.pinned = true;
      break;
    default:
      return error(EINVAL, "advice %d is unknown; enum vmem_advice has the accepted ones", advice);
  }
  const bool whole = advice >= VMEM_ADVISE_PRIORITY_LOW;
  if (!whole) {
    r.advised.reserve(r.advised.size() + 1);
    std::erase_if(r.advised, [&](const AdvisedRange& a) { return a.first >= range.first && a.last <= range.last; });
    if (advice == VMEM_ADVISE_NORMAL) {  // what reaches into the range ends before it, or begins after it
      for (AdvisedRange& a : r.advised) {
        if (a.first < range.first && range.first <= a.last && a.last <= range.last) a.last = range.first - 1;
        if (range.first <= a.first && a.first <= range.last && range.last < a.last) a.first = range.last + 1;
      }
    }
    // What undoes nothing need not be known.
    const bool says =
        advice != VMEM_ADVISE_NORMAL || std::any_of(r.advised.begin(), r.advised.end(), [&](const AdvisedRange& a) {
          return a.first <= range.last && range.first <= a.last;
        });
    if (says && r.advised.size() >= 256) {
      return error(ENOSPC, "region %llu has 256 ranges with advice already; advise larger ranges",
                   static_cast<unsigned long long>(r.id));
    }
    if (says) r.advised.push_back(range);
  }
  const BlockIndex last = whole ? r.blocks - 1 : span.last;
  ++r.in_flight;
  for (BlockIndex b = r.table.next_touched(whole ? 0 : span.first); b <= last; b = r.table.next_touched(b + 1)) {
    if (b % kTurn == 0) lock.give_way();
    const Block& block = r.table[b];
    if (!core::in_memory(block.state) && !core::on_a_device(block.state)) continue;
    if (!map_.residents()[block.aux].admitted) continue;
    bool pinned = false;
    const Temperature t = temperature(r, b, &pinned);
    map_.policy(block.aux).advise(block.aux, t, r.priority, pinned);
  }
  --r.in_flight;
  map_.notify();
  return {};
}

// Remembered for every block, and applied to those on a device, each of which is claimed meanwhile: it must not leave
// under the driver's hands.
Status Pager::advise_device(Lock& lock, const SpanOf& span, device::Advice what, int location, bool set) {
  Region& r = *span.region;
  if (what == device::Advice::read_mostly && set) r.read_mostly = true;
  ++r.in_flight;
  Status result;
  for (BlockIndex b = span.first; b <= span.last && result.ok(); ++b) {
    if (!map_.wait_stable(lock, r, b)) {
      result = error(EINVAL, "the region was freed meanwhile");
      break;
    }
    const bool claimed = r.table[b].state == State::on_device;
    if (claimed) blocks_.claim(r, b);
    lock.unlock();
    core::step("advise.device");
    result = devices_->advise({reinterpret_cast<uintptr_t>(r.address(b)), r.block_size}, what, location, set);
    lock.lock();
    if (claimed) {
      blocks_.unclaim(r, b);
      map_.notify();
    }
  }
  --r.in_flight;
  map_.notify();
  return result;
}

// Blocks wholly inside lose their contents. Shared files lose nothing: their blocks are written and leave memory.
Status Pager::drop_contents(const void* ptr, size_t size) {
  Lock lock(map_.mutex());
  SpanOf span;
  if (Status s = map_.check_range(ptr, size, &span); !s.ok()) return s;
  Region& r = *span.region;
  const std::byte* from = static_cast<const std::byte*>(ptr);
  const std::byte* to = from + size;
  // The last block of a region ends where the region does.
  const std::byte* region_end = r.base + r.size;
  BlockIndex first = span.first + (from != r.address(span.first) ? 1 : 0);
  BlockIndex end = to == region_end ? r.blocks : r.index(to);
  ++r.in_flight;
  releases_.wait_for_region(lock, r);
  Status result;
  Sweep sweep;
  bool& skipped = sweep.skipped;
  if (r.backing == Backing::file_shared) {
    if (first < end) result = write_out(lock, r, first, end - 1, false, &sweep);
    BlockIndex b = r.table.next_touched(first);
    for (; b < end && result.ok() && r.table.count(State::failed) != 0; b = r.table.next_touched(b + 1)) {
      if (r.table[b].state == State::failed) result = drop_block(lock, r, b, &skipped);
    }
  } else {
    for (BlockIndex b = r.table.next_touched(first); b < end && result.ok(); b = r.table.next_touched(b + 1)) {
      if (b % kTurn == 0) lock.give_way();
      if (leased(r, b)) {
        skipped = true;
        continue;
      }
      result = drop_block(lock, r, b, &skipped);
    }
  }
  --r.in_flight;
  map_.notify();
  if (result.ok() && skipped)
    return error(EBUSY, "leased blocks of the range keep their contents; the rest was dropped");
  return result;
}

Status Pager::drop_block(Lock& lock, Region& r, BlockIndex b, bool* skipped) {
  if (!map_.wait_stable(lock, r, b)) return error(EINVAL, "the region was freed meanwhile");
  if (leased(r, b) && !core::broken("leased_drop")) {  // .. while it was waited for
    *skipped = true;
    return {};
  }
  Block& block = r.table[b];
  After after;
  switch (block.state) {
    case State::resident:
    case State::held:
      if (Status s = write_back_.drop_contents(lock, r, b, after); !s.ok()) return s;
      break;
    case State::on_device: {
      Job job{1, {}};
      Move* m = demoter_.begin(r, b, Leave::drop);
      if (m == nullptr) return no_memory();
      m->job = &job;
      demoter_.run(lock, {&m, 1});
      if (!job.status.ok()) return job.status;
      break;
    }
    case State::stored:
      failed_.forget_store_copy(r, b);
      r.table.change(b, State::stored, State::untouched);
      tables_.charge(r);
      break;
    case State::failed:
      if (r.lost) return error(EIO, "the addresses of %s went with a device that was reset", map_.where(r, b).c_str());
      failed_.forget_store_copy(r, b);
      // Where the file itself is mapped only a PRIVATE region has contents of its own.
      if ((block.flags & core::kShowsFile) != 0 && r.backing != Backing::file_private) return {};
      if ((block.flags & core::kShowsFile) != 0) return shown_files_.revive(lock, r, b);
      if (Status s = failed_.revive(r, b); !s.ok()) return s;
      break;
    default:
      break;
  }
  came_free(after);
  if (!after.empty()) {
    page_in_.run(lock, after);
  }
  return {};
}

}  // namespace vmem::pager
