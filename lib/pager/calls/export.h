// Memory of leased blocks handed out of the process.
//
//   a block is claimed while that is done, as for a transition: it neither leaves nor changes hands meanwhile
//
// Afterwards it comes and goes as any other; that its memory is not another block's next is the device's business.
#pragma once

#include "pager/lease/stream_releases.h"
#include "pager/tier/device_blocks.h"

namespace vmem::pager {

class Export : private Shared {
 public:
  // devices: null: there is no device tier.
  Export(const Shared& shared, device::Devices* devices, DeviceSet& gpus, DeviceBlocks& blocks, PageIn& page_in,
         StreamReleases& releases)
      : Shared(shared), devices_(devices), device_set_(gpus), blocks_(blocks), page_in_(page_in), releases_(releases) {}

  // All of the range is under live leases at one device.
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
