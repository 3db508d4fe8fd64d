// How the way out of host memory ends for a block that was isolated, once it is known how: its memory is let go, it is
// put back, or it is lost; and blocks that go without a write, because nobody wants their contents.
//
//   each call ends the transition: the block is at rest, or Installer has it. Its memory is credited when
//   it is let go or lost, and only then; and it is counted as leaving no more
//
// Called under the pager's lock, but for what says otherwise.
#pragma once

#include "pager/host/page_in.h"

namespace vmem::pager {

class IsolatedBlocks : private Shared {
 public:
  IsolatedBlocks(const Shared& shared, FailedBlocks& failed, Installer& installer, PageIn& page_in)
      : Shared(shared), failed_(failed), installer_(installer), page_in_(page_in) {}

  // The memory of the transition's block will come free.
  void leaves(Transition* m) VMEM_LOCKED { writes_.leaves(m->leaving, m->region->block_size, leaves_pool(*m)); }

  // State isolating, or writing back. let_go(): from that state, to the store or nowhere. put_back(): it stays in
  // memory, wanted, synced, pinned by somebody, or its write failed. keep_frame(): it was only to be isolated.
  // lose_taken(): a part of its pages is gone.
  void let_go(Transition* m, State from, DeferredWork& after) VMEM_LOCKED;
  void put_back(Transition* m, DeferredWork& after) VMEM_LOCKED;
  void keep_frame(Transition* m, DeferredWork& after) VMEM_LOCKED;
  void lose_taken(Transition* m) VMEM_LOCKED;

  // A block that is resident or staged loses its contents, which nobody wants any more. Locked on entry and on return.
  Status drop_contents(Lock& lock, Region& r, BlockIndex b, DeferredWork& after) VMEM_LOCKED;
  // A staged block that the store has too; after reserve_transition().
  void drop_held(Region& r, BlockIndex b, DeferredWork& after) VMEM_LOCKED;

 private:
  Transition* hold_for_drop(Region& r, BlockIndex b) VMEM_LOCKED;
  void stay_in_place(Transition* m, State from) VMEM_LOCKED;
  void give_buffers(Transition* m) VMEM_LOCKED;

  FailedBlocks& failed_;
  Installer& installer_;
  PageIn& page_in_;
};

}  // namespace vmem::pager
