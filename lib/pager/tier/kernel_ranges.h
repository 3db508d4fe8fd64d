// Opens and closes ranges for kernels that request their blocks while they run.
//
// - Region::kernels counts the open ranges of a region, StagingPoolSet::kernel_ranges all of them.
//   Only shutdown frees a region with open ranges.
#pragma once

#include "pager/tier/device_blocks.h"
#include "pager/tier/kernel_range.h"

namespace vmem::pager {

struct DeviceTier;

class KernelRanges {
 public:
  KernelRanges(PagerContext& ctx, DeviceTier& tier);

  // Opens a range for kernels of device d; range.access says what they do. budget: bytes leased at
  // once; 0 means half of the device's limit.
  Status open(const vmem_range& range, int d, uint64_t budget, KernelRange* out) VMEM_UNLOCKED;
  // Call this when no kernel requests blocks any more and none are leased.
  void close(KernelRange* range) VMEM_UNLOCKED;
  // Says that no kernel stored to these blocks. They are still leased for writing by a request that
  // reports stores.
  void not_changed(std::span<const vmem_range> ranges, int d) VMEM_UNLOCKED;

 private:
  Status check(const BlockSpan& span, unsigned access, int d, uint64_t budget) VMEM_LOCKED;

  PagerContext& ctx_;
  DeviceTier& tier_;
};

}  // namespace vmem::pager
