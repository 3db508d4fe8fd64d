// Grants leases at the host and at devices, counts what they keep there, and ends them. LeaseMap has the leases of a
// region; here is what they mean for the budgets.
//
//   FaultReserve counts what is leased in host memory, the budget of a device what is leased there and what of that is
//   ending: what the regions' tables of leases have, recounted; and each table is charged with what it needs
//   a span is granted, released or given back as a whole, or nothing of it is
//
// Called under the pager's lock. The policies learn of it by BlockMap::match_holds(), which comes after what is done
// here and gives way.
#pragma once

#include <list>
#include <span>
#include <string>

#include "pager/account/device_set.h"
#include "pager/account/shared.h"

namespace vmem::pager {

class LeaseManager : private Shared {
 public:
  LeaseManager(const Shared& shared, DeviceSet& gpus) : Shared(shared), device_set_(gpus) {}

  // Room on a device has been made sure of. -EBUSY: it is leased at another location; -ENOMEM: the host budget, or the
  // memory to know it by, has no room.
  core::Status grant(const BlockSpan& span, unsigned access, int location, void* stream) VMEM_LOCKED;
  // The acquire is as if it had never been.
  void take_back(const BlockSpan& span, unsigned access, int location, void* stream) VMEM_LOCKED;

  // Takes one acquire of each block of the spans away: at a device the lease is ending from here on, and its spans are
  // noted in `pending`, one for each device. Where that cannot be all is as it was: -EINVAL; ENOBUFS (never told to
  // anybody): there is no room in `pending`, which the caller makes without the lock.
  // asked: null, or of the acquires of each span.
  core::Status release(Lock& lock, std::span<const BlockSpan> spans, const vmem_range* asked, void* stream,
                       std::list<PendingRelease>* pending) VMEM_LOCKED;
  // Of a release that is not to be.
  void revive(const PendingRelease& ending) VMEM_LOCKED;
  // Its stream has got there.
  void end(const PendingRelease& ending) VMEM_LOCKED;
  // The region goes, and is not found any more.
  void forget(Lock& lock, const Region& r) VMEM_LOCKED;

  // For messages: which regions have how much under leases.
  core::OwnString holders() VMEM_LOCKED;
  // Tests: recounts what is leased in host memory; of devices DeviceSet does. What is wrong; empty: nothing.
  std::string check() VMEM_LOCKED;

 private:
  void count(const Region& r, int location, uint64_t leased, uint64_t ending, bool more) VMEM_LOCKED;

  DeviceSet& device_set_;
};

// The blocks of a range that are leased, in runs at one location, until each(first, last, location) returns false.
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
