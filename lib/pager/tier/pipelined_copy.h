// Copies to devices of blocks that are still being read: when all of a block has come, most of it is on its device
// already, and whoever waits for it waits for the copy of its last part.
//
//   being read ──half of what is left has come──> waiting ──a worker──> copies are issued ──> being read
//   the read is over, and no worker at it ──> Above::read_over
//
//   nobody sees those bytes before all have come and were found to be what was written: the memory that they are in is
//   mapped for nobody
//   a block whose read failed has no memory of the device when it goes on from here
//
// For blocks that somebody waits for, on devices with page tables of their own: of what is read ahead the copies have
// time while the next block is read.
#pragma once

#include "pager/account/device_set.h"
#include "pager/host/page_in.h"
#include "pager/tier/managed_holes.h"

namespace vmem::pager {

class PipelinedCopy : private Shared {
 public:
  class Above {
   public:
    // All of the block has come, or could not be read, as its status says.
    virtual void read_over(Transition* m, DeferredWork& after) VMEM_LOCKED = 0;

   protected:
    ~Above() = default;
  };

  // devices: null: there is no device tier.
  PipelinedCopy(const Shared& shared, device::Devices* devices, DeviceSet& gpus, ManagedHoles& holes, PageIn& page_in,
                Above& above)
      : Shared(shared), devices_(devices), device_set_(gpus), managed_holes_(holes), page_in_(page_in), above_(above) {}

  // Whether to be told by came() of a read to a block of the region.
  bool wants(const Region& r) const;
  // On an I/O thread: the first `bytes` of the image of a block that is being read are there.
  void came(Transition* m, size_t bytes) VMEM_UNLOCKED;
  // The read is over, as its status says. False: whoever is at the block goes on with it.
  bool is_left(Transition* m) VMEM_LOCKED;
  // Locked on entry and on return, and not meanwhile. False: there is nothing to be done.
  bool serve(Lock& lock) VMEM_LOCKED;
  // What was copied of a block that does not come after all; nobody else is at it.
  void give_back(Transition* m) VMEM_UNLOCKED;

 private:
  void wait(Transition* m) VMEM_LOCKED;
  void copy(Transition* m, size_t come) VMEM_UNLOCKED;

  device::Devices* const devices_;
  DeviceSet& device_set_;
  ManagedHoles& managed_holes_;
  PageIn& page_in_;
  Above& above_;

  TransitionList waiting_ VMEM_GUARDED_BY(core::big_lock);
};

}  // namespace vmem::pager
