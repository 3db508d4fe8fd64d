// What a kernel is given of a range that is open to it: struct vmem_kernel_view of vmem.h, from the inside.
#pragma once

#include "vmem/detail/paging_protocol.h"
#include "vmem/detail/paging_types.h"

namespace vmem::paging {

template <typename Atomics>
struct View {
  Table<Atomics> table;
  uint64_t first;     // address of block 0
  uint64_t begin;     // .. of the range, which may begin inside it
  uint64_t size;      // bytes of the range
  uint32_t shift;     // a block has 1 << shift bytes
  uint32_t writable;  // 1: for stores, too

  // The blocks that have a byte of [from, from + bytes), which is inside the range and not empty.
  VMEM_PAGING uint32_t block(uint64_t address) const { return static_cast<uint32_t>((address - first) >> shift); }
};

}  // namespace vmem::paging
