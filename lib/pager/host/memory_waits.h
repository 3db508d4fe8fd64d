// Waits for memory: the queue of blocks that a fault or an acquire wants and that found none, and
// when a wait is given up. Pager::memory_freed hands freed memory to the first waiter.
//
// - A block that begins to wait wakes the reclaim threads.
// - A fault gets SIGBUS if it waited for the whole time-out while nothing made progress and nothing
//   can. The contents of its block are intact. A fault on a staged block waits on instead.
//
// The pager's lock protects both classes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "pager/account/context.h"
#include "pager/block/pooled_list.h"
#include "pager/host/failed_blocks.h"
#include "pager/host/memory_pressure.h"

namespace vmem::pager {

struct HostTier;

struct MemoryWaiter {
  Region* region;
  core::BlockIndex block;
  core::Urgency urgency;
  uint64_t since_ns;
  uint64_t mark;        // StallClock's, at the start of the wait
  uint32_t thread = 0;  // the accessing thread; 0: none, or unknown
};

// - Faults come before acquires.
// - A queued block is marked (kWaitsForMemory). A marked block is in the queue once, or was removed
//   by take() and is not unmarked yet.
//
// add() needs memory unless reserve() made room.
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

class MemoryWaits {
 public:
  MemoryWaits(PagerContext& ctx, HostTier& host);

  // Queues the block. since_ns, mark: the start of a wait that a failed try interrupted, since both
  // parts are one wait; 0: the wait begins now. Returns false, with nothing changed, if there is no
  // memory for the entry.
  bool starve(Region& r, core::BlockIndex b, core::Urgency urgency, uint64_t since_ns = 0, uint64_t mark = 0,
              uint32_t thread = 0) VMEM_LOCKED;
  // The same for a fault. If it returns false, the fault is not queued: its thread repeats the
  // access, which is reported again.
  bool starve_fault(Region& r, core::BlockIndex b, uint64_t since_ns = 0, uint64_t mark = 0,
                    uint32_t thread = 0) VMEM_LOCKED;
  MemoryWaitQueue& queue() VMEM_LOCKED { return queue_; }

  // Returns true if free memory is kept for a larger block, which has waited long.
  bool overtakes(const Region& r) const VMEM_LOCKED;
  // Returns true if a block waits for memory or will soon, so that the reclaim threads have work.
  bool must_evict() const VMEM_LOCKED;
  // Gives up the first waiting fault with SIGBUS if it waited for the whole time-out without
  // progress, or earlier if it is inside a system call that has pinned most of the budget and wants
  // more. Drops and retakes the lock. Returns true if the waiters behind it may be served now.
  bool check_starved(Lock& lock, uint64_t now_ns) VMEM_LOCKED;

 private:
  uint64_t pinned_bytes() const VMEM_LOCKED;
  bool waits_for_itself(Lock& lock, uint64_t now_ns) VMEM_LOCKED;
  core::Status given_up(const MemoryWaiter& s) VMEM_LOCKED;

  PagerContext& ctx_;
  HostTier& host_;
  MemoryWaitQueue queue_ VMEM_GUARDED_BY(core::big_lock);
  uint64_t next_look_ns_ VMEM_GUARDED_BY(core::big_lock) = 0;  // when to look at the first waiter's system call again
};

}  // namespace vmem::pager
