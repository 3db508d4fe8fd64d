// A range that is open to kernels that ask for its blocks while they run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "device/paging_words.h"

namespace vmem::pager {

// From KernelRanges::open() until close() its region cannot be freed but by shutdown. The pager does nothing about
// requests: who opened it serves them, with leases.
struct KernelRange {
  uintptr_t first = 0, end = 0;  // addresses of block 0, and behind the last byte: its block may be longer
  size_t block_size = 0;
  uint32_t blocks = 0, frames = 0;  // a group may ask for `frames` at once
  uint32_t readahead = 0;           // blocks, at most, for a stream of requests
  int device = 0;
  uint64_t region = 0;  // id
  std::unique_ptr<device::PagingWords> words;
};

}  // namespace vmem::pager
