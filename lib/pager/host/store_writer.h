// Writes images of blocks to the store, or to their file: compresses them, finds room on the SSD, and says what a write
// that failed means. Small blocks that leave together lie together there, in the order of their addresses.
//
//   the store's copy of a block stays until a write of the new one has ended well; where that goes over the old one,
//   the block stays in memory until then, and has no digest
//   a write that fails on one path is tried on the others before anybody hears of it
//   a write that was begun and failed leaves its block unknown, and what it had room in is given back
#pragma once

#include <span>

#include "core/guarded_read.h"
#include "pager/account/shared.h"
#include "pager/host/failed_blocks.h"
#include "pager/host/memory_pressure.h"

namespace vmem::pager {

class StoreWriter : private Shared {
 public:
  StoreWriter(const Shared& shared, MemoryPressure& pressure, FailedBlocks& failed)
      : Shared(shared), pressure_(pressure), failed_(failed) {}

  // Unlocked. Encodes and finds room; a transition that finds none carries the status. No more than a Batch holds.
  void prepare_writes(std::span<Transition* const> transitions) VMEM_UNLOCKED;
  // Locked. Its image is written when the lock has been dropped; `end` goes on with it.
  void to_store(Transition* m, IoEnd& end, DeferredWork& after) VMEM_LOCKED;
  // Unlocked; the write has failed. True: there is room on another path, and to_store() is to be called again.
  bool find_elsewhere(Transition* m) VMEM_UNLOCKED;
  // Locked. The mark, words, back-off, and a status for whoever asks next; and what had been allocated for it.
  void note_write_failure(Transition* m) VMEM_LOCKED;
  void give_back_extent(Transition* m) VMEM_LOCKED;
  // Unlocked. The store has room again, or may have: who waits to write tries at once.
  void store_has_room() VMEM_UNLOCKED;
  const core::MappingQuery& mappings() const { return mappings_; }

 private:
  void allocate_cluster(std::span<Transition*> cluster) VMEM_UNLOCKED;
  bool may_load(const Transition& m) const VMEM_UNLOCKED;

  MemoryPressure& pressure_;
  FailedBlocks& failed_;
  const core::MappingQuery mappings_;
};

}  // namespace vmem::pager
