// Copies blocks to devices while they are still being read. When all of a block has been read, most
// of it is on its device, and a waiter waits only for the copy of the last part.
//
//   being read ──half of what is left has come──> waiting ──a worker──> copies are issued ──> being read
//   the read is over, and no worker at it ──> Above::read_over
//
// - No kernel sees these bytes before all have been read and verified: their device memory is not
//   mapped.
// - A block whose read failed has no device memory when it leaves this class.
//
// Only for blocks that a thread waits for, on devices with their own page tables. Blocks read ahead
// need none of this: each is copied while the next block is read.
#pragma once

#include "pager/account/device_set.h"
#include "pager/host/page_in.h"
#include "pager/tier/managed_holes.h"

namespace vmem::pager {

struct DeviceTier;
struct HostTier;

class PipelinedCopy {
 public:
  PipelinedCopy(PagerContext& ctx, DeviceTier& tier);

  // Returns whether reads of the region's blocks should call came().
  bool wants(const Region& r) const;
  // The first `bytes` of the image have been read. Called on an I/O thread.
  void came(Transition* m, size_t bytes) VMEM_UNLOCKED;
  // The read is over; m->status has the result. Returns false if a worker has the block, and will
  // go on with it.
  bool is_left(Transition* m) VMEM_LOCKED;
  // Issues the copies of one waiting block; drops the lock while it works. Returns false if none
  // waits.
  bool serve(Lock& lock) VMEM_LOCKED;
  // Frees the device memory of a block that does not come after all. No other thread may have the
  // block.
  void give_back(Transition* m) VMEM_UNLOCKED;

 private:
  void wait(Transition* m) VMEM_LOCKED;
  void copy(Transition* m, size_t come) VMEM_UNLOCKED;

  PagerContext& ctx_;
  HostTier& host_;
  DeviceTier& tier_;
  TransitionList waiting_ VMEM_GUARDED_BY(core::big_lock);
};

}  // namespace vmem::pager
