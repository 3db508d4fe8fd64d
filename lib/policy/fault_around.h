// What to read beside a block that is missed, where blocks are small and their use may be in larger pieces. Pure: what
// it decides by is which blocks of the group are in memory.
//
// Blocks lie in groups. A run of blocks in memory that ends beside the missed one tells of a reader that goes through
// the group, unless so many of the group are in memory that such a run is likely by chance. Then as many blocks again
// as the run has are read: from one block to a whole group in few reads, and never more at once than lies beside it.
#pragma once

#include <cstdint>

#include "core/types.h"
#include "policy/readahead.h"

namespace vmem::policy {

class FaultAround {
 public:
  static constexpr uint32_t kLargestGroup = 64;  // blocks

  // A region of so many blocks; `group` of them lie together.
  FaultAround(uint64_t blocks, uint32_t group);

  // The group of a block: its first one, and how many there are.
  core::BlockIndex first(core::BlockIndex block) const { return block - block % group_; }
  uint32_t count(core::BlockIndex block) const;
  // present: bit i, block first() + i is in memory, or on its way there. What to read: `block`, and what follows it
  // without a gap, up or down (stride 1 or -1), inside the group.
  Run around(core::BlockIndex block, uint64_t present) const;

 private:
  uint64_t blocks_;
  uint32_t group_;
};

}  // namespace vmem::policy
