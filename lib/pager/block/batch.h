// Takes transitions that wait to be moved, a group at a time.
#pragma once

#include <algorithm>

#include "core/inplace_vector.h"
#include "pager/block/transition.h"

namespace vmem::pager {

// Sorts `from` by address and takes up to N transitions from its head, so that neighbours are made
// or moved as one range. Takes at most `bytes`, or two blocks.
template <size_t N>
core::InplaceVector<Transition*, N> take_batch(core::OwnVector<Transition*>& from, uint64_t bytes) {
  std::sort(from.begin(), from.end(), [](const Transition* a, const Transition* b) {
    return a->region != b->region ? a->region->id < b->region->id : a->block < b->block;
  });
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

}  // namespace vmem::pager
