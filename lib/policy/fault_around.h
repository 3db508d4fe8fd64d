// Chooses the blocks to read with a missed one, where blocks are small and the program may use
// larger pieces. Pure: it decides from the blocks of the group that are in memory.
//
// Blocks lie in groups. A run of blocks in memory that ends beside the missed one shows a reader
// that goes through the group, unless so many of the group are in memory that such a run is likely
// by chance. Then as many blocks as the run has are read: a few reads go from one block to a whole
// group, and no read is larger than the run beside it.
#pragma once

#include <cstdint>

#include "core/types.h"
#include "policy/readahead.h"

namespace vmem::policy {

class FaultAround {
 public:
  static constexpr uint32_t kLargestGroup = 64;  // blocks

  // blocks: in the region. group: blocks that lie together.
  FaultAround(uint64_t blocks, uint32_t group);

  // The group of a block: its first block, and the number of blocks.
  core::BlockIndex first(core::BlockIndex block) const { return block - block % group_; }
  uint32_t count(core::BlockIndex block) const;
  // present: bit i says that block first() + i is in memory or on its way there. Returns the run to
  // read: `block` and the blocks after it without a gap, up or down (stride 1 or -1), within the
  // group.
  Run around(core::BlockIndex block, uint64_t present) const;

 private:
  uint64_t blocks_;
  uint32_t group_;
};

}  // namespace vmem::policy
