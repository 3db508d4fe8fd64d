// Who waits for memory: blocks that a fault or an acquire wants, in the order in which they are served, and when a wait
// is given up. Memory that comes free is given to the first of them (MemoryFreed), not here.
//
//   whoever waits has called the reclaim threads; a fault that waited for the whole time-out, while nothing went on and
//   nothing can, gets SIGBUS, and the block's contents are intact; one whose block is staged waits on
//
// The pager's lock protects it.
#pragma once

#include <cstdint>

#include "pager/account/shared.h"
#include "pager/host/failed_blocks.h"
#include "pager/host/memory_pressure.h"
#include "pager/host/memory_wait_queue.h"

namespace vmem::pager {

// What those who need memory ask of those above them.
class MemoryFreed {
 public:
  // Memory or a buffer came free: whoever waits for it is served, the most urgent first.
  virtual void memory_freed(DeferredWork& after) VMEM_LOCKED = 0;
  // A staging frame for a block of the region while more than `keep` are free, or one that is had without waiting.
  virtual std::byte* staging_frame(const Region& r, size_t keep) VMEM_LOCKED = 0;

 protected:
  ~MemoryFreed() = default;
};

class MemoryWaits : private Shared {
 public:
  MemoryWaits(const Shared& shared, MemoryPressure& pressure, FailedBlocks& failed)
      : Shared(shared), pressure_(pressure), failed_(failed) {}

  // The block waits. Since since_ns, if given: a wait that was interrupted by a try that failed is one wait. False:
  // there is no memory to remember it by, and nothing has changed.
  bool starve(Region& r, core::BlockIndex b, core::Urgency urgency, uint64_t since_ns = 0, uint64_t mark = 0,
              uint32_t thread = 0) VMEM_LOCKED;
  // .. for a fault. False: the access is made again, and is reported again.
  bool starve_fault(Region& r, core::BlockIndex b, uint64_t since_ns = 0, uint64_t mark = 0,
                    uint32_t thread = 0) VMEM_LOCKED;
  MemoryWaitQueue& queue() VMEM_LOCKED { return queue_; }

  // What is free now is for a larger block, which has waited long.
  bool overtakes(const Region& r) const VMEM_LOCKED;
  // Somebody waits for memory, or will soon: reclaim threads have work.
  bool must_evict() const VMEM_LOCKED;
  // Faults that wait while nothing goes on get SIGBUS after the time-out; sooner where a system call has pinned most
  // of the budget and wants more. Locked on entry and on return. True: one did,
  // and who waits behind it may be served.
  bool check_starved(Lock& lock, uint64_t now_ns) VMEM_LOCKED;

 private:
  uint64_t pinned_bytes() const VMEM_LOCKED;
  bool waits_for_itself(Lock& lock, uint64_t now_ns) VMEM_LOCKED;
  core::Status given_up(const MemoryWaiter& s) VMEM_LOCKED;

  MemoryPressure& pressure_;
  FailedBlocks& failed_;
  MemoryWaitQueue queue_ VMEM_GUARDED_BY(core::big_lock);
  uint64_t next_look_ns_ VMEM_GUARDED_BY(core::big_lock) = 0;  // at what the first that waits is in
};

}  // namespace vmem::pager
