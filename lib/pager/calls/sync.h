// Writing on request: vmem_sync and vmem_evict, and what a shared file gets before its region goes.
//
//   a sync tells, once, what was not written: what the range itself met first, else a write in the background that
//   failed, else that blocks were skipped; what is lost in the range is told, too
//   a region stays while it is written
#pragma once

#include "pager/account/device_queues.h"
#include "pager/calls/range_flush.h"

namespace vmem::pager {

class Sync : private Shared {
 public:
  // requests: for promotion; sums: of what regions there were: under the lock.
  Sync(const Shared& shared, PooledList<PromotionRequest>& requests, const RegionTotals& sums, FailedBlocks& failed,
       StreamReleases& releases, RangeDemoter& range_demoter, RangeFlush& range_writer)
      : Shared(shared),
        requests_(requests),
        sums_(sums),
        failed_(failed),
        releases_(releases),
        range_demoter_(range_demoter),
        range_flush_(range_writer) {}

  core::Status sync(const void* ptr, size_t size) VMEM_UNLOCKED;
  core::Status sync_all() VMEM_UNLOCKED;
  // location: VMEM_HOST or VMEM_SSD, where the blocks go.
  core::Status evict(const void* ptr, size_t size, int location) VMEM_UNLOCKED;
  // Locked on entry and on return, and not meanwhile. Changed blocks of a shared file whose region is to be freed;
  // force: whoever leases it. -EBUSY: it is leased meanwhile.
  core::Status write_for_free(Lock& lock, Region& r, bool force) VMEM_LOCKED;

 private:
  template <typename With>
  bool for_each_region(With with) VMEM_LOCKED;
  core::Status flush_files(Lock& lock) VMEM_LOCKED;
  core::Status take_for_free(Lock& lock, Region& r) VMEM_LOCKED;
  core::Status take_error(Region& r) VMEM_LOCKED;
  core::Status sync_blocks(Lock& lock, const BlockSpan& span, bool* skipped) VMEM_LOCKED;

  PooledList<PromotionRequest>& requests_;
  const RegionTotals& sums_;
  FailedBlocks& failed_;
  StreamReleases& releases_;
  RangeDemoter& range_demoter_;
  RangeFlush& range_flush_;
};

}  // namespace vmem::pager
