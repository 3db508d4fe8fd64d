// Puts blocks in place: from a frame that has their bytes to where threads access them.
//
//   state mapping: the Installer owns the block, and its transition is in a TransitionList until install() takes it
//   a fill that failed has left the block in its frame, or nowhere: then it is lost, and is said to be
//
// Called under the pager's lock, but for install().
#pragma once

#include "pager/account/shared.h"
#include "pager/host/failed_blocks.h"
#include "pager/host/memory_pressure.h"
#include "pager/host/memory_waits.h"

namespace vmem::pager {

class Installer : private Shared {
 public:
  Installer(const Shared& shared, MemoryPressure& pressure, FailedBlocks& failed, MemoryWaits& waits,
            MemoryFreed& freed)
      : Shared(shared), pressure_(pressure), failed_(failed), waits_(waits), freed_(freed) {}

  // The block is staged: it goes in place, or waits for memory. False: not even that can be remembered.
  bool begin_install(Region& r, core::BlockIndex b, DeferredWork& after) VMEM_LOCKED;
  // .. False, and nothing changed, when there is no memory. waited: the wait that this ends; null: it begins now.
  bool start_install(Region& r, core::BlockIndex b, DeferredWork& after,
                     const MemoryWaiter* waited = nullptr) VMEM_LOCKED;
  // A transition whose bytes are in its frame. From here on the policy does not name the block.
  void start_installing(Transition* m, core::State from, TransitionList& install) VMEM_LOCKED;
  // Unlocked; owns the transitions of the first, and of others that the same call can put in place.
  void install(TransitionList& transitions, DeferredWork& after) VMEM_UNLOCKED;

  // Blocks of which something was put in place, and is to go, and that somebody has pinned: they wait, and nobody else.
  bool any_pinned() const VMEM_LOCKED { return !pinned_.empty(); }
  // Looks whether the pins have ended. Locked on entry and on return.
  void retry_pinned(Lock& lock, DeferredWork& after) VMEM_LOCKED;

  // A frame that no block needs, of whatever kind.
  void give_frame(Region& r, std::byte* image) VMEM_LOCKED;

 private:
  void installed(Transition* m, const core::Status& s, DeferredWork& after) VMEM_UNLOCKED;
  void settle_installed(Transition* m, const core::Status& s, DeferredWork& after) VMEM_UNLOCKED;
  void refused(Transition* m, const core::Status& why, DeferredWork& after) VMEM_LOCKED;
  bool torn_by_fill(const Transition* m, const core::Status& why) VMEM_UNLOCKED;
  void lose_filled(Transition* m, const core::Status& why) VMEM_LOCKED;

  MemoryPressure& pressure_;
  FailedBlocks& failed_;
  MemoryWaits& waits_;
  MemoryFreed& freed_;
  TransitionList pinned_ VMEM_GUARDED_BY(core::big_lock);
};

}  // namespace vmem::pager
