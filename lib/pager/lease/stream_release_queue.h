// Releases of leases at devices that their streams have not reached. The leases end when the
// streams do.
//
// - Releases are in the order in which they were made.
// - A lane is what one thread releases on one stream of a device. The stream reaches the releases
//   of a lane in order, so only the first, the oldest, is worth polling.
//
// The cost of a call depends on the number of lanes, and not on how far behind their streams are: a
// stream that is held may have a thousand releases. any(), count() and forget() look at all releases.
//
// Not thread-safe: the pager's lock protects it. Needs no memory: entries come from lists of the
// callers and return to such lists, because the device tickets in them must end without the lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <span>
#include <string>

#include "pager/block/transition.h"

namespace vmem::pager {

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

}  // namespace vmem::pager
