// Pages that are to go, and that somebody may have pinned: with O_DIRECT but without a lease, in a pipe, in a debugger.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <span>

#include "core/log.h"
#include "core/types.h"
#include "pager/region.h"
#include "trap/trap.h"

namespace vmem::pager {

// Unlocked. True: they have gone. False: -EBUSY; each of their blocks has gone, or is whole where it was.
inline bool drop_pages(trap::Trap& trap, std::span<const trap::Range> ranges) {
  const core::Status s = trap.drop(ranges);
  if (!s.ok() && s.code() != -EBUSY) core::fatal("memory of blocks could not be dropped: %s", s.text().data());
  return s.ok();
}

// Unlocked. There is no way back: until whoever pins a page lets go, accesses wait.
inline void insist_on_drop(trap::Trap& trap, std::span<const trap::Range> ranges) {
  while (!drop_pages(trap, ranges)) usleep(1000);
}

// Unlocked; the owner of the block's transition. False: it is whole where it was.
inline bool drop_one(trap::Trap& trap, const Region& r, core::BlockIndex b) {
  const trap::Range range{reinterpret_cast<uintptr_t>(r.address(b)), r.block_size};
  return drop_pages(trap, {&range, 1});
}

}  // namespace vmem::pager
