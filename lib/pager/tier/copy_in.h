// The last step of promoting: CopyIn makes device memory for ready blocks, copies them there, and
// gives the CPU access.
//
//   ready, in a staging frame ─────────────┐
//   ready, elsewhere in host memory ──copy─┼─> promoting: prepare, copy, map ─> issued, open ─> on_device
//
// - An acquire returns when the copies of its blocks are issued; its stream waits for them. Until
//   the copies end, nothing takes the blocks or their frames away.
// - A block whose copy fails stays where it was, or in its staging frame. If a kernel may have
//   stored to it, it is marked lost.
//
// Workers do this without the lock, several blocks at a time. On devices with their own page tables
// an acquire issues the copies of ready blocks itself, and a worker completes them.
#pragma once

#include <span>

#include "device/device.h"
#include "pager/tier/device_blocks.h"
#include "pager/tier/managed_holes.h"
#include "pager/tier/pipelined_copy.h"
#include "pager/tier/staging_allocator.h"

namespace vmem::pager {

struct DeviceTier;
struct HostTier;

class CopyIn {
 public:
  CopyIn(PagerContext& ctx, DeviceTier& tier);

  // Makes the blocks on device d, fills them and opens them for the CPU. The batch owns the blocks,
  // which were ready for the device.
  void run(Batch& batch, int d) VMEM_UNLOCKED;

  // Removes and returns blocks of the spans that are ready for device d. The acquire that waits for
  // them copies them itself, which saves two thread wake-ups. Leaves blocks that need a copy within
  // host memory first: the workers make those copies in parallel.
  Batch take_ready(std::span<const BlockSpan> spans, int d) VMEM_LOCKED;
  // Issues the copies of these blocks; a worker ends them.
  void begin(const Batch& batch, int d) VMEM_UNLOCKED;
  // Ends the oldest blocks of device d that were issued together; drops the lock while it works.
  // Returns false if there are none.
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

  PagerContext& ctx_;
  HostTier& host_;
  DeviceTier& tier_;
};

}  // namespace vmem::pager
