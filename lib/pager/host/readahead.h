// Reads blocks before they are accessed: the windows of streams, the neighbours of a missed block,
// and what a prefetch asks for. Tells the policies of faults: policy::ReadAhead and
// policy::FaultAround decide what to read.
//
// - Blocks that were read ahead and are not used yet have at most HostBudget::ahead_limit bytes.
//   Those that no stream comes for leave first.
//
// The pager's lock protects this class.
#pragma once

#include <cstdint>

#include "pager/account/context.h"
#include "pager/host/page_in.h"
#include "pager/host/readahead_queue.h"
#include "pager/host/reclaim_requests.h"

namespace vmem::pager {

struct HostTier;

class Readahead {
 public:
  Readahead(PagerContext& ctx, HostTier& host);

  // A block is accessed. If it was read ahead, counts it as used, and the blocks of its stream
  // before it.
  void used(Region& r, core::BlockIndex b) VMEM_LOCKED;
  // A block is missed, or a marker is met: tells the streams, and queues the next window.
  void follow(Region& r, core::BlockIndex b, bool trigger) VMEM_LOCKED;
  // Block b is being read for a fault, and `reads` has its transition. If the region is used in
  // larger pieces, adds reads of the blocks beside b.
  void read_beside(Region& r, core::BlockIndex b, TransitionList& reads) VMEM_LOCKED;

  // speculate() queues blocks to be read. pump_speculative() begins as many reads as there is room
  // for.
  void speculate(Region& r, const policy::Window& w, core::Urgency urgency) VMEM_LOCKED;
  void pump_speculative(DeferredWork& after) VMEM_LOCKED;

 private:
  void pass(Region& r, const policy::Run& run, bool used) VMEM_LOCKED;
  void give_up_idle(uint64_t bytes) VMEM_LOCKED;
  void drop_behind(Region& r) VMEM_LOCKED;

  PagerContext& ctx_;
  HostTier& host_;
  // The clock at the last search for idle streams.
  uint64_t looked_ahead_ VMEM_GUARDED_BY(core::big_lock) = 0;
};

}  // namespace vmem::pager
