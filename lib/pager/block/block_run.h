// Blocks that lie side by side and move together: one call of the trap for all of them. Each makes every CPU that runs
// the program forget what it knows of the range, whatever its size.
#pragma once

#include <cerrno>
#include <cstdint>
#include <span>

#include "core/inplace_vector.h"
#include "pager/block/transition.h"
#include "trap/trap.h"

namespace vmem::pager {

// The trap says that it moved a part of a block and could not take it back.
inline bool half_way(const core::Status& s) {
  return s.code() == -ENOTRECOVERABLE;
}

// The order of addresses within a region.
inline bool address_order(const Transition* a, const Transition* b) {
  return a->region != b->region ? a->region->id < b->region->id : a->block < b->block;
}

// `next` lies so many blocks behind, in its region and in memory.
inline bool goes_on(const Transition& m, const Transition& next, size_t blocks = 1) {
  return next.region == m.region && next.block == m.block + blocks &&
         next.image == m.image + blocks * m.region->block_size;
}

// Unlocked; moves in the order of address_order(). Stores to those whose pages stay where they are while they are
// written wait from here on. What could not be protected has the reason in its status.
void protect_in_place(trap::Trap& trap, std::span<Transition* const> transitions);

// Reads that are begun, in the order of address_order(): those at the head that are one transfer into one run of memory
// are put in place together.
void place_together(const TransitionList& reads, std::span<ReadGroup> groups);

// Takes the first of `moves`, and those after it that the same call of the trap can put in place. Of what stores may
// change meanwhile none: half of them could not be taken back.
Batch take_run(TransitionList& transitions);

// Ranges to drop, of transitions that are added in that order: neighbours are one.
class DropList {
 public:
  void add(const Transition& m) {
    const auto at = reinterpret_cast<uintptr_t>(m.region->address(m.block));
    if (m.region == last_ && ranges_.back().address + ranges_.back().size == at) {
      ranges_.back().size += m.region->block_size;
    } else {
      ranges_.push_back({at, m.region->block_size});
    }
    last_ = m.region;
  }
  bool empty() const { return ranges_.empty(); }
  std::span<const trap::Range> all() const { return ranges_.all(); }

 private:
  core::InplaceVector<trap::Range, Batch::capacity()> ranges_;
  const Region* last_ = nullptr;
};

}  // namespace vmem::pager
