// Writes images of blocks to the store or to their file: compresses them, finds room on the SSD,
// and decides what a failed write means. Small blocks that leave together are stored side by side,
// in the order of their addresses.
//
// - The store's copy of a block stays until a write of the new one has succeeded. If that
//   overwrites the old copy, the block stays in memory until then and has no digest.
// - A write that fails on one path is tried on the others before it counts as failed.
// - A write that was begun and failed leaves its block unknown. Its new room is given back.
#pragma once

#include <span>

#include "core/process/guarded_read.h"
#include "pager/account/context.h"
#include "pager/host/failed_blocks.h"
#include "pager/host/memory_pressure.h"

namespace vmem::pager {

struct HostTier;

class StoreWriter {
 public:
  StoreWriter(PagerContext& ctx, HostTier& host);

  // Encodes the images and finds room for them. A transition without room has a failed status.
  // Takes at most a Batch.
  void prepare_writes(std::span<Transition* const> transitions) VMEM_UNLOCKED;
  // State writing_back. Has the image written once the lock is dropped; `end` continues then.
  void to_store(Transition* m, IoEnd& end, DeferredWork& after) VMEM_LOCKED;
  // The write has failed. Returns true if another path has room and to_store() is to be called
  // again.
  bool find_elsewhere(Transition* m) VMEM_UNLOCKED;
  // note_write_failure() marks the block unknown, logs the failure, delays the next try, and keeps
  // the status for the next call that asks. give_back_extent() frees the room of the failed write;
  // call it before another try may begin.
  void note_write_failure(Transition* m) VMEM_LOCKED;
  void give_back_extent(Transition* m) VMEM_LOCKED;
  // The store may have room again: writes that wait are tried at once.
  void store_has_room() VMEM_UNLOCKED;
  const core::MappingQuery& mappings() const { return mappings_; }

 private:
  void allocate_cluster(std::span<Transition*> cluster) VMEM_UNLOCKED;
  bool may_load(const Transition& m) const VMEM_UNLOCKED;

  PagerContext& ctx_;
  HostTier& host_;
  const core::MappingQuery mappings_;
};

}  // namespace vmem::pager
