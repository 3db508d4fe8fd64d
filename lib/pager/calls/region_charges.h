// Charges what a region needs of the host budget besides its blocks: tables; frames, transitions
// and queues, so that its blocks can move without asking for memory; buffers; and its part of the
// reserve. A region gets all of it when it is made, or is not made.
//
// - credit() gives back what charge() took. A charge() that fails takes nothing.
// - A region's table grows by a page when the first of 128 blocks is used (MetadataCharges). If the
//   budget has no room for that page beside what blocks need to move at all, the access gets
//   SIGBUS, with the numbers in the log, and an acquire gets -ENOMEM. All that is there already
//   goes on.
// - A region keeps what it was granted when it was made, so a sparse region takes nothing from
//   others.
#pragma once

#include "pager/account/device_queues.h"
#include "pager/account/device_set.h"
#include "pager/host/memory_waits.h"
#include "pager/host/readahead.h"

namespace vmem::pager {

struct Calls;
struct HostTier;

class RegionCharges {
 public:
  RegionCharges(PagerContext& ctx, Calls& calls);

  // Charges a new region, which no other thread knows yet. mark: of the wait for its memory, from
  // FaultDeadline::look(). Returns 0, or -ENOMEM with the numbers of why it does not fit.
  core::Status charge(Lock& lock, Region& r, uint64_t mark) VMEM_LOCKED;
  // Requires that nothing of the region uses memory any more.
  void credit(Region& r) VMEM_LOCKED;

 private:
  bool reserve_blocks(Lock& lock, Region& r) VMEM_LOCKED;
  core::Status want_buffers(Lock& lock, Region& r, uint64_t mark) VMEM_LOCKED;

  PagerContext& ctx_;
  HostTier& host_;
};

// Returns -ENOMEM with a message.
core::Status no_memory_for_region(size_t size);

}  // namespace vmem::pager
