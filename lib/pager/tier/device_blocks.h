// Tracks blocks at rest on a device: whether the device's bytes may differ from other copies,
// whether the block is spilled, and which accesses met it in transition.
//
// - A block that may change on its device is dirty, and no host copy of it counts: it has none, or
//   its copy does not count until not_changed() says that no kernel stored to the block
//   (undecided).
// - A block that comes to rest is answered: no access that met the trap before that is forgotten.
//
// Called under the pager's lock.
#pragma once

#include "pager/account/context.h"
#include "pager/account/cpu_mappings.h"
#include "pager/account/device_set.h"

namespace vmem::pager {

class DeviceBlocks {
 public:
  explicit DeviceBlocks(PagerContext& ctx);

  // From now on the device's bytes may differ from the SSD and from any copy.
  void will_change(Region& r, core::BlockIndex b) VMEM_LOCKED;
  // The same, unless not_changed() follows. The lease's owner calls that, or the block has changed.
  void may_change(Region& r, core::BlockIndex b) VMEM_LOCKED;
  // No kernel has stored to the undecided blocks of the span on device d.
  void not_changed(const BlockSpan& span, int d) VMEM_LOCKED;

  // claim() lets the caller work on a block at rest without the lock: the state is demoting, and
  // the policy holds the block. unclaim() puts it back.
  void claim(Region& r, core::BlockIndex b) VMEM_LOCKED;
  void unclaim(Region& r, core::BlockIndex b) VMEM_LOCKED;
  // A demoting block stays on its device, or is on another one. failed: the transition that could
  // not show it, if any.
  void stays(Region& r, core::BlockIndex b, const Transition* failed = nullptr) VMEM_LOCKED;
  // The block has come to rest on a device: answers accesses that met the trap before that.
  void answer(Region& r, core::BlockIndex b, const Transition* failed = nullptr) VMEM_LOCKED;

  // The block is in use where it is: it is not spilled any more.
  void adopt(Region& r, core::BlockIndex b) VMEM_LOCKED;
  // A transition has ended with the block on a device: lists it as spilled again, or admits it to
  // the policy.
  void know_again(const Transition& m) VMEM_LOCKED;
  // Returns whether the block is on device d, or its copy to d has been issued.
  bool has_come(const Region& r, core::BlockIndex b, int d) VMEM_LOCKED;

 private:
  PagerContext& ctx_;
};

// Returns the wait of the access that the failed transition served.
inline CpuMappings::Since since(const Transition* failed) {
  if (failed == nullptr) return {};
  return {failed->since_ns, failed->mark};
}

}  // namespace vmem::pager
