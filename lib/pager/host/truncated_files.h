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

class TruncatedFiles : private Shared {
 public:
  TruncatedFiles(const Shared& shared, DeviceSet& gpus, PageIn& page_in, MemoryFreed& freed)
      : Shared(shared), device_set_(gpus), page_in_(page_in), freed_(freed) {}

  // Drops the pages of a block that shows its file. In a region with a device tier whose accesses
  // park, the block is an ordinary block again, as after FailedBlocks::revive(); in others it goes
  // on showing the file. Drops and retakes the lock: the file system may write the pages first. In
  // that time no other thread acts on the block.
  core::Status revive(Lock& lock, Region& r, core::BlockIndex b) VMEM_LOCKED;

 private:
  DeviceSet& device_set_;
  PageIn& page_in_;
  MemoryFreed& freed_;
};

}  // namespace vmem::pager
