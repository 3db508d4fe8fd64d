// Blocks that show pages of their file because the file became shorter: takes these pages out of
// the region again.
//
// - The block is in state reading until the pages are gone, or cannot be removed.
// - No thread reads what replaces them before it is in place.
#pragma once

#include "pager/account/device_set.h"
#include "pager/host/failed_blocks.h"
#include "pager/host/memory_waits.h"
#include "pager/host/page_in.h"

namespace vmem::pager {

struct HostTier;

class TruncatedFiles {
 public:
  TruncatedFiles(PagerContext& ctx, HostTier& host);

  // Drops the pages of a block that shows its file. In a region with a device tier whose accesses
  // park, the block is an ordinary block again, as after FailedBlocks::revive(); in others it goes
  // on showing the file. Drops and retakes the lock: the file system may write the pages first. In
  // that time no other thread acts on the block.
  core::Status revive(Lock& lock, Region& r, core::BlockIndex b) VMEM_LOCKED;

 private:
  PagerContext& ctx_;
  HostTier& host_;
};

}  // namespace vmem::pager
