// Grants leases at the host and at devices, counts the memory that they keep there, and ends them.
// LeaseMap has the leases of a region; LeaseManager enters them in the budgets.
//
// - FaultReserve counts the bytes leased in host memory. The budget of a device counts those leased
//   there, and how many of them are ending. Both equal what the regions' LeaseMaps have. Each
//   LeaseMap is charged for its memory.
// - A span is granted, released or taken back as a whole, or not at all.
//
// Called under the pager's lock. The policies learn of a change by BlockMap::match_holds(). The
// caller calls it afterwards; it drops the lock at times.
#pragma once

#include <pthread.h>

#include <cstdint>
#include <list>
#include <span>
#include <string>
#include <vector>

#include "device/device.h"
#include "pager/account/context.h"
#include "pager/account/device_set.h"
#include "pager/block/requests.h"

namespace vmem::pager {

// A release that the stream has not reached.
struct PendingRelease {
  uint64_t id = 0;  // ascending
  int device = -1;
  void* stream = nullptr;  // whose leases
  void* end = nullptr;     // the stream that has to reach it; as a rule the same
  pthread_t thread = {};   // that released: a stream reaches one thread's releases in order
  bool recorded = false;   // `ticket` is set; until then the releasing thread is in the driver
  bool oldest = false;     // of its lane
  uint64_t since_ns = 0;
  device::Ticket ticket;  // empty: over
  std::vector<BlockSpan> spans;
  // Links in StreamReleaseQueue: the next of the lane. In the oldest of a lane: the last of the
  // lane, and the oldest of the next lane.
  PendingRelease* next_in_lane = nullptr;
  PendingRelease *last_in_lane = nullptr, *next_oldest = nullptr;
  std::list<PendingRelease>::iterator self;
  bool same_lane(const PendingRelease& e) const {
    return device == e.device && end == e.end && pthread_equal(thread, e.thread) != 0;
  }
};

class LeaseManager {
 public:
  explicit LeaseManager(PagerContext& ctx);

  // The caller has made sure of room on a device. Returns -EBUSY if the span is leased at another
  // location, or -ENOMEM if the host budget has no room or there is no memory for bookkeeping.
  core::Status grant(const BlockSpan& span, unsigned access, int location, void* stream) VMEM_LOCKED;
  // Undoes a grant().
  void take_back(const BlockSpan& span, unsigned access, int location, void* stream) VMEM_LOCKED;

  // Takes one acquire of each block of the spans away. At a device the lease is ending from here
  // on, and its spans are added to `pending`, which has an entry for each device. On error all is
  // as before:
  // - -EINVAL: a block has no such lease.
  // - -ENOMEM: no memory for bookkeeping.
  // - -ENOBUFS: `pending` has no room. The caller makes room without the lock and tries again; no
  //   call reports this.
  // asked: null, or the access of the acquires of each span.
  core::Status release(Lock& lock, std::span<const BlockSpan> spans, const vmem_range* asked, void* stream,
                       std::list<PendingRelease>* pending) VMEM_LOCKED;
  // Undoes a release at a device.
  void revive(const PendingRelease& ending) VMEM_LOCKED;
  // The stream has reached the release.
  void end(const PendingRelease& ending) VMEM_LOCKED;
  // The region is being freed, and is not found any more.
  void forget(Lock& lock, const Region& r) VMEM_LOCKED;

  // For messages: names regions that have leases, and how much is leased in each.
  core::OwnString holders() VMEM_LOCKED;
  // For tests: recounts what is leased in host memory (DeviceSet does so for devices). Returns what
  // is wrong, or an empty string.
  std::string check() VMEM_LOCKED;

 private:
  void count(const Region& r, int location, uint64_t leased, uint64_t ending, bool more) VMEM_LOCKED;

  PagerContext& ctx_;
};

// Calls each(first, last, location) for each run of [first, end) at one location, until it returns
// false. All blocks of the range must be leased.
template <typename Each>
void each_leased_run(const LeaseMap& leases, core::BlockIndex first, core::BlockIndex end, Each each) {
  while (first < end) {
    const int location = leases.find(first)->front().location;
    core::BlockIndex last = first;
    leases.visit(first, end - 1, [&](core::BlockIndex, core::BlockIndex to, const Leases& l) {
      if (l.front().location != location) return false;
      last = to;
      return true;
    });
    if (!each(first, last, location)) return;
    first = last + 1;
  }
}

}  // namespace vmem::pager
