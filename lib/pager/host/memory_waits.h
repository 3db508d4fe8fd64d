// Waits for memory: the queue of blocks that a fault or an acquire wants, and when a wait is given
// up. MemoryFreed, and not this class, hands freed memory to the first waiter.
//
// - A block that begins to wait wakes the reclaim threads.
// - A fault gets SIGBUS if it waited for the whole time-out while nothing made progress and nothing
//   can. The contents of its block are intact. A fault on a staged block waits on instead.
//
// The pager's lock protects this class.
#pragma once

#include <cstdint>

#include "pager/account/context.h"
#include "pager/host/failed_blocks.h"
#include "pager/host/memory_pressure.h"
#include "pager/host/memory_wait_queue.h"

namespace vmem::pager {

struct HostTier;

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
