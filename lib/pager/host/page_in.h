// The way in: memory for a block, its bytes read and verified, and on to the Installer; for a fault, an acquire, or
// with less urgency for read-ahead and prefetch. And the sole place where deferred work is done.
//
//   state reading: the block's transition is in DeferredWork, or at the engine, or on the thread that verifies it
//   blocks of one ReadGroup are put in place when the last of them has been read
//
// Called under the pager's lock, but for what says otherwise.
#pragma once

#include <array>
#include <span>
#include <string>

#include "pager/account/shared.h"
#include "pager/host/installer.h"
#include "pager/host/readahead_queue.h"
#include "pager/host/store_reader.h"

namespace vmem::pager {

class PageIn final : private Shared, private IoEnd {
 public:
  PageIn(const Shared& shared, MemoryPressure& pressure, FailedBlocks& failed, MemoryWaits& waits, Installer& installer,
         StoreReader& reader, ReadaheadQueue& speculation, MemoryFreed& freed);

  // Takes memory and begins to read block b (unpopulated or stored). False, and nothing changed, when there is none.
  // waited: the wait that this ends, which began with the fault; null: it begins now.
  bool start_fill(Region& r, core::BlockIndex b, core::Urgency urgency, DeferredWork& after,
                  const MemoryWaiter* waited = nullptr) VMEM_LOCKED;
  // .. into a staging frame, where the block stays staged: unpopulated blocks of files, and stored ones.
  bool start_staging(Region& r, core::BlockIndex b, core::Urgency urgency, DeferredWork& after) VMEM_LOCKED;
  // The block has come to rest: whoever asked for it meanwhile, as its flags say, has it brought.
  void settle(Region& r, core::BlockIndex b, DeferredWork& after) VMEM_LOCKED;

  // Unlocked, or with a lock that is dropped meanwhile.
  void run(DeferredWork& after) VMEM_UNLOCKED;
  void run(Lock& lock, DeferredWork& after) VMEM_LOCKED;
  // Memory came free: whoever waits for it is served, and what that defers is done; the lock is dropped meanwhile.
  void serve_waiting(Lock& lock) VMEM_LOCKED;

  std::span<ReadGroup> together() VMEM_LOCKED { return together_; }
  // Tests: nothing is in flight. What is wrong; empty: nothing.
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

  MemoryPressure& pressure_;
  FailedBlocks& failed_;
  MemoryWaits& waits_;
  Installer& installer_;
  StoreReader& reader_;
  ReadaheadQueue& readahead_queue_;
  MemoryFreed& freed_;
  std::array<ReadGroup, 16> together_
      VMEM_GUARDED_BY(core::big_lock);  // neighbours without one are put in place one by one
};

}  // namespace vmem::pager
