// The end of the way to a device, for blocks that are ready for it: memory there, the copy, access for the CPU.
//
//   ready, in a staging frame ───────────────────┐
//   ready, elsewhere in host memory ──copy───────┼─> promoting: prepare, copy, map ─> issued ─> open ─> on_device
//
//   an acquire may go on when the copies of its blocks are issued: its stream waits for them; until they have ended
//   nothing takes the blocks, or their frames, away
//   one that could not come is where it was, or in its staging frame, unless a kernel may have stored to it: then it
//   has a mark
//
// Workers do it without the lock, several blocks at a time. What is ready at once, on devices with page tables of their
// own, an acquire issues itself, and a worker does the rest.
#pragma once

#include <span>

#include "device/device.h"
#include "pager/tier/device_blocks.h"
#include "pager/tier/managed_holes.h"
#include "pager/tier/pipelined_copy.h"
#include "pager/tier/staging_allocator.h"

namespace vmem::pager {

class CopyIn : private Shared {
 public:
  // demotion_requests: wait for what comes; under the lock.
  CopyIn(const Shared& shared, device::Devices* devices, const PooledList<DemotionRequest>& demotion_requests,
         DeviceSet& gpus, DeviceBlocks& blocks, ManagedHoles& holes, FailedBlocks& failed, PageIn& page_in,
         StagingAllocator& supply, PipelinedCopy& pipelined_copy, MemoryFreed& freed)
      : Shared(shared),
        devices_(devices),
        demotion_requests_(demotion_requests),
        device_set_(gpus),
        blocks_(blocks),
        managed_holes_(holes),
        failed_(failed),
        page_in_(page_in),
        supply_(supply),
        pipelined_copy_(pipelined_copy),
        freed_(freed) {}

  // Unlocked. Makes the blocks on device d, fills them and opens them. They were ready for it, and are nobody's else.
  void run(Batch& batch, int d) VMEM_UNLOCKED;

  // Locked. Of what is ready for device d: what somebody waits for who could do it as well, without two threads that
  // wake each other. What has to be copied in host memory first the workers do, side by side.
  Batch take_ready(std::span<const BlockSpan> spans, int d) VMEM_LOCKED;
  // Unlocked. Begins with them; a worker ends it.
  void begin(const Batch& batch, int d) VMEM_UNLOCKED;
  // Locked on entry and on return, and not meanwhile. Of device d the oldest that were begun together. False: there are
  // none.
  bool end_issued(Lock& lock, int d) VMEM_LOCKED;

 private:
  void pull(Batch& batch, int d) VMEM_UNLOCKED;
  core::Status take_aside(Transition* m) VMEM_UNLOCKED;
  void lose_taken(Transition* m) VMEM_LOCKED;
  void copy_aside(Transition* m) VMEM_UNLOCKED;
  void pulled(Transition* m, int d) VMEM_LOCKED;
  void begin_in(InBatch& in) VMEM_UNLOCKED;
  void note_issued(const InBatch& in) VMEM_LOCKED;
  void end_in(InBatch& in) VMEM_UNLOCKED;
  void open(InBatch& in) VMEM_UNLOCKED;
  void arrived(Transition* m) VMEM_LOCKED;
  void undo(Transition* m, const core::Status& why, bool trapped, DeferredWork& after) VMEM_LOCKED;

  device::Devices* const devices_;
  const PooledList<DemotionRequest>& demotion_requests_;
  DeviceSet& device_set_;
  DeviceBlocks& blocks_;
  ManagedHoles& managed_holes_;
  FailedBlocks& failed_;
  PageIn& page_in_;
  StagingAllocator& supply_;
  PipelinedCopy& pipelined_copy_;
  MemoryFreed& freed_;
};

}  // namespace vmem::pager
