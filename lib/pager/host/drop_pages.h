// Pages that are to go, and that somebody may have pinned: with O_DIRECT but without a lease, in a pipe, in a debugger.
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

// Unlocked. True: they have gone. False: -EBUSY; each of their blocks has gone, or is whole where it was.
inline bool drop_pages(trap::Trap& trap, std::span<const trap::Range> ranges) {
  const core::Status s = trap.drop(ranges);
  if (!s.ok() && s.code() != -EBUSY) core::fatal("memory of blocks could not be dropped: %s", s.text().data());
  return s.ok();
}

// Unlocked. There is no way back: until whoever pins a page lets go, accesses wait. Not on threads of the host side:
// who pins it may wait for a fault that they serve, or for memory that they make room for.
inline void drop_until_unpinned(trap::Trap& trap, std::span<const trap::Range> ranges) {
  core::may_wait_for_a_fault("the end of a pin is waited for");
  while (!drop_pages(trap, ranges)) usleep(1000);
}

// Unlocked; the owner of the transition of a block whose contents are lost: what is left of it goes, whoever pins it.
inline void drop_torn(trap::Trap& trap, const Region& r, core::BlockIndex b) {
  const trap::Range range{reinterpret_cast<uintptr_t>(r.address(b)), r.block_size};
  if (!drop_pages(trap, {&range, 1})) trap.release_many({&range, 1}).ignore();
}

// Unlocked; the owner of the block's transition. False: it is whole where it was.
inline bool drop_one(trap::Trap& trap, const Region& r, core::BlockIndex b) {
  const trap::Range range{reinterpret_cast<uintptr_t>(r.address(b)), r.block_size};
  return drop_pages(trap, {&range, 1});
}

}  // namespace vmem::pager
