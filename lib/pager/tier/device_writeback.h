// Writes a device's changes to the store for blocks that stay on the device: a sync.
//
// - The device may not store to a block until its write has ended. If that failed, or the file has
//   become shorter, the block stays dirty, and the mark of a failed write stays.
// - A transition's staging frame is given back once.
#pragma once

#include <span>

#include "device/device.h"
#include "pager/host/page_in.h"
#include "pager/host/store_writer.h"
#include "pager/tier/device_blocks.h"

namespace vmem::pager {

class DeviceWriteback final : private Shared, private IoEnd {
 public:
  DeviceWriteback(const Shared& shared, device::Devices* devices, DeviceBlocks& blocks, FailedBlocks& failed,
                  PageIn& page_in, StoreWriter& writer, MemoryFreed& freed)
      : Shared(shared),
        devices_(devices),
        blocks_(blocks),
        failed_(failed),
        page_in_(page_in),
        writer_(writer),
        freed_(freed) {}

  // Writes blocks in state demoting, write-protected on their devices. Each has its bytes in a
  // frame, or a status that says why not. The blocks are back in state on_device when their writes
  // have ended, which may be after the return.
  void write(std::span<Transition* const> transitions, DeferredWork& after) VMEM_UNLOCKED;
  // Gives back the frame of a block that stays on its device.
  void give_back_frame(Transition* m) VMEM_LOCKED;

 private:
  void io_ended(Transition* m) VMEM_UNLOCKED override;
  void finish_write(Transition* m, DeferredWork& after) VMEM_UNLOCKED;
  void note_written(Transition* m, bool cut) VMEM_LOCKED;

  device::Devices* const devices_;
  DeviceBlocks& blocks_;
  FailedBlocks& failed_;
  PageIn& page_in_;
  StoreWriter& writer_;
  MemoryFreed& freed_;
};

}  // namespace vmem::pager
