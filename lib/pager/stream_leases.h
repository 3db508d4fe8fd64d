// Leases at devices that were released and whose streams have not got there: they end when those do.
//
//   in the order of the releases; of those of one lane (what one thread puts on one stream of a device), which the
//   stream gets to in that order, the first alone is the oldest, and alone is worth a question
//
// Not thread-safe: the pager's lock protects it. Needs no memory: entries come from their callers' lists, and go to
// such lists, because what they hold of a device ends without the lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <span>
#include <string>

#include "pager/moves.h"

namespace vmem::pager {

class StreamLeases {
 public:
  bool empty() const { return endings_.empty(); }
  size_t size() const { return endings_.size(); }
  // Some of the region's.
  bool any(const Region& r) const;

  // One more release, out of `from`; its device, stream and thread are known, and it gets its number.
  void add(std::list<Ending>& from, std::list<Ending>::iterator release);
  // Those whose streams are to be asked, in order, behind number `after`. How many there are, out.size() at most.
  size_t oldest(uint64_t after, std::span<const Ending*> out) const;
  const Ending* find(uint64_t id) const;  // null: it has ended
  // The stream has got there, or it is not to be: the next of its lane is the oldest.
  void end(const Ending& release, std::list<Ending>* to);
  // The region goes; its leases are not asked for any more.
  void forget(const Region& r);

  // Tests: what is wrong; empty: nothing.
  std::string check() const;

 private:
  std::list<Ending> endings_;  // by id
  uint64_t last_ = 0;          // id
};

}  // namespace vmem::pager
