// Demoter moves blocks at rest out of a device, and writes changes of blocks that stay (a sync).
//
//   on_device ─> demoting: write-protect, copy to a staging frame, take out, trap ─> staged (its frame)
//                with a host copy:                                 take out, trap ─> staged (that frame)
//                clean:                                            take out, trap ─> stored, unpopulated
//                shown to the CPU (CpuMapper):                     take out       ─> resident
//                synced: write-protect, copy, write, open                         ─> on_device
//                synced, and newer where it is shown: copy that, write            ─> on_device
//
// - A block that leaves for good is charged to its device, as leaving, until its device memory is
//   free.
// - The only copy of a block is destroyed only after its bytes are elsewhere, or if its device is
//   lost: then the block is marked lost.
// - A block is clean (no kDirty) while no WRITE lease touched it and the CPU could not store to it
//   since it came.
// - The device may not store to a block that is synced until its write has ended. If that failed,
//   or the file has become shorter, the block stays dirty, and the mark of a failed write stays.
// - A transition's staging frame is given back once.
#pragma once

#include <span>

#include "device/device.h"
#include "pager/host/page_in.h"
#include "pager/host/store_writer.h"
#include "pager/tier/device_blocks.h"
#include "pager/tier/managed_holes.h"
#include "pager/tier/staging_allocator.h"

namespace vmem::pager {

struct DeviceTier;
struct HostTier;

class Demoter final : private IoEnd {
 public:
  Demoter(PagerContext& ctx, DeviceTier& tier);

  // Claims a block on a device for demoting. The policy must have forgotten the block, except for a
  // sync. Returns nullptr if there is no staging frame for its bytes, or if its accesses get SIGBUS
  // and the trap does not take that back.
  Transition* begin(Region& r, core::BlockIndex b, Leave how) VMEM_LOCKED;
  // Takes each transition to its end, or to a write that ends later. The batch may be of several
  // devices, and holds no more than a Batch. The second form drops the lock while it works.
  void run(std::span<Transition*> batch) VMEM_UNLOCKED;
  void run(Lock& lock, std::span<Transition*> batch) VMEM_LOCKED;

  // The steps of run():
  // - begin_part() stops stores to the blocks, unmaps those that leave, and issues the copies.
  // - end_part() waits for the bytes to be in host memory, and frees the device's memory. It puts
  //   blocks that stay, but which the device has not mapped again, into `unmapped`.
  // - keep_mapped() maps those again; other blocks do not wait for them.
  // - write() writes the changes of blocks that stay, which are write-protected. Each has its bytes
  //   in a frame, or a status that says why not. A block is back in state on_device when its write
  //   has ended, which may be after the return.
  void begin_part(OutPart& part) VMEM_UNLOCKED;
  void end_part(OutPart& part, Batch& writes, Batch& unmapped, DeferredWork& after) VMEM_UNLOCKED;
  void keep_mapped(Batch& unmapped, DeferredWork& after) VMEM_UNLOCKED;
  void write(std::span<Transition* const> transitions, DeferredWork& after) VMEM_UNLOCKED;

 private:
  core::Status copy_shown(Transition* m) VMEM_UNLOCKED;
  void settle_left(Transition* m, const core::Status& copied, bool lost, DeferredWork& after) VMEM_LOCKED;
  void lose_left(Transition* m, const core::Status& why) VMEM_LOCKED;
  void rest_in_host(Transition* m, bool copied) VMEM_LOCKED;
  void undo_leaving(Transition* m, const core::Status& why) VMEM_LOCKED;
  void io_ended(Transition* m) VMEM_UNLOCKED override;
  void finish_write(Transition* m, DeferredWork& after) VMEM_UNLOCKED;
  void note_written(Transition* m, bool cut) VMEM_LOCKED;
  void give_back_frame(Transition* m) VMEM_LOCKED;

  PagerContext& ctx_;
  HostTier& host_;
  DeviceTier& tier_;
};

}  // namespace vmem::pager
