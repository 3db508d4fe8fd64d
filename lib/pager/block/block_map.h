// The blocks of all regions: what is known of each that is in memory or on a device, who moves it, and who waits for
// it. Here is the lock. It protects every Region, all that is kept here, and the classes above that say so; it is never
// held across I/O, a wait for another block, a hash or copy of a block, or an access of paged memory.
//
//   a block that is in memory or on a device has one frame, which names it; a transition is one block's, and from
//   new_transition() to free_transition() its region is in flight; what is leased the policy holds, once it has it
//
// Of what a transition does it knows only how to count it: who makes one owns the transition of its block, and works on
// it without the lock.
#pragma once

#include <condition_variable>
#include <memory>
#include <string>
#include <vector>

#include "core/big_lock.h"
#include "core/counters.h"
#include "core/os_allocator.h"
#include "pager/block/block_waiters.h"
#include "pager/block/config.h"
#include "pager/block/dirty_blocks.h"
#include "pager/block/frame_table.h"
#include "pager/block/host_copies.h"
#include "pager/block/nonresident_age.h"
#include "pager/block/region.h"
#include "pager/block/spilled_blocks.h"
#include "pager/block/stall_clock.h"
#include "pager/block/transition.h"
#include "pager/block/transition_pool.h"

namespace vmem::pager {

class BlockMap {
 public:
  // What is asked of those above, under the lock.
  class Above {
   public:
    virtual uint64_t pages(uint8_t pool) const VMEM_LOCKED = 0;  // of 4 KiB, that the blocks of a pool have at most
    virtual void reserve_queues(size_t transitions) VMEM_LOCKED = 0;  // room for so many. Throws bad_alloc
    virtual void leaves(Region& r,
                        core::BlockIndex b) VMEM_LOCKED = 0;  // at rest in memory, and somebody asked it to the SSD

   protected:
    ~Above() = default;
  };

  // devices: so many have a pool of their own.
  BlockMap(trap::Trap& trap, const store::Space& space, StagingPoolSet& staging, core::Counters& counters,
           const Config& config, size_t devices, Above& above);
  BlockMap(const BlockMap&) = delete;
  BlockMap& operator=(const BlockMap&) = delete;

  core::BigMutex& mutex() { return mutex_; }

  // The region at an address; null: there is none. check_range(): and all of the range lies in it.
  Region* find(uintptr_t address) VMEM_LOCKED;
  core::Status check_range(const void* ptr, size_t size, BlockSpan* out) VMEM_LOCKED;
  core::OwnMap<uintptr_t, std::unique_ptr<Region>>& regions() VMEM_LOCKED { return regions_; }  // by base
  core::OwnString where(const Region& r, core::BlockIndex b) const VMEM_LOCKED;
  core::OwnString place(const Region& r, core::BlockIndex b) VMEM_UNLOCKED;
  // Of regions whose files refuse their changes the one that keeps most in memory for it: why, how much, and the ways
  // out. Ok: there is none.
  Status refusal() const VMEM_LOCKED;

  // What is known of a block: from new_entry(), after reserve_block(), or where one has been given back under the
  // same hold of the lock, to free_entry(), with which the block has left memory.
  FrameTable& frame_table() VMEM_LOCKED { return frame_table_; }
  core::FrameId new_entry(Region& r, core::BlockIndex b, std::byte* bytes, uint8_t pool = kHostPool) VMEM_LOCKED;
  void give_entry(core::FrameId id) VMEM_LOCKED;
  void free_entry(core::BlockIndex b, Region& r) VMEM_LOCKED;
  HostCopies& copies() VMEM_LOCKED { return copies_; }
  SpilledBlocks& spilled() VMEM_LOCKED { return spilled_; }
  DirtyBlocks& dirty() VMEM_LOCKED { return dirty_; }
  // A block of a shared file that is in host memory: stores to it are not seen any more, or it holds what its file
  // lacks; its file has its bytes.
  void note_dirty(Region& r, core::BlockIndex b) VMEM_LOCKED;
  // A transition of the block has ended in host memory, or a lease of it has: a background write waited for that,
  // perhaps.
  void look_for_overdue(const Region& r, core::BlockIndex b) VMEM_LOCKED;
  void note_clean(const Region& r, core::BlockIndex b) VMEM_LOCKED { dirty_.remove(r.table[b].aux); }
  NonresidentAge& nonresident_age() VMEM_LOCKED { return nonresident_age_; }

  // Which of them leave first, by Frame::pool. admit(): from here on it may be chosen.
  policy::EvictionPolicy& policy(core::FrameId id) VMEM_LOCKED { return *policies_[frame_table_[id].pool]; }
  policy::EvictionPolicy& policy_of(uint8_t pool) VMEM_LOCKED { return *policies_[pool]; }
  // withdraw(): it may not be chosen any more.
  void admit(Region& r, core::BlockIndex b, uint32_t shadow) VMEM_LOCKED;
  void withdraw(core::FrameId id) VMEM_LOCKED;
  // Something else has been advised of the block: those that know it, or its host copy, hear it.
  void follow_advice(Region& r, core::BlockIndex b) VMEM_LOCKED;
  void resize_policies(size_t frames = 0) VMEM_LOCKED;  // 0: as many as there are
  // After a change of the block's leases. match_holds(): of a span, and now and then not locked; it is in flight.
  void match_hold(Region& r, core::BlockIndex b) VMEM_LOCKED;
  void match_holds(Lock& lock, const BlockSpan& span) VMEM_LOCKED;

  // Memory for transitions and frames. reserve_block(): for one of each. False: there is none.
  bool reserve_entries(size_t count) noexcept VMEM_LOCKED;
  bool reserve_transition(size_t free = 1) noexcept VMEM_LOCKED;
  bool reserve_block() VMEM_LOCKED;

  // A block's way somewhere, after reserve_transition() or reserve_block(). free_transition(): it is over, and who
  // waits hears it.
  Transition* new_transition(Region& r, core::BlockIndex b) VMEM_LOCKED;
  void free_transition(Transition* m) VMEM_LOCKED;
  TransitionPool& transitions() VMEM_LOCKED { return transitions_; }
  StallClock& progress() VMEM_LOCKED { return progress_; }

  // Something happened that anybody may wait for, in changed().
  void notify() VMEM_LOCKED;
  std::condition_variable& changed() { return changed_; }
  BlockWaiters& waiters() VMEM_LOCKED { return waiters_; }
  // Until no transition has the block. False: its region is being freed.
  bool wait_stable(Lock& lock, Region& r, core::BlockIndex b, RangeScan* scan = nullptr) VMEM_LOCKED;
  // A piece of a wait that the scan is in. False: it is not to wait any longer.
  bool wait_on(Lock& lock, RangeScan* scan, std::condition_variable& what) VMEM_LOCKED;

  // Tests: recounts what is kept here. What is wrong; empty: nothing.
  std::string check() VMEM_LOCKED;

 private:
  trap::Trap& trap_;
  const store::Space& space_;
  core::Counters& counters_;
  const Config& config_;
  Above& above_;

  core::BigMutex mutex_;
  BlockWaiters waiters_ VMEM_GUARDED_BY(core::big_lock);  // for one block each
  std::condition_variable changed_;                       // .. for more: some block came to rest, memory came free
  core::OwnMap<uintptr_t, std::unique_ptr<Region>> regions_ VMEM_GUARDED_BY(core::big_lock);  // by base
  std::vector<std::unique_ptr<policy::EvictionPolicy>> policies_;                             // by Frame::pool
  FrameTable frame_table_ VMEM_GUARDED_BY(core::big_lock);
  TransitionPool transitions_ VMEM_GUARDED_BY(core::big_lock);
  NonresidentAge nonresident_age_ VMEM_GUARDED_BY(core::big_lock);
  StallClock progress_ VMEM_GUARDED_BY(core::big_lock);
  HostCopies copies_ VMEM_GUARDED_BY(core::big_lock);
  SpilledBlocks spilled_ VMEM_GUARDED_BY(core::big_lock);
  DirtyBlocks dirty_ VMEM_GUARDED_BY(core::big_lock);
};

}  // namespace vmem::pager
