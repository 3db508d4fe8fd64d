// Reports where blocks are and what has happened, to callers and to observers outside the process.
//
// - A query changes nothing, except that it ends leases whose streams have got to their release.
#pragma once

#include "pager/calls/snapshot.h"
#include "pager/lease/stream_releases.h"
#include "pager/tier/device_blocks.h"
#include "vmem/vmem.h"

namespace vmem::pager {

struct Calls;
struct DeviceTier;
struct HostTier;
struct LeaseRoom;

class Query {
 public:
  Query(PagerContext& ctx, Calls& calls);

  Status query(const void* ptr, size_t size, vmem_residency* out) VMEM_UNLOCKED;
  void stats(struct vmem_stats* out) VMEM_UNLOCKED;
  Status device_stats(int d, struct vmem_device_stats* out) VMEM_UNLOCKED;
  // Walks only the regions: tables count their states as these change.
  void census(size_t max_regions, Snapshot* out) VMEM_UNLOCKED;

 private:
  PagerContext& ctx_;
  HostTier& host_;
  LeaseRoom& leases_;
  DeviceTier& tier_;
};

}  // namespace vmem::pager
