// What is where, and what has happened: for callers and for those who watch from outside.
//
//   nothing changes by being asked for, but that leases end whose streams have got there
//
#pragma once

#include "pager/calls/snapshot.h"
#include "pager/lease/stream_releases.h"
#include "pager/tier/device_blocks.h"
#include "vmem/vmem.h"

namespace vmem::pager {

class Query : private Shared {
 public:
  // devices: null: there is no device tier.
  Query(const Shared& shared, device::Devices* devices, DeviceSet& gpus, DeviceBlocks& blocks, FailedBlocks& failed,
        StreamReleases& releases)
      : Shared(shared), devices_(devices), device_set_(gpus), blocks_(blocks), failed_(failed), releases_(releases) {}

  Status query(const void* ptr, size_t size, vmem_residency* out) VMEM_UNLOCKED;
  void stats(struct vmem_stats* out) VMEM_UNLOCKED;
  Status device_stats(int d, struct vmem_device_stats* out) VMEM_UNLOCKED;
  // Cheap: tables count their states as they change, so nothing is walked but the regions.
  void census(size_t max_regions, Snapshot* out) VMEM_UNLOCKED;

 private:
  device::Devices* const devices_;
  DeviceSet& device_set_;
  DeviceBlocks& blocks_;
  FailedBlocks& failed_;
  StreamReleases& releases_;
};

}  // namespace vmem::pager
