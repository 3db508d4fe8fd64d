// Puts blocks in place: from a frame that has their bytes to the addresses that threads access.
//
// - In state mapping the Installer owns the block. The transition is in a TransitionList until
//   install() takes it.
// - After a fill that failed, the block is still in its frame, or its bytes are gone; then it is
//   marked lost.
#pragma once

#include "pager/account/context.h"
#include "pager/host/failed_blocks.h"
#include "pager/host/memory_pressure.h"
#include "pager/host/memory_waits.h"

namespace vmem::pager {

struct HostTier;

class Installer {
 public:
  Installer(PagerContext& ctx, HostTier& host);

  // Puts a staged block in place, or has it wait for memory. Returns false if it cannot be queued,
  // as MemoryWaits::starve_fault() does.
  bool install_or_wait(Region& r, core::BlockIndex b, DeferredWork& after) VMEM_LOCKED;
  // Begins to put a staged block in place. Returns false, with nothing changed, if there is no
  // memory. waited: the wait that this ends; null: it begins now.
  bool try_install(Region& r, core::BlockIndex b, DeferredWork& after,
                   const MemoryWaiter* waited = nullptr) VMEM_LOCKED;
  // Adds a transition whose bytes are in its frame to `install`. From here on the policy does not
  // name the block.
  void queue_install(Transition* m, TransitionList& install) VMEM_LOCKED;
  // Puts the first transition in place, and others that the same call can. Takes them from the
  // list.
  void install(TransitionList& transitions, DeferredWork& after) VMEM_UNLOCKED;

  // Returns true if a fill failed and left pages in place that are pinned, and so cannot be
  // dropped. Only the blocks of these pages wait.
  bool any_pinned() const VMEM_LOCKED { return !pinned_.empty(); }
  // Looks whether the pins have ended. Drops and retakes the lock.
  void retry_pinned(Lock& lock, DeferredWork& after) VMEM_LOCKED;

  // Gives back a frame of any kind.
  void give_frame(Region& r, std::byte* image) VMEM_LOCKED;

 private:
  void installed(Transition* m, const core::Status& s, DeferredWork& after) VMEM_UNLOCKED;
  void settle_installed(Transition* m, const core::Status& s, DeferredWork& after) VMEM_UNLOCKED;
  void refused(Transition* m, const core::Status& why, DeferredWork& after) VMEM_LOCKED;
  bool torn_by_fill(const Transition* m, const core::Status& why) VMEM_UNLOCKED;
  void lose_filled(Transition* m, const core::Status& why) VMEM_LOCKED;

  PagerContext& ctx_;
  HostTier& host_;
  TransitionList pinned_ VMEM_GUARDED_BY(core::big_lock);
};

}  // namespace vmem::pager
