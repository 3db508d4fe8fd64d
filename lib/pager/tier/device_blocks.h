// Blocks that are on a device, or come to rest there: whether what they have may differ from what is elsewhere, whose
// spilled blocks they are, and who met them on the way.
//
//   a block that may change on its device is dirty, and no host copy of it counts: it has none, or none until it is
//   said that nobody has stored to it (undecided) what comes to rest is answered: no access that met the trap meanwhile
//   is forgotten
//
// Called under the pager's lock.
#pragma once

#include "pager/account/cpu_mappings.h"
#include "pager/account/device_set.h"
#include "pager/account/shared.h"

namespace vmem::pager {

class DeviceBlocks : private Shared {
 public:
  DeviceBlocks(const Shared& shared, DeviceSet& gpus, CpuMappings& cpu_mappings)
      : Shared(shared), device_set_(gpus), cpu_mappings_(cpu_mappings) {}

  // What the device has may differ from the SSD and from any copy from here on.
  void will_change(Region& r, core::BlockIndex b) VMEM_LOCKED;
  // .. unless not_changed() says otherwise, which whoever has the lease is to do, or it has changed.
  void may_change(Region& r, core::BlockIndex b) VMEM_LOCKED;
  // Nobody has stored to the blocks of the span that are on device d and undecided.
  void not_changed(const BlockSpan& span, int d) VMEM_LOCKED;

  // A block at rest is worked on where it is, without the lock: state demoting, and the policy holds it. unclaim(): it
  // stays.
  void claim(Region& r, core::BlockIndex b) VMEM_LOCKED;
  void unclaim(Region& r, core::BlockIndex b) VMEM_LOCKED;
  // It was demoting, and is on a device still, or on another one. failed: the transition that could not show it.
  void stays(Region& r, core::BlockIndex b, const Transition* failed = nullptr) VMEM_LOCKED;
  // It has come to rest on a device. Who met the trap meanwhile has not been answered.
  void answer(Region& r, core::BlockIndex b, const Transition* failed = nullptr) VMEM_LOCKED;

  // Somebody uses the block where it is: it is no spilled block any more.
  void adopt(Region& r, core::BlockIndex b) VMEM_LOCKED;
  // A transition has ended and the block is on a device: as a spilled block, or as what it was.
  void know_again(const Transition& m) VMEM_LOCKED;
  // It is on device d, or its copy there has been issued.
  bool has_come(const Region& r, core::BlockIndex b, int d) VMEM_LOCKED;

 private:
  DeviceSet& device_set_;
  CpuMappings& cpu_mappings_;
};

// The wait of a try that failed.
inline CpuMappings::Since since(const Transition* failed) {
  if (failed == nullptr) return {};
  return {failed->since_ns, failed->mark};
}

}  // namespace vmem::pager
