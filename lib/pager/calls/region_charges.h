// What a region needs of the host budget besides its blocks: tables, frames, transitions and queues so that its
// blocks can move without asking for memory, buffers, and its part of the reserve. All of it is had when the region is
// made, or the region is not.
//
//   what charge() took credit() gives back, and after a charge() that failed nothing is taken
//
// A region's table grows by a page with the first of 128 blocks that is ever used (MetadataCharges). Where the budget
// has no room for one more beside what blocks need to move at all, the access that wants it gets SIGBUS, with the
// numbers in the log, and an acquire -ENOMEM: everything that is there already goes on. What a region was granted when
// it was made it always has, so that a sparse one takes nothing from others.
#pragma once

#include "pager/account/device_queues.h"
#include "pager/account/device_set.h"
#include "pager/host/memory_waits.h"
#include "pager/host/readahead_queue.h"

namespace vmem::pager {

class RegionCharges : private Shared {
 public:
  // sums, speculation: under the lock.
  RegionCharges(const Shared& shared, RegionTotals& sums, ReadaheadQueue& speculation, DeviceSet& gpus,
                MemoryPressure& pressure, FailedBlocks& failed, MemoryWaits& waits)
      : Shared(shared),
        sums_(sums),
        readahead_queue_(speculation),
        device_set_(gpus),
        pressure_(pressure),
        failed_(failed),
        waits_(waits) {}

  // A new region, which nobody knows yet. mark: of who waits for memory for it, as FaultDeadline::look() gave it.
  // -ENOMEM says with the numbers why it does not fit.
  core::Status charge(Lock& lock, Region& r, uint64_t mark) VMEM_LOCKED;
  // Nothing of the region uses memory any more.
  void credit(Region& r) VMEM_LOCKED;

 private:
  bool reserve_blocks(Lock& lock, Region& r) VMEM_LOCKED;
  core::Status want_buffers(Lock& lock, Region& r, uint64_t mark) VMEM_LOCKED;

  RegionTotals& sums_;
  ReadaheadQueue& readahead_queue_;
  DeviceSet& device_set_;
  MemoryPressure& pressure_;
  FailedBlocks& failed_;
  MemoryWaits& waits_;
};

// There was none.
core::Status no_memory_for_region(size_t size);

}  // namespace vmem::pager
