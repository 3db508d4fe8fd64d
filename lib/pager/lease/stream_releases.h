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
// Called under the pager's lock, unless the annotation says otherwise. The lock is dropped while a
// driver is called.
#pragma once

#include <array>
#include <list>
#include <span>
#include <string>

#include "device/device.h"
#include "pager/account/cpu_mappings.h"
#include "pager/lease/acquire_request.h"
#include "pager/lease/lease_manager.h"
#include "pager/lease/stream_release_queue.h"

namespace vmem::pager {

struct HostTier;
struct LeaseRoom;

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
