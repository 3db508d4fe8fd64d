// Queue of blocks that wait for memory because a fault or an acquire wants them and there was none.
//
// - Faults come before acquires.
// - A queued block is marked (kWaitsForMemory). A marked block is in the queue once, or was removed
//   by take() and is not unmarked yet.
//
// Not thread-safe: the pager's lock protects it. add() needs memory unless reserve() made room.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/pooled_list.h"
#include "core/types.h"
#include "pager/block/region.h"

namespace vmem::pager {

struct MemoryWaiter {
  Region* region;
  core::BlockIndex block;
  core::Urgency urgency;
  uint64_t since_ns;
  uint64_t mark;        // StallClock's, at the start of the wait
  uint32_t thread = 0;  // the accessing thread; 0: none, or unknown
};

class MemoryWaitQueue {
 public:
  bool empty() const { return queue_.empty(); }
  size_t size() const { return queue_.size(); }
  const MemoryWaiter& front() const { return queue_.front(); }  // the next to be served
  auto begin() const { return queue_.begin(); }
  auto end() const { return queue_.end(); }
  static bool marked(const core::Block& block) { return (block.flags & core::kWaitsForMemory) != 0; }

  // Makes room for so many entries. Returns false if there is no memory.
  [[nodiscard]] bool reserve(size_t entries) noexcept { return queue_.reserve(entries); }
  // Queues a block behind those of the same urgency. An acquire of a queued block changes nothing;
  // a fault replaces its entry. Returns false if there is no memory; then the block does not wait.
  [[nodiscard]] bool add(const MemoryWaiter& what);
  // Removes the front, which was served or is no longer wanted.
  void pop();
  // The front could not be served: its wait begins anew, behind those of the same urgency.
  void wait_again(uint64_t now_ns, uint64_t mark);
  // Removes the front, which stays marked until unmark() so that later requests for the block wait.
  void take();
  void unmark(Region& r, core::BlockIndex b);
  // Removes an acquire that has given up. A fault that has replaced it waits on.
  void give_up_acquire(Region& r, core::BlockIndex b);
  // Removes the entries of a region that is being freed. The marks go with its table.
  void forget(const Region& r);

  // For tests. Returns the first error, or an empty string.
  std::string check() const;
  // For tests. Returns true if the mark of the block is justified.
  bool accounts_for(const Region& r, core::BlockIndex b) const;

 private:
  PooledList<MemoryWaiter>::iterator behind(core::Urgency urgency);

  PooledList<MemoryWaiter> queue_;
  size_t taken_ = 0;  // blocks that take() removed and that are still marked
};

}  // namespace vmem::pager
