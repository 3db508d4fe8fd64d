// Makes holes in regions of managed memory: a block that has left its device, or could not come,
// becomes a hole with the trap in place. Devices with their own page tables leave the region to the
// trap, which stays in place always.
//
// - After restore_trap() the trap is in place at all of the ranges, and handles the threads that
//   were parked there.
//
// The owners of the blocks' transitions call it, without the lock.
#pragma once

#include <span>

#include "device/device.h"
#include "pager/account/context.h"
#include "pager/account/device_set.h"

namespace vmem::pager {

class ManagedHoles {
 public:
  explicit ManagedHoles(PagerContext& ctx);

  // Frees the device memory of the ranges. Tries again on -EBUSY: a copy of a lost device may still
  // be ending when its ticket says that the device is lost.
  core::Status punch(std::span<const device::Range> ranges) VMEM_UNLOCKED;
  // Puts the trap back. Ends the process if that fails: accesses would see zeros instead of data.
  void restore_trap(std::span<const device::Range> ranges) VMEM_UNLOCKED;

 private:
  PagerContext& ctx_;
};

}  // namespace vmem::pager
