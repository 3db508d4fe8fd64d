// Reports where blocks are and what has happened, to callers and to observers outside the process.
//
// - A query changes nothing, except that it ends leases whose streams have got to their release.
#pragma once

#include "pager/calls/snapshot.h"
#include "pager/lease/stream_releases.h"
#include "pager/tier/device_blocks.h"
#include "vmem/vmem.h"

namespace vmem::pager {

class Query : private Shared {
 public:
  // devices: null if there is no device tier.
  Query(const Shared& shared, device::Devices* devices, DeviceSet& gpus, DeviceBlocks& blocks, FailedBlocks& failed,
        StreamReleases& releases)
      : Shared(shared), devices_(devices), device_set_(gpus), blocks_(blocks), failed_(failed), releases_(releases) {}

  Status query(const void* ptr, size_t size, vmem_residency* out) VMEM_UNLOCKED;
  void stats(struct vmem_stats* out) VMEM_UNLOCKED;
  Status device_stats(int d, struct vmem_device_stats* out) VMEM_UNLOCKED;
  // Walks only the regions: tables count their states as these change.
  void census(size_t max_regions, Snapshot* out) VMEM_UNLOCKED;

 private:
  device::Devices* const devices_;
  DeviceSet& device_set_;
  DeviceBlocks& blocks_;
  FailedBlocks& failed_;
  StreamReleases& releases_;
};

}  // namespace vmem::pager
