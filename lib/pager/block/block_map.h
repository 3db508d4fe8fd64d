// The blocks of all regions: what is known of each block in memory or on a device, its transition,
// and the threads that wait for it. BlockMap has the pager's lock. The lock protects every Region,
// all members of BlockMap, and the classes above that say so. No thread holds it across I/O, a wait
// for another block, a hash or copy of a block, or an access to paged memory.
//
// - A block in memory or on a device has one frame, which names it.
// - A transition belongs to one block. From new_transition() to free_transition() its region is in
//   flight.
// - The policy holds a leased block, once it has admitted it.
//
// BlockMap only counts transitions. The thread that makes one owns the transition of its block, and
// works on it without the lock.
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
#include "pager/block/upcalls.h"

namespace vmem::pager {

class BlockMap {
 public:
  // devices: how many there are; each has a pool.
  BlockMap(trap::Trap& trap, const store::Space& space, StagingPoolSet& staging, core::Counters& counters,
           const Tunables& tunables, size_t devices, Upcalls& upcalls);
  BlockMap(const BlockMap&) = delete;
  BlockMap& operator=(const BlockMap&) = delete;

  core::BigMutex& mutex() { return mutex_; }

  // Returns the region at an address, or null. check_range() also checks that one region has the
  // whole range; it returns -EINVAL if not.
  Region* find(uintptr_t address) VMEM_LOCKED;
  core::Status check_range(const void* ptr, size_t size, BlockSpan* out) VMEM_LOCKED;
  core::OwnMap<uintptr_t, std::unique_ptr<Region>>& regions() VMEM_LOCKED { return regions_; }  // by base
  core::OwnString describe_locked(const Region& r, core::BlockIndex b) const VMEM_LOCKED;
  core::OwnString describe(const Region& r, core::BlockIndex b) VMEM_UNLOCKED;
  // Among the regions whose files refuse their changes, describes the one that keeps most bytes in
  // memory: the error, how much it keeps, and the ways out. Ok if there is none.
  Status refusal() const VMEM_LOCKED;

  // A block has a frame from new_entry() to free_entry(), with which it has left memory. Call
  // new_entry() after reserve_block(), or after an entry was given back under the same hold of the
  // lock.
  FrameTable& frame_table() VMEM_LOCKED { return frame_table_; }
  core::FrameId new_entry(Region& r, core::BlockIndex b, std::byte* bytes, uint8_t pool = kHostPool) VMEM_LOCKED;
  void give_entry(core::FrameId id) VMEM_LOCKED;
  void free_entry(core::BlockIndex b, Region& r) VMEM_LOCKED;
  HostCopies& copies() VMEM_LOCKED { return copies_; }
  SpilledBlocks& spilled() VMEM_LOCKED { return spilled_; }
  DirtyBlocks& dirty() VMEM_LOCKED { return dirty_; }
  // Lists a block of a shared file in host memory: its stores are not observed, or it holds changes
  // that its file lacks. note_clean(): its file has its bytes.
  void note_dirty(Region& r, core::BlockIndex b) VMEM_LOCKED;
  // A transition of the block has ended in host memory, or a lease of it has ended: an overdue
  // background write may have waited for that.
  void look_for_overdue(const Region& r, core::BlockIndex b) VMEM_LOCKED;
  void note_clean(const Region& r, core::BlockIndex b) VMEM_LOCKED { dirty_.remove(r.table[b].aux); }
  NonresidentAge& nonresident_age() VMEM_LOCKED { return nonresident_age_; }

  // The policy of each pool (Frame::pool) chooses the blocks that leave first. It may choose a
  // block from admit() to withdraw().
  policy::EvictionPolicy& policy(core::FrameId id) VMEM_LOCKED { return *policies_[frame_table_[id].pool]; }
  policy::EvictionPolicy& policy_of(uint8_t pool) VMEM_LOCKED { return *policies_[pool]; }
  void admit(Region& r, core::BlockIndex b, uint32_t shadow) VMEM_LOCKED;
  // Admits a victim that could not leave: its policy names other blocks first.
  void admit_refused(Region& r, core::BlockIndex b) VMEM_LOCKED;
  void withdraw(core::FrameId id) VMEM_LOCKED;
  // Tells the policies of the block and of its host copy that the block's advice has changed.
  void follow_advice(Region& r, core::BlockIndex b) VMEM_LOCKED;
  void resize_policies(size_t frames = 0) VMEM_LOCKED;  // 0: the size of the frame table
  // After a change of the block's leases: lets the policy hold the block, or not, as its leases
  // say. match_holds() does so for a span whose region is in flight; it drops the lock at times.
  void match_hold(Region& r, core::BlockIndex b) VMEM_LOCKED;
  void match_holds(Lock& lock, const BlockSpan& span) VMEM_LOCKED;

  // Reserve memory: for `count` frames in all, for `free` free transitions, for one of each. Return
  // false if there is no memory.
  bool reserve_entries(size_t count) noexcept VMEM_LOCKED;
  bool reserve_transition(size_t free = 1) noexcept VMEM_LOCKED;
  bool reserve_block() VMEM_LOCKED;

  // Begins a transition of the block, after reserve_transition() or reserve_block().
  // free_transition() ends it and wakes the threads that wait for it.
  Transition* new_transition(Region& r, core::BlockIndex b) VMEM_LOCKED;
  void free_transition(Transition* m) VMEM_LOCKED;
  TransitionPool& transitions() VMEM_LOCKED { return transitions_; }
  StallClock& progress() VMEM_LOCKED { return progress_; }

  // Wakes all waiters, those in changed() and those for one block.
  void notify() VMEM_LOCKED;
  std::condition_variable& changed() { return changed_; }
  BlockWaiters& waiters() VMEM_LOCKED { return waiters_; }
  // Waits until no transition has the block. Returns false if its region is being freed. If the
  // scan gives up, notes the block there and returns true.
  bool wait_stable(Lock& lock, Region& r, core::BlockIndex b, RangeScan* scan = nullptr) VMEM_LOCKED;
  // Sleeps on `what` for one step of the scan's wait. Returns false if the scan must stop waiting.
  bool wait_on(Lock& lock, RangeScan* scan, std::condition_variable& what) VMEM_LOCKED;

  // For tests: recounts everything. Returns what is wrong, or an empty string.
  std::string check() VMEM_LOCKED;

 private:
  trap::Trap& trap_;
  const store::Space& space_;
  core::Counters& counters_;
  const Tunables& tunables_;
  Upcalls& upcalls_;

  core::BigMutex mutex_;
  BlockWaiters waiters_ VMEM_GUARDED_BY(core::big_lock);  // each for one block
  std::condition_variable changed_;                       // a block came to rest, memory came free
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
