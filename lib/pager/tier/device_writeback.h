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

struct DeviceTier;
struct HostTier;

class DeviceWriteback final : private IoEnd {
 public:
  DeviceWriteback(PagerContext& ctx, DeviceTier& tier);

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

  PagerContext& ctx_;
  HostTier& host_;
  DeviceTier& tier_;
};

}  // namespace vmem::pager
