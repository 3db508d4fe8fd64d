// The end of the way out of host memory: lets an isolated block go, puts it back, or marks it lost.
// Also drops blocks without a write when their contents are of no interest.
//
// - Each call ends the transition: the block is at rest, or Installer has it. The block no longer
//   counts as leaving.
// - The block's memory is credited if it is let go or lost, and only then.
#pragma once

#include "pager/host/page_in.h"

namespace vmem::pager {

struct HostTier;

class IsolatedBlocks {
 public:
  IsolatedBlocks(PagerContext& ctx, HostTier& host);

  // Counts the memory of the transition's block as about to come free.
  void leaves(Transition* m) VMEM_LOCKED {
    ctx_.writes.leaves(m->write.leaving, m->region->block_size, leaves_pool(*m));
  }

  // State isolating or writing_back.
  // - let_go() frees the memory: the block is in the store, or unpopulated.
  // - put_back() keeps the block in memory: it is wanted, synced or pinned, or its write failed.
  // - keep_frame() ends a probe: the frame is kept, and goes in place when a fault wants it.
  // - lose_taken() marks a block lost that has lost a part of its pages.
  void let_go(Transition* m, DeferredWork& after) VMEM_LOCKED;
  void put_back(Transition* m, DeferredWork& after) VMEM_LOCKED;
  void keep_frame(Transition* m, DeferredWork& after) VMEM_LOCKED;
  void lose_taken(Transition* m) VMEM_LOCKED;

  // Drops a resident or staged block whose contents are of no interest. Drops and retakes the lock.
  // Returns 0, -EBUSY if a page is pinned, or -ENOMEM.
  Status drop_contents(Lock& lock, Region& r, BlockIndex b, DeferredWork& after) VMEM_LOCKED;
  // Drops a staged block that the store has, too. Call after reserve_transition().
  void drop_held(Region& r, BlockIndex b, DeferredWork& after) VMEM_LOCKED;

 private:
  Transition* hold_for_drop(Region& r, BlockIndex b) VMEM_LOCKED;
  void stay_in_place(Transition* m) VMEM_LOCKED;
  void give_buffers(Transition* m) VMEM_LOCKED;

  PagerContext& ctx_;
  HostTier& host_;
};

}  // namespace vmem::pager
