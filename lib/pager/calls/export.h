// Hands memory of leased blocks out of the process.
//
// - A block is claimed during the export, as for a transition: it neither leaves nor changes its
//   owner.
// - Afterwards it comes and goes as any other block. The device does not give exported memory to
//   another block.
#pragma once

#include "pager/lease/stream_releases.h"
#include "pager/tier/device_blocks.h"

namespace vmem::pager {

class Export : private Shared {
 public:
  // devices: null if there is no device tier.
  Export(const Shared& shared, device::Devices* devices, DeviceSet& gpus, DeviceBlocks& blocks, PageIn& page_in,
         StreamReleases& releases)
      : Shared(shared), devices_(devices), device_set_(gpus), blocks_(blocks), page_in_(page_in), releases_(releases) {}

  // Requires live leases at one device on all of the range.
  Status export_range(const void* ptr, size_t size, device::Export how, int* descriptor) VMEM_UNLOCKED;

 private:
  Status exported_from(const BlockSpan& span, int* device) VMEM_LOCKED;

  device::Devices* const devices_;
  DeviceSet& device_set_;
  DeviceBlocks& blocks_;
  PageIn& page_in_;
  StreamReleases& releases_;
};

}  // namespace vmem::pager
