// Holes in regions of managed memory, where a block is on no device: what is made of the block's place when it has
// left, or could not come. With page tables of their own devices leave the region to the trap, which never goes.
//
//   behind restore_trap() the trap stands at all of the ranges, with the threads that were parked there
//
// Unlocked; the owners of the blocks' transitions call it.
#pragma once

#include <span>

#include "device/device.h"
#include "pager/account/device_set.h"
#include "pager/account/shared.h"

namespace vmem::pager {

class ManagedHoles : private Shared {
 public:
  ManagedHoles(const Shared& shared, device::Devices* devices, DeviceSet& gpus)
      : Shared(shared), devices_(devices), device_set_(gpus) {}

  // The device's memory is nobody's. A copy of a lost device may still be ending when its ticket says that the device
  // is lost.
  core::Status punch(std::span<const device::Range> ranges) VMEM_UNLOCKED;
  // Ends the process where it cannot be: accesses would see zeros in place of data.
  void restore_trap(std::span<const device::Range> ranges) VMEM_UNLOCKED;

 private:
  device::Devices* const devices_;
  DeviceSet& device_set_;
};

}  // namespace vmem::pager
