// The transitions there are: each is free, or some block's.
//
//   a transition has begun (begun_ns) if and only if it is not free
//
// Not thread-safe: the pager's lock protects it. reserve() needs memory; nothing else does, and transitions stay where
// they are.
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

  // How many there may be before anything that has room for all has to grow, once reserve(free) is done. 0: it does
  // not grow.
  size_t grows_to(size_t free) const {
    if (free_.size() >= free) return 0;
    const size_t count = all_.size() + free - free_.size();
    return free_.capacity() < count ? std::max(count, 2 * all_.size() + 16) : 0;
  }
  // So many are free. False: there is no memory for that.
  bool reserve(size_t free) noexcept;

  // One must be free.
  Transition* take(Region& r, core::BlockIndex b, uint64_t now_ns);
  void give(Transition* m);

  // Tests: recounts all. What is wrong; empty: nothing.
  std::string check() const;

 private:
  core::OwnVector<std::unique_ptr<Transition>> all_;
  core::OwnVector<Transition*> free_;  // room for all: giving one back needs no memory
};

}  // namespace vmem::pager
