// The way out of host memory: isolates a block, compares it with the store's copy, and writes it if
// they differ. Then lets the block go, or puts it back because it is to stay, is wanted again, or
// could not be written. Also drops blocks without a write when their contents are of no interest.
//
// - In states isolating and writing_back Writeback owns the block, from evict_batch() until the
//   block is at rest, or Installer has it. Then the block no longer counts as leaving.
// - The block's memory goes only when the store has the bytes, or when they are of no interest.
// - The block's memory is credited if it is let go or lost, and only then.
#pragma once

#include <span>

#include "pager/account/context.h"
#include "pager/host/emergency_buffer.h"
#include "pager/host/isolator.h"
#include "pager/host/page_in.h"
#include "pager/host/store_writer.h"

namespace vmem::pager {

struct HostTier;

class Writeback final : private IoEnd {
 public:
  Writeback(PagerContext& ctx, HostTier& host);

  // Takes each transition, in state isolating, to its end, or to a write that ends later. Takes at
  // most a Batch. The overload with a lock drops and retakes it.
  void evict_batch(std::span<Transition*> batch) VMEM_UNLOCKED;
  void evict_batch(Lock& lock, std::span<Transition*> batch) VMEM_LOCKED;

  // Drops a resident or staged block whose contents are of no interest. Drops and retakes the lock.
  // Returns 0, -EBUSY if a page is pinned, or -ENOMEM.
  Status drop_contents(Lock& lock, Region& r, BlockIndex b, DeferredWork& after) VMEM_LOCKED;
  // Drops a staged block that the store has, too. Call after reserve_transition().
  void drop_held(Region& r, BlockIndex b, DeferredWork& after) VMEM_LOCKED;

  // End the transition of a block in state isolating or writing_back.
  // - let_go() frees the memory: the block is in the store, or unpopulated.
  // - put_back() keeps the block in memory: it is wanted, synced or pinned, or its write failed.
  // - keep_frame() ends a probe: the frame is kept, and goes in place when a fault wants it.
  // - lose_taken() marks a block lost that has lost a part of its pages.
  void let_go(Transition* m, DeferredWork& after) VMEM_LOCKED;
  void put_back(Transition* m, DeferredWork& after) VMEM_LOCKED;
  void keep_frame(Transition* m, DeferredWork& after) VMEM_LOCKED;
  void lose_taken(Transition* m) VMEM_LOCKED;

 private:
  void io_ended(Transition* m) VMEM_UNLOCKED override;
  void settle_taken(Transition* m, DeferredWork& after) VMEM_LOCKED;
  void put_back_dirty(Transition* m, DeferredWork& after) VMEM_LOCKED;
  void finish_clean(Transition* m, DeferredWork& after) VMEM_LOCKED;
  void finish_write(Transition* m, DeferredWork& after) VMEM_UNLOCKED;
  bool drop_written(Transition* m) VMEM_UNLOCKED;
  void drop_cut_off(Transition* m) VMEM_UNLOCKED;
  void stays_cut_off(Transition* m) VMEM_LOCKED;
  void end_write(Transition* m, DeferredWork& after) VMEM_UNLOCKED;
  bool write_aside(Transition* m) VMEM_UNLOCKED;
  bool write_copy(Transition* m, std::byte* copy) VMEM_UNLOCKED;
  void pass_spare(DeferredWork& after) VMEM_UNLOCKED;
  void settle_write(Transition* m, DeferredWork& after) VMEM_UNLOCKED;
  Transition* hold_for_drop(Region& r, BlockIndex b) VMEM_LOCKED;
  void stay_in_place(Transition* m) VMEM_LOCKED;
  void give_buffers(Transition* m) VMEM_LOCKED;
  // Counts the memory of the transition's block as about to come free.
  void count_leaving(Transition* m) VMEM_LOCKED {
    ctx_.writeback_throttle.count_leaving(m->write.leaving, m->region->block_size, leaves_pool(*m));
  }

  PagerContext& ctx_;
  HostTier& host_;
  EmergencyBuffer spare_;
};

}  // namespace vmem::pager
