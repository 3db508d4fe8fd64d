// A range that is open to kernels that request its blocks while they run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "device/paging_words.h"

namespace vmem::pager {

// From KernelRanges::open() until close() only shutdown can free the range's region. The pager does
// not serve the requests: the code that opened the range does, with leases.
struct KernelRange {
  uintptr_t first = 0, end = 0;  // address of block 0, end of the range; the last block may be longer
  size_t block_size = 0;
  uint32_t blocks = 0, frames = 0;  // a group may request `frames` at once
  uint32_t readahead = 0;           // at most so many blocks, for a stream of requests
  int device = 0;
  uint64_t region = 0;  // id
  std::unique_ptr<device::PagingWords> words;
};

}  // namespace vmem::pager
