// Blocks that show their file, which became shorter: how the file's pages go from a region again.
//
//   until they have, or cannot go, the block is in state reading; nobody reads what takes their place before it is
//   there
//
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

  // A block that shows its file loses what is there. In a region with a device tier whose accesses park it is an
  // ordinary block again, as by FailedBlocks::revive(); else it goes on showing the file. Locked, and not meanwhile: to
  // take a file's pages away may mean that the file system writes them first. For that time nobody else acts on the
  // block.
  core::Status revive(Lock& lock, Region& r, core::BlockIndex b) VMEM_LOCKED;

 private:
  DeviceSet& device_set_;
  PageIn& page_in_;
  MemoryFreed& freed_;
};

}  // namespace vmem::pager
