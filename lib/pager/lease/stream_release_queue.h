// Leases at devices that were released and whose streams have not got there: they end when those do.
//
//   in the order of the releases; of those of one lane (what one thread puts on one stream of a device), which the
//   stream gets to in that order, the first alone is the oldest, and alone is worth a question
//
// What a call costs depends on how many lanes there are, and not on how far behind their streams are: on a stream that
// is held there may be a thousand of them. any() and forget() look at all.
//
// Not thread-safe: the pager's lock protects it. Needs no memory: entries come from their callers' lists, and go to
// such lists, because what they hold of a device ends without the lock.
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
  // Some of the region's.
  bool any(const Region& r) const;

  // One more release, out of `from`; its device, stream and thread are known, and it gets its number.
  void add(std::list<PendingRelease>& from, std::list<PendingRelease>::iterator release);
  // Those whose streams are to be asked, in order, behind number `after`. How many there are, out.size() at most.
  size_t oldest(uint64_t after, std::span<const PendingRelease*> out) const;
  const PendingRelease* find(uint64_t id) const;  // null: it has ended
  // The stream has got there, or it is not to be: the next of its lane is the oldest.
  void end(const PendingRelease& release, std::list<PendingRelease>* to);
  // The region goes; its leases are not asked for any more.
  void forget(const Region& r);

  // Tests: what is wrong; empty: nothing.
  std::string check() const;

 private:
  PendingRelease** lane_of(const PendingRelease& release);

  std::list<PendingRelease> pending_;  // by id
  PendingRelease* oldest_ = nullptr;   // the first of those that are; by id
  uint64_t last_ = 0;                  // id
};

}  // namespace vmem::pager
