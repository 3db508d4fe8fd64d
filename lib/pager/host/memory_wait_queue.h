// Blocks that wait for memory: a fault or an acquire wants them, and there was none.
//
//   faults are in front of acquires; a block that is in the queue is marked (kWaitsForMemory); one that is marked is in
//   it once, or was taken out by who says that it waited too long, and that is not over
//
// Not thread-safe: the pager's lock protects it. Needs memory for an entry more than reserve() made room for.
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
  uint64_t mark;        // of StallClock
  uint32_t thread = 0;  // whose access it is, 0: nobody's, or not known
};

class MemoryWaitQueue {
 public:
  bool empty() const { return queue_.empty(); }
  size_t size() const { return queue_.size(); }
  const MemoryWaiter& front() const { return queue_.front(); }  // whose turn it is
  auto begin() const { return queue_.begin(); }
  auto end() const { return queue_.end(); }
  static bool marked(const core::Block& block) { return (block.flags & core::kWaitsForMemory) != 0; }

  // Room for so many. False: no memory for that.
  [[nodiscard]] bool reserve(size_t entries) noexcept { return queue_.reserve(entries); }
  // Behind those that are as urgent: faults are served before acquires. A block that waits already goes on as it does,
  // but that a fault takes the place of an acquire. False: no memory, and the block does not wait.
  [[nodiscard]] bool add(const MemoryWaiter& what);
  // It was served, or nobody wants it any more.
  void pop();
  // It could not be served, and goes on waiting from now on: behind those that are as urgent.
  void wait_again(uint64_t now_ns, uint64_t mark);
  // The front, out of the queue and marked until unmark(): whoever wants it meanwhile waits.
  void take();
  void unmark(Region& r, core::BlockIndex b);
  // The acquire that wanted it has given up. Where a fault has taken its place, that waits on.
  void give_up_acquire(Region& r, core::BlockIndex b);
  // The region goes, with its marks.
  void forget(const Region& r);

  // Tests: what is wrong; empty: nothing.
  std::string check() const;
  // .. and of a block that is marked.
  bool accounts_for(const Region& r, core::BlockIndex b) const;

 private:
  PooledList<MemoryWaiter>::iterator behind(core::Urgency urgency);

  PooledList<MemoryWaiter> queue_;
  size_t taken_ = 0;  // marked, and in no queue
};

}  // namespace vmem::pager
