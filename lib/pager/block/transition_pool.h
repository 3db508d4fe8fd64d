// All transitions. Each is free, or belongs to one block.
//
// - A transition has begun (begun_ns) if and only if it is not free.
//
// Not thread-safe: the pager's lock protects it. Only reserve() needs memory. Transitions do not
// move in memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "core/os_allocator.h"
#include "pager/block/transition.h"

namespace vmem::pager {

class TransitionPool {
 public:
  size_t size() const { return all_.size(); }
  size_t free() const { return free_.size(); }
  bool in_flight() const { return free_.size() != all_.size(); }
  std::span<const std::unique_ptr<Transition>> all() const { return {all_.data(), all_.size()}; }

  // Call before reserve(free). Returns the number of transitions for which lists of all
  // transitions must have room, or 0 if they need not grow.
  size_t grows_to(size_t free) const {
    if (free_.size() >= free) return 0;
    const size_t count = all_.size() + free - free_.size();
    return free_.capacity() < count ? std::max(count, 2 * all_.size() + 16) : 0;
  }
  // Makes sure that so many are free. Returns false if there is no memory.
  bool reserve(size_t free) noexcept;

  // Takes a free one, which must exist.
  Transition* take(Region& r, core::BlockIndex b, uint64_t now_ns);
  void give(Transition* m);

  // For tests: recounts everything. Returns what is wrong, or an empty string.
  std::string check() const;

 private:
  core::OwnVector<std::unique_ptr<Transition>> all_;
  core::OwnVector<Transition*> free_;  // has room for all: give() needs no memory
};

}  // namespace vmem::pager
