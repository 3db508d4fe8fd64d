// Neighbouring blocks that move together, by one call of the trap or of a device. Each call of the
// trap interrupts every CPU that runs the program, whatever the size of its range.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <span>

#include "core/inplace_vector.h"
#include "pager/block/transition.h"
#include "trap/trap.h"

namespace vmem::pager {

// Whether the trap moved a part of a block and could not take it back.
inline bool half_way(const core::Status& s) {
  return s.code() == -ENOTRECOVERABLE;
}

// By region, and by address within a region.
inline bool address_order(const Transition* a, const Transition* b) {
  return a->region != b->region ? a->region->id < b->region->id : a->block < b->block;
}

// Sorts `from` by address and takes up to N transitions from its head, so that neighbours are made
// or moved as one range. Takes at most `bytes`, or two blocks.
template <size_t N>
core::InplaceVector<Transition*, N> take_batch(core::OwnVector<Transition*>& from, uint64_t bytes) {
  std::sort(from.begin(), from.end(), address_order);
  core::InplaceVector<Transition*, N> batch;
  auto i = from.begin();
  for (; i != from.end() && batch.size() < N; ++i) {
    const size_t size = (*i)->region->block_size;
    if (batch.size() >= 2 && size > bytes) break;
    bytes -= std::min<uint64_t>(bytes, size);
    batch.push_back(*i);
  }
  from.erase(from.begin(), i);
  return batch;
}

// Whether `next` is `blocks` blocks after `m`, both in the region and in memory.
inline bool goes_on(const Transition& m, const Transition& next, size_t blocks = 1) {
  return next.region == m.region && next.block == m.block + blocks &&
         next.image == m.image + blocks * m.region->block_size;
}

// Write-protects the pages of transitions that are written in place: from here on stores to them
// wait. Call without the lock, with transitions in address_order(). A transition that could not be
// protected has the reason in its status.
void protect_in_place(trap::Trap& trap, std::span<Transition* const> transitions);

// Makes a group of the reads at the head that are one transfer into one run of memory: they are put
// in place together. The reads are about to begin, in address_order(). Does nothing if no group is
// free.
void place_together(const TransitionList& reads, std::span<ReadGroup> groups);

// Takes the first transition, and those after it that the same call of the trap can put in place. A
// block that stores could change as soon as it is in place goes alone: if the call stopped half
// way, it could not be taken back.
Batch take_run(TransitionList& transitions);

// The ranges of transitions whose pages are dropped. Add them in address_order(): neighbours become
// one range.
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
