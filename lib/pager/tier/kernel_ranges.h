// Ranges that are opened to kernels that ask for their blocks while they run.
//
//   Region::kernels counts those in it, and StagingPoolSet::open_ranges all: their regions are not freed but by
//   shutdown
//
#pragma once

#include "pager/tier/device_blocks.h"
#include "pager/tier/kernel_range.h"

namespace vmem::pager {

class KernelRanges : private Shared {
 public:
  // devices: null: there is no device tier.
  KernelRanges(const Shared& shared, device::Devices* devices, DeviceSet& gpus, DeviceBlocks& blocks)
      : Shared(shared), devices_(devices), device_set_(gpus), blocks_(blocks) {}

  // For kernels of device d; range.access: what they do. budget: bytes of leases at once; 0: half of what the device
  // has for libvmem.
  Status open(const vmem_range& range, int d, uint64_t budget, KernelRange* out) VMEM_UNLOCKED;
  // No kernel asks any more, and nothing is leased.
  void close(KernelRange* range) VMEM_UNLOCKED;
  // Blocks that are leased for writing by an ask that tells of stores, before the end, and that nobody has stored to.
  void not_changed(std::span<const vmem_range> ranges, int d) VMEM_UNLOCKED;

 private:
  Status check(const BlockSpan& span, unsigned access, int d, uint64_t budget) VMEM_LOCKED;

  device::Devices* const devices_;
  DeviceSet& device_set_;
  DeviceBlocks& blocks_;
};

}  // namespace vmem::pager
