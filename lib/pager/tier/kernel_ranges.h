// Opens and closes ranges for kernels that request their blocks while they run.
//
// - Region::kernels counts the open ranges of a region, StagingPoolSet::kernel_ranges all of them.
//   Only shutdown frees a region with open ranges.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "device/paging_words.h"
#include "pager/tier/device_blocks.h"

namespace vmem::pager {

struct DeviceTier;

// A range that is open to such kernels. From open() until close() only shutdown can free the
// range's region. The pager does not serve the requests: the code that opened the range does, with
// leases.
struct KernelRange {
  uintptr_t first = 0, end = 0;  // address of block 0, end of the range; the last block may be longer
  size_t block_size = 0;
  uint32_t blocks = 0, frames = 0;  // a group may request `frames` at once
  uint32_t readahead = 0;           // at most so many blocks, for a stream of requests
  int device = 0;
  uint64_t region = 0;  // id
  std::unique_ptr<device::PagingWords> words;
};

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
