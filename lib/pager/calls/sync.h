// Writes on request: vmem_sync, vmem_evict, and the changes of a shared file before its region
// goes.
//
// - A sync reports once what was not written: first a failure in the range, also a lost block; else
//   a background write that failed; else that blocks were skipped.
// - A region stays while it is written.
#pragma once

#include "pager/calls/range_flush.h"

namespace vmem::pager {

struct Calls;
struct HostTier;
struct LeaseRoom;

class Sync {
 public:
  Sync(PagerContext& ctx, Calls& calls);

  core::Status sync(const void* ptr, size_t size) VMEM_UNLOCKED;
  core::Status sync_all() VMEM_UNLOCKED;
  // location: where the blocks go, VMEM_HOST or VMEM_SSD.
  core::Status evict(const void* ptr, size_t size, int location) VMEM_UNLOCKED;
  // Drops the lock. Writes changed blocks of a shared file whose region is to be freed; force: also
  // leased ones. Returns -EBUSY if the region is leased while it writes.
  core::Status write_for_free(Lock& lock, Region& r, bool force) VMEM_LOCKED;

 private:
  template <typename With>
  bool for_each_region(With with) VMEM_LOCKED;
  core::Status flush_files(Lock& lock) VMEM_LOCKED;
  core::Status take_for_free(Lock& lock, Region& r) VMEM_LOCKED;
  core::Status take_error(Region& r) VMEM_LOCKED;
  core::Status sync_blocks(Lock& lock, const BlockSpan& span, bool* skipped) VMEM_LOCKED;

  PagerContext& ctx_;
  HostTier& host_;
  LeaseRoom& leases_;
  Calls& calls_;
};

}  // namespace vmem::pager
