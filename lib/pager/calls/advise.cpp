#include "pager/calls/advise.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "core/break.h"
#include "core/step.h"
#include "pager/block/advice.h"
#include "pager/calls/calls.h"

namespace vmem::pager {

using policy::Temperature;

namespace {

constexpr size_t kMostRanges = 256;

Status no_memory() {
  return error(ENOMEM, "no memory for bookkeeping");
}

// Returns the device's advice that the program's advice about places or readers sets or unsets.
device::Advice device_advice(int advice) {
  switch (advice) {
    case VMEM_ADVISE_SET_PREFERRED_LOCATION:
    case VMEM_ADVISE_UNSET_PREFERRED_LOCATION:
      return device::Advice::preferred_location;
    case VMEM_ADVISE_SET_ACCESSED_BY:
    case VMEM_ADVISE_UNSET_ACCESSED_BY:
      return device::Advice::accessed_by;
    default:
      return device::Advice::read_mostly;
  }
}

}  // namespace

Advise::Advise(PagerContext& ctx, Calls& calls)
    : ctx_(ctx), host_(calls.host), leases_(calls.leases), tier_(calls.tier), calls_(calls) {}

Status Advise::advise(const void* ptr, size_t size, int advice, int location) {
  using policy::Priority;
  if (advice == VMEM_ADVISE_WILL_NEED) return will_need(ptr, size);
  if (advice == VMEM_ADVISE_DONT_NEED) return drop_contents(ptr, size);
  Lock lock(ctx_.map.mutex());
  BlockSpan span;
  if (Status s = ctx_.map.check_range(ptr, size, &span); !s.ok()) return s;
  Region& r = *span.region;
  AdvisedRange range{span.first, span.last, Temperature::normal, false};
  switch (advice) {
    case VMEM_ADVISE_SET_PREFERRED_LOCATION:
    case VMEM_ADVISE_SET_ACCESSED_BY:
      if (Status s = check_location(location, ctx_.device_set.size(), false); !s.ok()) return s;
      [[fallthrough]];
    case VMEM_ADVISE_UNSET_PREFERRED_LOCATION:
    case VMEM_ADVISE_UNSET_ACCESSED_BY:
    case VMEM_ADVISE_SET_READ_MOSTLY:
    case VMEM_ADVISE_UNSET_READ_MOSTLY: {
      if (!r.gpu) return {};  // one copy in host memory serves every reader
      const bool set = advice == VMEM_ADVISE_SET_PREFERRED_LOCATION || advice == VMEM_ADVISE_SET_ACCESSED_BY ||
                       advice == VMEM_ADVISE_SET_READ_MOSTLY;
      return advise_device(lock, span, {device_advice(advice), location >= 0 ? location : device::kHost, set});
    }
    case VMEM_ADVISE_SEQUENTIAL:
    case VMEM_ADVISE_RANDOM:
      r.advice.access = advice == VMEM_ADVISE_RANDOM ? policy::Access::random : policy::Access::sequential;
      r.use.readahead.set_access(r.advice.access);
      return {};
    case VMEM_ADVISE_PRIORITY_LOW:
      r.advice.priority = Priority::low;
      break;
    case VMEM_ADVISE_PRIORITY_NORMAL:
      r.advice.priority = Priority::normal;
      break;
    case VMEM_ADVISE_PRIORITY_HIGH:
      r.advice.priority = Priority::high;
      break;
    case VMEM_ADVISE_NORMAL:
      r.advice.access = policy::Access::normal;
      r.use.readahead.set_access(r.advice.access);
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
    if (Status s = keep(r, range, advice == VMEM_ADVISE_NORMAL); !s.ok()) return s;
  }
  tell_policies(lock, whole ? BlockSpan{&r, 0, r.blocks - 1} : span);
  return {};
}

// Lets equal advice that overlaps the range or lies beside it cover the range too. Does nothing if
// newer advice covers a part of the range, because the last advice counts.
bool Advise::extend(Region& r, const AdvisedRange& range) {
  for (auto a = r.advice.advised.rbegin(); a != r.advice.advised.rend(); ++a) {
    const bool beside = a->first <= range.last + 1 && range.first <= a->last + 1;
    if (beside && a->temperature == range.temperature && a->pinned == range.pinned) {
      a->first = std::min(a->first, range.first), a->last = std::max(a->last, range.last);
      return true;
    }
    if (a->first <= range.last && range.first <= a->last) return false;
  }
  return false;
}

// Keeps advice with its region. normal: the advice undoes older advice about the range.
Status Advise::keep(Region& r, const AdvisedRange& range, bool normal) {
  r.advice.advised.reserve(r.advice.advised.size() + 1);
  std::erase_if(r.advice.advised,
                [&](const AdvisedRange& a) { return a.first >= range.first && a.last <= range.last; });
  if (normal) {  // older ranges that overlap one end of it shrink
    for (AdvisedRange& a : r.advice.advised) {
      if (a.first < range.first && range.first <= a.last && a.last <= range.last) a.last = range.first - 1;
      if (range.first <= a.first && a.first <= range.last && range.last < a.last) a.first = range.last + 1;
    }
  }
  // Advice that undoes nothing need not be kept.
  const bool says =
      !normal || std::any_of(r.advice.advised.begin(), r.advice.advised.end(),
                             [&](const AdvisedRange& a) { return a.first <= range.last && range.first <= a.last; });
  if (!says || extend(r, range)) return {};
  if (r.advice.advised.size() >= kMostRanges) {
    return error(ENOSPC, "region %llu has %zu ranges with advice already; advise larger ranges",
                 static_cast<unsigned long long>(r.id), kMostRanges);
  }
  r.advice.advised.push_back(range);
  return {};
}

// Tells the policies that have blocks of the span which advice holds for them now. Drops the lock.
void Advise::tell_policies(Lock& lock, const BlockSpan& span) {
  Region& r = *span.region;
  ++r.counts.in_flight;
  for (BlockIndex b = r.table.next_populated(span.first); b <= span.last; b = r.table.next_populated(b + 1)) {
    if (b % kTurn == 0) lock.give_way();
    ctx_.map.follow_advice(r, b);
  }
  --r.counts.in_flight;
  ctx_.map.notify();
}

// Prefetches the range part by part; each part has one preferred location.
Status Advise::will_need(const void* ptr, size_t size) {
  size_t at = 0;
  do {
    const auto* const from = static_cast<const std::byte*>(ptr) + at;
    size_t part = size - at;
    int home = -1;
    {
      Lock lock(ctx_.map.mutex());
      BlockSpan span;
      if (Status s = ctx_.map.check_range(from, part, &span); !s.ok()) return s;
      const Region& r = *span.region;
      home = home_of(r, span.first);
      const BlockIndex end = r.advice.places.same_until(span.first, span.last) + 1;
      if (end <= span.last) part = static_cast<size_t>(r.address(end) - from);
    }
    // If that device has no room, the blocks are needed all the same.
    if (home < 0 || !calls_.prefetch.prefetch(from, part, home, nullptr).ok()) {
      if (Status s = calls_.prefetch.prefetch(from, part, VMEM_HOST, nullptr); !s.ok()) return s;
    }
    at += part;
  } while (at < size);
  return {};
}

// Notes advice about a place for the pager's own use.
Status Advise::note_places(const BlockSpan& span, const Place& place) {
  Region& r = *span.region;
  const auto [what, location, set] = place;
  const int16_t preferred = set ? static_cast<int16_t>(location) : PlacementAdvice::kNowhere;
  if (what == device::Advice::accessed_by ||
      (what == device::Advice::preferred_location && r.advice.places.prefer(span.first, span.last, preferred)) ||
      (what == device::Advice::read_mostly && r.advice.places.set_read_mostly(span.first, span.last, set)))
    return {};
  return error(ENOSPC, "region %llu has %zu ranges with advice about places already; advise larger ranges",
               static_cast<unsigned long long>(r.id), r.advice.places.ranges());
}

// Gives the advice to the driver, without the lock. A block on a device is claimed for that time,
// because it must not leave while the driver works on it.
Status Advise::advise_block(Lock& lock, Region& r, BlockIndex b, const Place& place, bool* claimed) {
  if (!ctx_.map.wait_stable(lock, r, b)) return error(EINVAL, "the region was freed meanwhile");
  *claimed = r.table[b].state == State::on_device;
  if (*claimed) tier_.blocks.claim(r, b);
  lock.unlock();
  core::step("advise.device");
  Status s = ctx_.devices->advise({reinterpret_cast<uintptr_t>(r.address(b)), r.block_size}, place.what, place.location,
                                  place.set);
  lock.lock();
  if (*claimed) {
    tier_.blocks.unclaim(r, b);
    ctx_.map.notify();
  }
  return s;
}

// Remembers the advice for every block, and applies it to those on a device. Drops the lock.
Status Advise::advise_device(Lock& lock, const BlockSpan& span, const Place& place) {
  Region& r = *span.region;
  if (Status s = note_places(span, place); !s.ok()) return s;
  if (place.what == device::Advice::read_mostly && place.set) r.advice.read_mostly = true;
  ++r.counts.in_flight;
  Status result;
  for (BlockIndex b = span.first; b <= span.last && result.ok(); ++b) {
    bool claimed = false;
    uint64_t arrived = 0;
    do {
      arrived = r.counts.arrived;
      result = advise_block(lock, r, b, place, &claimed);
      // The block may have come to a device since, and have moved on from there.
    } while (!result.ok() && !claimed && r.counts.arrived != arrived);
    ctx_.map.follow_advice(r, b);
  }
  --r.counts.in_flight;
  ctx_.map.notify();
  return result;
}

// Drops the contents of blocks that lie wholly in the range. Blocks of shared files are written and
// leave memory; changes that the file refuses for good, or twice, are dropped.
Status Advise::drop_contents(const void* ptr, size_t size) {
  Lock lock(ctx_.map.mutex());
  BlockSpan span;
  if (Status s = ctx_.map.check_range(ptr, size, &span); !s.ok()) return s;
  Region& r = *span.region;
  const std::byte* from = static_cast<const std::byte*>(ptr);
  const std::byte* to = from + size;
  // The last block of a region ends where the region does.
  const std::byte* region_end = r.base + r.size;
  BlockIndex first = span.first + (from != r.address(span.first) ? 1 : 0);
  BlockIndex end = to == region_end ? r.blocks : r.index(to);
  ++r.counts.in_flight;
  leases_.releases.wait_for_region(lock, r);
  Status result;
  RangeScan scan;
  bool& skipped = scan.skipped;
  if (r.backing == Backing::file_shared) {
    if (first < end) result = calls_.range_flush.write(lock, r, first, end - 1, false, &scan);
    if (!result.ok()) result = drop_refused(lock, r, first, end, std::move(result));
    BlockIndex b = r.table.next_populated(first);
    for (; b < end && result.ok() && r.table.count(State::poisoned) != 0; b = r.table.next_populated(b + 1)) {
      if (r.table[b].state == State::poisoned) result = drop_block(lock, r, b, &skipped);
    }
  } else {
    for (BlockIndex b = r.table.next_populated(first); b < end && result.ok(); b = r.table.next_populated(b + 1)) {
      if (b % kTurn == 0) lock.give_way();
      if (leased(r, b)) {
        skipped = true;
        continue;
      }
      result = drop_block(lock, r, b, &skipped);
    }
  }
  --r.counts.in_flight;
  ctx_.map.notify();
  if (result.ok() && skipped)
    return error(EBUSY, "leased blocks of the range keep their contents; the rest was dropped");
  return result;
}

// Drops changes that the file refuses, after a write of the range has failed, first with `why`.
// Returns -EIO if it dropped blocks, else `why`. Drops the lock.
Status Advise::drop_refused(Lock& lock, Region& r, BlockIndex first, BlockIndex end, Status why) {
  uint64_t dropped = 0;
  bool leased = false;
  for (BlockIndex b = r.table.next_populated(first); b < end; b = r.table.next_populated(b + 1)) {
    if (b % kTurn == 0) lock.give_way();
    if (!ctx_.map.wait_stable(lock, r, b)) return error(EINVAL, "the region was freed meanwhile");
    const Block& block = r.table[b];
    const bool has_changes = core::in_memory(block.state) || core::on_a_device(block.state);
    if (!has_changes || !ctx_.map.frame_table()[block.aux].droppable || pager::leased(r, b)) continue;
    if (Status s = drop_block(lock, r, b, &leased); !s.ok()) return s;
    ++dropped;
  }
  if (dropped == 0) return why;
  WritebackThrottle::file_succeeded(r);  // the rest is tried, and reported, anew
  return error(EIO, "the changes of %llu blocks of %s, which the file refuses, are dropped: %.*s",
               static_cast<unsigned long long>(dropped), core::human_bytes(r.block_size).c_str(),
               static_cast<int>(why.text().size()), why.text().data());
}

Status Advise::drop_block(Lock& lock, Region& r, BlockIndex b, bool* skipped) {
  if (!ctx_.map.wait_stable(lock, r, b)) return error(EINVAL, "the region was freed meanwhile");
  if (leased(r, b) && !core::broken("leased_drop")) {  // leased while we waited for it
    *skipped = true;
    return {};
  }
  const Block& block = r.table[b];
  DeferredWork after;
  switch (block.state) {
    case State::resident:
    case State::staged:
      if (Status s = host_.writeback.drop_contents(lock, r, b, after); !s.ok()) return s;
      break;
    case State::on_device: {
      Completion completion{1, {}};
      Transition* m = tier_.demoter.begin(r, b, Leave::drop);
      if (m == nullptr) return no_memory();
      m->completion = &completion;
      tier_.demoter.run(lock, {&m, 1});
      if (!completion.status.ok()) return completion.status;
      break;
    }
    case State::stored:
      host_.failed.forget_store_copy(r, b);
      r.table.forget_contents(b);
      ctx_.metadata_charges.charge(r);
      break;
    case State::poisoned:
      if (r.lost)
        return error(EIO, "the addresses of %s were lost with a device that was reset",
                     ctx_.map.describe_locked(r, b).c_str());
      host_.failed.forget_store_copy(r, b);
      // If the file itself is mapped, only a PRIVATE region has contents of its own.
      if ((block.flags & core::kShowsFile) != 0 && r.backing != Backing::file_private) return {};
      if ((block.flags & core::kShowsFile) != 0) return host_.truncated_files.revive(lock, r, b);
      if (Status s = host_.failed.revive(r, b); !s.ok()) return s;
      break;
    default:
      break;
  }
  ctx_.upcalls.memory_freed(after);
  if (!after.empty()) {
    host_.page_in.run(lock, after);
  }
  return {};
}

}  // namespace vmem::pager
