// Threads that wait for one block. Each sleeps in a BlockWaiter on its own stack. It is woken when
// the transition of that block ends, and not when any other does.
//
// - A waiting thread is in the list from the construction of its BlockWaiter to its destruction.
//
// Not thread-safe: the pager's lock protects both classes. Needs no memory.
#pragma once

#include <condition_variable>
#include <cstddef>

#include "core/types.h"

namespace vmem::pager {

struct Region;
class BlockWaiter;

class BlockWaiters {
 public:
  // Wakes the threads that wait for the block. Returns their number.
  inline size_t wake(const Region& region, core::BlockIndex block);
  // Wakes every thread: a region is being freed, a lease ended.
  inline void wake_all();
  bool empty() const { return first_ == nullptr; }
  inline bool any(const Region& region, core::BlockIndex block) const;

 private:
  friend class BlockWaiter;
  BlockWaiter* first_ = nullptr;
};

class BlockWaiter {
 public:
  BlockWaiter(BlockWaiters& all, const Region& region, core::BlockIndex block)
      : all_(all), region_(region), block_(block), next_(all.first_) {
    if (next_ != nullptr) next_->previous_ = this;
    all.first_ = this;
  }
  ~BlockWaiter() {
    (previous_ != nullptr ? previous_->next_ : all_.first_) = next_;
    if (next_ != nullptr) next_->previous_ = previous_;
  }
  BlockWaiter(const BlockWaiter&) = delete;
  BlockWaiter& operator=(const BlockWaiter&) = delete;

  std::condition_variable changed;

 private:
  friend class BlockWaiters;
  BlockWaiters& all_;
  const Region& region_;
  const core::BlockIndex block_;
  BlockWaiter* next_;
  BlockWaiter* previous_ = nullptr;
};

inline size_t BlockWaiters::wake(const Region& region, core::BlockIndex block) {
  size_t woken = 0;
  for (BlockWaiter* w = first_; w != nullptr; w = w->next_) {
    if (&w->region_ != &region || w->block_ != block) continue;
    w->changed.notify_one();
    ++woken;
  }
  return woken;
}

inline bool BlockWaiters::any(const Region& region, core::BlockIndex block) const {
  const BlockWaiter* w = first_;
  while (w != nullptr && (&w->region_ != &region || w->block_ != block)) w = w->next_;
  return w != nullptr;
}

inline void BlockWaiters::wake_all() {
  for (BlockWaiter* w = first_; w != nullptr; w = w->next_) w->changed.notify_one();
}

}  // namespace vmem::pager
