#include "pager/calls/sync.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <new>
#include <utility>

#include "core/break.h"
#include "core/clock.h"
#include "pager/calls/calls.h"

namespace vmem::pager {

Sync::Sync(PagerContext& ctx, Calls& calls) : ctx_(ctx), host_(calls.host), leases_(calls.leases), calls_(calls) {}

// Writes some blocks of a region, which stays while it does. Sets *skipped if leased blocks were
// left. Drops the lock.
Status Sync::sync_blocks(Lock& lock, const BlockSpan& span, bool* skipped) {
  Region& r = *span.region;
  ++r.counts.in_flight;
  RangeScan scan;
  Status result = calls_.range_flush.write(lock, r, span.first, span.last, true, &scan);
  if (r.backing == Backing::file_shared &&
      !core::broken("file_flush")) {  // even if a block failed, make the others durable
    const Status flushed = calls_.range_flush.flush_file(lock, r);
    if (result.ok()) result = flushed;
  }
  if (result.ok()) result = host_.failed.tell_lost(r, span.first, span.last, true);
  --r.counts.in_flight;
  ctx_.map.notify();
  *skipped |= scan.skipped;
  return result;
}

namespace {

// Returns what a sync reports: first the failure of the range itself, else an earlier one in the
// background. If a sync does not report the latter, the next one does.
Status synced(Status result, Status earlier, bool skipped) {
  if (!result.ok()) return result;
  if (!earlier.ok()) return earlier;
  if (!skipped) return {};
  return error(EBUSY,
               "blocks of the range are under a live lease with VMEM_WRITE and were skipped; the rest is synced");
}

}  // namespace

// Returns, once, the earlier error of the region's own file, else that of the store.
Status Sync::take_error(Region& r) {
  Status own = std::exchange(r.source.write_error, {});
  return own.ok() ? ctx_.writeback_throttle.take_error() : own;
}

Status Sync::sync(const void* ptr, size_t size) {
  Lock lock(ctx_.map.mutex());
  BlockSpan span;
  if (Status s = ctx_.map.check_range(ptr, size, &span); !s.ok()) return s;
  bool skipped = false;
  Status result = sync_blocks(lock, span, &skipped), earlier;
  if (result.ok()) earlier = take_error(*span.region);
  return synced(std::move(result), std::move(earlier), skipped);
}

// Calls `with` for each region, which stays for the call. Regions come and go while others are
// written, so each step looks up the next by address; regions that came later are left out. Returns
// whether there was any.
template <typename With>
bool Sync::for_each_region(With with) {
  const uint64_t end = ctx_.totals.next_region_id;
  bool any = false;
  uintptr_t at = 0;
  for (auto it = ctx_.map.regions().begin(); it != ctx_.map.regions().end(); it = ctx_.map.regions().lower_bound(at)) {
    at = it->first + 1;
    Region& r = *it->second;
    if (r.dying || r.id >= end) continue;
    any = true;
    ++r.counts.in_flight;
    with(r);
    --r.counts.in_flight;
    if (r.dying) ctx_.map.notify();
  }
  return any;
}

// Flushes each file once, however many regions it has. All writes have ended by then.
Status Sync::flush_files(Lock& lock) {
  Status first;
  core::OwnMap<std::pair<uint64_t, uint64_t>, bool> flushed;
  for_each_region([&](Region& r) VMEM_LOCKED {
    if (r.backing != Backing::file_shared || core::broken("file_flush")) return;
    const std::pair<uint64_t, uint64_t> file{r.source.file.file.device, r.source.file.file.inode};
    if (file.second != 0 && flushed.find(file) != flushed.end()) return;
    const Status s = calls_.range_flush.flush_file(lock, r);
    if (first.ok()) first = s;
    try {
      flushed.emplace(file, true);
    } catch (const std::bad_alloc&) {  // its next region flushes it again
    }
  });
  return first;
}

Status Sync::sync_all() {
  Lock lock(ctx_.map.mutex());
  RangeScan scan;
  RangeFlush::Writes writes;
  const bool any = for_each_region([&](Region& r) VMEM_LOCKED {
    calls_.range_flush.begin(lock, {&r, 0, r.blocks - 1}, true, &scan, &writes);
  });
  Status first = calls_.range_flush.end(lock, &writes);
  const Status flushed = flush_files(lock);  // even if a block failed, make the others durable
  if (first.ok()) first = flushed;
  for_each_region([&](Region& r) VMEM_LOCKED {
    if (first.ok()) first = host_.failed.tell_lost(r, 0, r.blocks - 1, true);
  });
  if (!any) return {};  // failures went with their regions
  Status earlier;
  for_each_region([&](Region& r) VMEM_LOCKED {
    if (first.ok() && earlier.ok()) earlier = take_error(r);
  });
  return synced(std::move(first), std::move(earlier), scan.skipped);
}

Status Sync::evict(const void* ptr, size_t size, int location) {
  Lock lock(ctx_.map.mutex());
  if (location != VMEM_HOST && location != VMEM_SSD) {
    return error(EINVAL, "location %d is not accepted here; give VMEM_HOST or VMEM_SSD", location);
  }
  BlockSpan span;
  if (Status s = ctx_.map.check_range(ptr, size, &span); !s.ok()) return s;
  Region& r = *span.region;
  if (location == VMEM_HOST && !r.gpu) return host_.failed.tell_lost(r, span.first, span.last, true);
  forget_hints(ctx_.queues.promotion_requests, span);
  ++r.counts.in_flight;
  RangeScan scan;
  Status result;
  if (location == VMEM_HOST) {
    leases_.releases.wait_for_region(lock, r);
    result = calls_.range_flush.demote(lock, r, span.first, span.last, Leave::host, &scan);
  } else {
    result = calls_.range_flush.write(lock, r, span.first, span.last, false, &scan);
  }
  if (result.ok()) result = host_.failed.tell_lost(r, span.first, span.last, true);
  --r.counts.in_flight;
  ctx_.map.notify();
  return result;
}

// Takes away blocks that may be pinned, before the region goes. A device may still store to a page
// that it has pinned. It may do so after munmap() of a file mapping, too, which loses no such
// store. I/O may unpin its pages a moment after its end was seen, so this tries again for kMoment.
Status Sync::take_for_free(Lock& lock, Region& r) {
  constexpr uint64_t kMoment = 1000000000;  // ns
  const uint64_t until = now_ns() + std::min(kMoment, ctx_.deadline.limit_ns());
  for (;;) {
    RangeScan scan;
    scan.frees = scan.host = true;
    Status s = calls_.range_flush.write(lock, r, 0, r.blocks - 1, false, &scan);
    if (s.code() != -EBUSY || r.dying) return s;
    if (now_ns() >= until) {
      return error(EBUSY,
                   "region %llu has a page that is pinned by direct I/O in flight or by a registered buffer, whose "
                   "stores would not reach file %s; end it first (%.*s)",
                   static_cast<unsigned long long>(r.id), r.source.file.path.c_str(), static_cast<int>(s.text().size()),
                   s.text().data());
    }
    lock.sleep_for(ctx_.map.changed(), std::chrono::milliseconds(2));
  }
}

// A lease that is granted while blocks are written lets its holder change blocks that were written
// already. If it is released before the end, those changes are written too.
Status Sync::write_for_free(Lock& lock, Region& r, bool force) {
  for (int round = 0;; ++round) {
    const uint64_t granted = r.counts.granted;
    RangeScan scan;
    scan.all = force;
    scan.frees = true;
    Status s = calls_.range_flush.write(lock, r, 0, r.blocks - 1, true, &scan);
    if (s.ok() && !force && ctx_.trap.caps().pins == trap::Pins::taken_away) s = take_for_free(lock, r);
    if (!s.ok()) return s;
    if (force || r.dying || granted == r.counts.granted || core::broken("free_again"))
      return host_.failed.tell_lost(r, 0, r.blocks - 1, false);
    const bool live = !r.leases.visit(0, r.blocks - 1, [](BlockIndex, BlockIndex, const Leases& leases) {
      return std::all_of(leases.begin(), leases.end(), [](const Lease& l) { return l.count == 0; });
    });
    if (live || round == 16) {
      return error(EBUSY, "region %llu is leased while its changes are written; release it first",
                   static_cast<unsigned long long>(r.id));
    }
  }
}

}  // namespace vmem::pager
