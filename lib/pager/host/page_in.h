// The way in: allocates memory for a block, reads and verifies its bytes, and hands it to
// Installer, for a fault or an acquire, or less urgently for read-ahead and prefetch. No other
// class runs deferred work.
//
// - In state reading the block's transition is in DeferredWork, at the engine, or on the thread
//   that verifies it.
// - Blocks of one ReadGroup are put in place when the last of them has been read.
#pragma once

#include <array>
#include <span>
#include <string>

#include "pager/account/context.h"
#include "pager/host/installer.h"
#include "pager/host/store_reader.h"

namespace vmem::pager {

struct HostTier;

class PageIn final : private IoEnd {
 public:
  PageIn(PagerContext& ctx, HostTier& host);

  // Takes memory and begins to read block b (unpopulated or stored). Returns false, with nothing
  // changed, if there is no memory. waited: the wait that this ends, which began with the fault;
  // null: it begins now.
  bool start_fill(Region& r, core::BlockIndex b, core::Urgency urgency, DeferredWork& after,
                  const MemoryWaiter* waited = nullptr) VMEM_LOCKED;
  // Begins to read a stored block, or an unpopulated block of a file, into a staging frame. The
  // block stays staged there. Returns false, with nothing changed, if there is no memory.
  bool start_staging(Region& r, core::BlockIndex b, core::Urgency urgency, DeferredWork& after) VMEM_LOCKED;
  // The block has come to rest: begins to bring it if its flags say that a fault waits.
  void settle(Region& r, core::BlockIndex b, DeferredWork& after) VMEM_LOCKED;

  // Runs deferred work. The overload with a lock drops and retakes it.
  void run(DeferredWork& after) VMEM_UNLOCKED;
  // Same on a thread that waits for one of these reads: it reads that block itself.
  void run_here(DeferredWork& after) VMEM_UNLOCKED;
  void run(Lock& lock, DeferredWork& after) VMEM_LOCKED;
  // Memory came free: serves the waiters, and runs the work that this defers. Drops and retakes the
  // lock.
  void serve_waiting(Lock& lock) VMEM_LOCKED;

  std::span<ReadGroup> together() VMEM_LOCKED { return together_; }
  // For tests, while nothing is in flight. Returns the first error, or an empty string.
  std::string check() const VMEM_LOCKED;

 private:
  void io_ended(Transition* m) VMEM_UNLOCKED override;
  void finish_read(Transition* m, DeferredWork& after) VMEM_UNLOCKED;
  static void note_hole(const Transition& m) VMEM_LOCKED;
  void clear_hole(Lock& lock, Transition* m) VMEM_LOCKED;
  void settle_read(Transition* m, DeferredWork& after) VMEM_LOCKED;
  void put_off_fill(Transition* m, DeferredWork& after) VMEM_LOCKED;
  static void say_failed(const Transition& m) VMEM_UNLOCKED;
  void fail_fill(Transition* m, bool shows_file, DeferredWork& after) VMEM_LOCKED;
  void abandon_fill(Transition* m, DeferredWork& after) VMEM_LOCKED;
  bool populate(Transition* m, DeferredWork& after) VMEM_UNLOCKED;
  bool show_file(Transition* m) VMEM_UNLOCKED;

  PagerContext& ctx_;
  HostTier& host_;
  // Neighbours that find no free group are put in place one by one.
  std::array<ReadGroup, 16> together_ VMEM_GUARDED_BY(core::big_lock);
};

}  // namespace vmem::pager
