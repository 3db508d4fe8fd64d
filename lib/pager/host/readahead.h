// What is read before anybody accesses it: the windows of streams, the neighbours of a block that is missed, and what
// a prefetch asks for; and what faults tell of how regions are used. policy::ReadAhead and policy::FaultAround decide.
//
//   what is read ahead and not used yet is no more than the budget allows (HostBudget::ahead_limit), and what nobody
//   comes for leaves first
//
// The pager's lock protects it.
#pragma once

#include <cstdint>

#include "pager/account/shared.h"
#include "pager/host/page_in.h"
#include "pager/host/readahead_queue.h"
#include "pager/host/reclaim_requests.h"

namespace vmem::pager {

class Readahead : private Shared {
 public:
  Readahead(const Shared& shared, MemoryWaits& waits, PageIn& page_in, ReadaheadQueue& speculation,
            ReclaimRequests& reclaim_requests, MemoryPressure& pressure)
      : Shared(shared),
        waits_(waits),
        page_in_(page_in),
        readahead_queue_(speculation),
        reclaim_requests_(reclaim_requests),
        pressure_(pressure) {}

  // A block is accessed: if it was read ahead, that was worth it, as it was for those of its stream before it.
  void used(Region& r, core::BlockIndex b) VMEM_LOCKED;
  // A block is missed, or the trigger of a window is met: what follows from that.
  void follow(Region& r, core::BlockIndex b, bool trigger) VMEM_LOCKED;
  // Block b is being read for a fault, `reads` has its transition: with it what lies beside it, where that is how the
  // region is used.
  void read_beside(Region& r, core::BlockIndex b, TransitionList& reads) VMEM_LOCKED;

  // Blocks that are to be read; pump_speculative() begins as much of it as there is room for.
  void speculate(Region& r, const policy::Window& w, core::Urgency urgency) VMEM_LOCKED;
  void pump_speculative(DeferredWork& after) VMEM_LOCKED;

 private:
  void pass(Region& r, const policy::Run& run, bool used) VMEM_LOCKED;
  void give_up_idle(uint64_t bytes) VMEM_LOCKED;
  void drop_behind(Region& r) VMEM_LOCKED;

  MemoryWaits& waits_;
  PageIn& page_in_;
  ReadaheadQueue& readahead_queue_;
  ReclaimRequests& reclaim_requests_;
  MemoryPressure& pressure_;
  uint64_t looked_ahead_ VMEM_GUARDED_BY(core::big_lock) =
      0;  // the clock when streams that nobody reads were last looked for
};

}  // namespace vmem::pager
