// The contents of struct vmem_kernel_view of vmem.h: a kernel's view of a range that is open to it.
#pragma once

#include "vmem/detail/paging_protocol.h"
#include "vmem/detail/paging_types.h"

namespace vmem::paging {

template <typename Atomics>
struct View {
  Table<Atomics> table;
  uint64_t first;     // address of block 0
  uint64_t begin;     // address of the range, which may begin inside block 0
  uint64_t size;      // bytes of the range
  uint32_t shift;     // a block has 1 << shift bytes
  uint32_t writable;  // 1: stores are allowed, too

  // Number of the block that holds the address, which is inside the range.
  VMEM_PAGING uint32_t block(uint64_t address) const { return static_cast<uint32_t>((address - first) >> shift); }
};

}  // namespace vmem::paging
