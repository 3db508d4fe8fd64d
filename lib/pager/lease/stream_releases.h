// Releases. A lease at a device ends when the stream reaches the point of its release; a lease at
// the host ends at once. Also the waits for that: of an acquire that releases are in the way of,
// and of a call that needs a region without pending releases.
//
// - A lease at a device is ending from its release until its stream was seen to have reached it,
//   its device is lost, or its region is freed. Until then StreamReleaseQueue has the release, and
//   the regions' LeaseMaps have the leases that it ends.
// - No lock or region is held while a driver is called: a stream may be held for as long as its
//   owner likes.
//
// Both classes are called under the pager's lock, unless the annotation says otherwise.
// StreamReleases drops it while a driver is called.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <list>
#include <span>
#include <string>

#include "device/device.h"
#include "pager/account/cpu_mappings.h"
#include "pager/lease/acquire_requests.h"
#include "pager/lease/lease_manager.h"

namespace vmem::pager {

struct HostTier;
struct LeaseRoom;

// Releases of leases at devices that their streams have not reached.
//
// - Releases are in the order in which they were made.
// - A lane is what one thread releases on one stream of a device. The stream reaches the releases
//   of a lane in order, so only the first, the oldest, is worth polling.
//
// The cost of a call depends on the number of lanes, and not on how far behind their streams are: a
// stream that is held may have a thousand releases. any(), count() and forget() look at all releases.
//
// Needs no memory: entries come from lists of the callers and return to such lists, because the
// device tickets in them must end without the lock.
class StreamReleaseQueue {
 public:
  bool empty() const { return pending_.empty(); }
  size_t size() const { return pending_.size(); }
  // Whether a release has leases of the region.
  bool any(const Region& r) const;
  // Of the releases up to number `id`: whether one has a lease of a block of the span, and how many
  // are pending.
  bool any(const BlockSpan& span, uint64_t id) const;
  size_t count(uint64_t id) const;
  uint64_t newest() const { return last_; }  // the last number given

  // Takes a release out of `from`, and numbers it. Its device, stream and thread are set.
  void add(std::list<PendingRelease>& from, std::list<PendingRelease>::iterator release);
  // Stores in `out` the releases to poll whose numbers are above `after`, in order: the oldest of
  // each lane, if recorded. Returns how many, at most out.size().
  size_t oldest(uint64_t after, std::span<const PendingRelease*> out) const;
  const PendingRelease* find(uint64_t id) const;  // null: it has ended
  // Moves a release to `to`: the stream has reached it, or it is undone. The next of its lane is
  // the oldest then.
  void end(const PendingRelease& release, std::list<PendingRelease>* to);
  // The region is being freed: drops its spans from all releases.
  void forget(const Region& r);

  // For tests: returns what is wrong, or an empty string.
  std::string check() const;

 private:
  PendingRelease** lane_of(const PendingRelease& release);

  std::list<PendingRelease> pending_;  // by id
  PendingRelease* oldest_ = nullptr;   // of the first lane; lanes are linked by the id of their oldest
  uint64_t last_ = 0;                  // the last id given
};

class StreamReleases {
 public:
  static constexpr uint64_t kSoon = 250'000'000;  // ns
  StreamReleases(PagerContext& ctx, LeaseRoom& leases);

  // Releases leases of `stream`, one for each of the ranges. Those at devices end when the stream
  // `end` reaches this point. knows_access: each range has the access of the acquire that ends.
  core::Status release(std::span<const vmem_range> ranges, void* stream, void* end, bool knows_access) VMEM_UNLOCKED;

  // Ends the releases that their streams have reached. Any number of threads may do so at once. A
  // thread that is stuck in a driver delays no other.
  void reap(Lock& lock) VMEM_LOCKED;
  // Waits until no lease at another location is in the way of one at `location`, and, at a device,
  // there is room for it. apart: the spans, with each block once. Both hold under the caller's hold
  // of the lock when this returns, so the caller must take the lease before it drops the lock.
  // Returns -EBUSY or -ENOMEM if live leases are in the way, -EINVAL if a region is being freed,
  // -ECANCELED, or, after the patience of `ask`, -EAGAIN or -EALREADY.
  core::Status wait_for_turn(Lock& lock, std::span<const BlockSpan> spans, std::span<const BlockSpan> apart,
                             int location, const AcquireRequest* ask) VMEM_LOCKED;
  // Waits until no release of the region's leases is pending, or, for a scan that may give up, until
  // those that are pending now have ended. Does not wait for live leases.
  void wait_for_region(Lock& lock, Region& r, RangeScan* scan = nullptr) VMEM_LOCKED;
  // Waits until the releases of the block for writing that are pending now have ended. Returns false
  // if the scan gives up before.
  bool wait_for_block(Lock& lock, Region& r, core::BlockIndex b, RangeScan* scan) VMEM_LOCKED;
  // Sets *wait if blocks of the spans are stale at their device and about to leave it. Returns
  // -EBUSY if a live lease keeps one there.
  core::Status check_device_stale(std::span<const BlockSpan> spans, bool* wait) VMEM_LOCKED;

  bool empty() const VMEM_LOCKED { return pending_.empty(); }
  // Whether releases of device d are pending and its streams make progress: the last release ended,
  // or the oldest of a lane was made, less than kSoon ago. A caller that can wait for their room
  // does not evict blocks that are to stay.
  bool end_soon(int d, uint64_t now_ns) const VMEM_LOCKED;
  // The region is being freed.
  void forget(const Region& r) VMEM_LOCKED { pending_.forget(r); }
  // For tests: returns what is wrong, or an empty string.
  std::string check() const VMEM_LOCKED { return pending_.check(); }

 private:
  void add(Lock& lock, std::span<const BlockSpan> spans, void* end, std::list<PendingRelease>* made,
           std::vector<PendingRelease*>* mine) VMEM_LOCKED;
  core::Status record(PendingRelease& ending, std::list<PendingRelease>* over) VMEM_UNLOCKED;
  bool a_worker_waits() VMEM_LOCKED;
  bool wait_for_span(Lock& lock, const BlockSpan& span, bool writes, RangeScan* scan) VMEM_LOCKED;
  void forget_saved(const PendingRelease& ending) VMEM_LOCKED;
  core::Status check_pending(std::span<const BlockSpan> spans, int location, bool* wait) VMEM_LOCKED;
  core::Status check_room(std::span<const BlockSpan> spans, int d, bool* wait) VMEM_LOCKED;

  PagerContext& ctx_;
  HostTier& host_;
  LeaseRoom& leases_;
  StreamReleaseQueue pending_ VMEM_GUARDED_BY(core::big_lock);
  // By device: when its last release ended.
  std::array<uint64_t, device::kMaxDevices> ended_ns_ VMEM_GUARDED_BY(core::big_lock) = {};
};

}  // namespace vmem::pager
