// Blocks that go straight from one device to another: because somebody wants them there, or, spilled, because their
// own has no room (DeviceReclaim).
//
//   a block on its way is charged to both devices, and known as one of that to which it goes; whatever became of it, it
//   is on one of the two when it comes to rest, and that one alone is charged with it
//
#pragma once

#include <span>

#include "device/device.h"
#include "pager/host/memory_waits.h"
#include "pager/host/page_in.h"
#include "pager/tier/device_blocks.h"

namespace vmem::pager {

class PeerMigrator : private Shared {
 public:
  PeerMigrator(const Shared& shared, device::Devices* devices, DeviceSet& gpus, DeviceBlocks& blocks, PageIn& page_in,
               MemoryFreed& freed)
      : Shared(shared), devices_(devices), device_set_(gpus), blocks_(blocks), page_in_(page_in), freed_(freed) {}

  // Locked; after reserve_transition(), and there is room on device d. A block at rest on another device is on its way
  // there.
  Transition* begin(Region& r, core::BlockIndex b, int d) VMEM_LOCKED;
  // Unlocked. Copies them to device d, and brings each to rest; all from one device where that one copies them (`by`).
  // In order of address.
  void run(std::span<Transition* const> batch, int d, int by) VMEM_UNLOCKED;
  // .. those that wait in DeviceState::incoming, and that come meanwhile, for a turn.
  void run_waiting(int d) VMEM_UNLOCKED;

 private:
  class Line;
  void copy(std::span<Transition* const> batch, int d, int by) VMEM_UNLOCKED;
  void settle_all(std::span<Transition* const> moved, int d) VMEM_UNLOCKED;
  void settle(Transition* m, int d) VMEM_LOCKED;

  device::Devices* const devices_;
  DeviceSet& device_set_;
  DeviceBlocks& blocks_;
  PageIn& page_in_;
  MemoryFreed& freed_;
};

}  // namespace vmem::pager
