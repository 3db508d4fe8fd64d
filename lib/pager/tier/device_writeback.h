// Writes what a device has changed to the store, for blocks that stay there: a sync.
//
//   the device may not store to a block until it has been written, or has not; where that failed, or the file has
//   become shorter, the block stays dirty, and the mark of a failed write stands
//   a staging frame that a transition has is given back once
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

  // Blocks in state demoting, held on their devices, each with its bytes in a frame; or a status that says why not.
  // They are on their devices again when it is done, which may be later.
  void write(std::span<Transition* const> transitions, DeferredWork& after) VMEM_UNLOCKED;
  // Of a block that stays on its device.
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
