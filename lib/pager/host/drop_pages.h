// Drops pages that may be pinned: by O_DIRECT without a lease, a pipe or a debugger.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <span>

#include "core/fatal.h"
#include "core/fault_server.h"
#include "core/types.h"
#include "pager/block/region.h"
#include "trap/trap.h"

namespace vmem::pager {

// Returns true if the pages are gone. Returns false for -EBUSY: then each block is gone, or is
// whole where it was.
inline bool drop_pages(trap::Trap& trap, std::span<const trap::Range> ranges) {
  const core::Status s = trap.drop(ranges);
  if (!s.ok() && s.code() != -EBUSY) core::fatal("memory of blocks could not be dropped: %s", s.text().data());
  return s.ok();
}

// The drop cannot be given up: waits until the pins end, and accesses wait as well. Not for threads
// of the host tier: the thread that pins a page may wait for a fault that they serve, or for memory
// that they free.
inline void drop_until_unpinned(trap::Trap& trap, std::span<const trap::Range> ranges) {
  core::may_wait_for_a_fault("the end of a pin is waited for");
  while (!drop_pages(trap, ranges)) usleep(1000);
}

// Drops what is left of a lost block, pinned or not. Called by the owner of its transition.
inline void drop_torn(trap::Trap& trap, const Region& r, core::BlockIndex b) {
  const trap::Range range{reinterpret_cast<uintptr_t>(r.address(b)), r.block_size};
  if (!drop_pages(trap, {&range, 1})) trap.release_many({&range, 1}).ignore();
}

// Called by the owner of the block's transition. Returns false if the block is whole where it was.
inline bool drop_one(trap::Trap& trap, const Region& r, core::BlockIndex b) {
  const trap::Range range{reinterpret_cast<uintptr_t>(r.address(b)), r.block_size};
  return drop_pages(trap, {&range, 1});
}

}  // namespace vmem::pager
