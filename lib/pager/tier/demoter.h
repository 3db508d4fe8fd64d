// The way out of a device, for blocks at rest there.
//
//   on_device ─> demoting: hold writers, copy to a staging frame, take the block out, trap ─> staged (its frame)
//                demoting, with a host copy:                  take the block out, trap ─> staged (the copy's frame)
//                demoting, clean:                             take the block out, trap ─> stored, unpopulated
//                demoting, shown to the CPU (CpuMapper):      take the block out        ─> resident
//                demoting, synced: hold writers, copy, write, open                      ─> on_device
//                demoting, synced, newer where it is shown: copy that, write            ─> on_device
//
//   a block that leaves for good is charged to its device, among what leaves, until its memory there is nobody's; what
//   has the only copy of a block is destroyed when that is elsewhere, or the device is lost: then the block has a mark
//
// A block is clean while no WRITE lease touched it and the CPU could not store to it since it came (kDirty).
#pragma once

#include <span>

#include "device/device.h"
#include "pager/tier/device_writeback.h"
#include "pager/tier/managed_holes.h"
#include "pager/tier/staging_allocator.h"

namespace vmem::pager {

class Demoter : private Shared {
 public:
  Demoter(const Shared& shared, device::Devices* devices, DeviceSet& gpus, CpuMappings& cpu_mappings,
          DeviceBlocks& blocks, ManagedHoles& holes, FailedBlocks& failed, PageIn& page_in, DeviceWriteback& write_back,
          StagingAllocator& supply, MemoryFreed& freed)
      : Shared(shared),
        devices_(devices),
        device_set_(gpus),
        cpu_mappings_(cpu_mappings),
        blocks_(blocks),
        managed_holes_(holes),
        failed_(failed),
        page_in_(page_in),
        writeback_(write_back),
        supply_(supply),
        freed_(freed) {}

  // Locked. Claims a block on a device for the way out; the policy must not know it any more, except for a sync.
  // nullptr: no staging frame for its bytes, or its accesses get SIGBUS and the trap does not take that back.
  Transition* begin(Region& r, core::BlockIndex b, Leave how) VMEM_LOCKED;
  // Takes each move to its end, or to a write whose end comes later. Of one device each or several; no more than a
  // Batch holds. Unlocked, or with a lock that is dropped meanwhile.
  void run(std::span<Transition*> batch) VMEM_UNLOCKED;
  void run(Lock& lock, std::span<Transition*> batch) VMEM_LOCKED;

  // The steps of that, unlocked. begin_part(): nobody stores to them or sees them there any more, and their bytes are
  // on the way. end_part(): those are in host memory, and the device's memory is nobody's. `unmapped`: those that stay,
  // which the device has not mapped again, for keep_mapped(): others are not to wait for them.
  void begin_part(OutPart& part) VMEM_UNLOCKED;
  void end_part(OutPart& part, Batch& writes, Batch& unmapped, DeferredWork& after) VMEM_UNLOCKED;
  void keep_mapped(Batch& unmapped, DeferredWork& after) VMEM_UNLOCKED;

 private:
  core::Status copy_shown(Transition* m) VMEM_UNLOCKED;
  void settle_left(Transition* m, const core::Status& copied, bool lost, DeferredWork& after) VMEM_LOCKED;
  void lose_left(Transition* m, const core::Status& why) VMEM_LOCKED;
  void rest_in_host(Transition* m, bool copied) VMEM_LOCKED;
  void undo_leaving(Transition* m, const core::Status& why) VMEM_LOCKED;

  device::Devices* const devices_;
  DeviceSet& device_set_;
  CpuMappings& cpu_mappings_;
  DeviceBlocks& blocks_;
  ManagedHoles& managed_holes_;
  FailedBlocks& failed_;
  PageIn& page_in_;
  DeviceWriteback& writeback_;
  StagingAllocator& supply_;
  MemoryFreed& freed_;
};

}  // namespace vmem::pager
