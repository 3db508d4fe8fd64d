// Blocks whose bytes nobody can have: lost, unreadable, or refused for want of memory; what is said of them, to the
// threads that access them, to calls and to the log; and what makes them good again. And blocks of which it is not
// known any more what the SSD has of them.
//
//   a block that is failed has a reason, if there was memory for it; one that was refused for want of memory (kDropped)
//   waits here for some, and its contents are intact; unknown_blocks() = the blocks with kUnknown
//   a block that the disk refused to read (kUnread) and that is poisoned waits here for the time at which it is absent
//   again, and the next access reads it anew, where the trap takes that without a moment of SIGSEGV (caps().poison)
//   accesses that the trap refused to have answered, or whose block the kernel had no memory to read, are made again
//   after a while, and are known by their block
//
// The pager's lock protects it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "core/pooled_list.h"
#include "pager/account/shared.h"
#include "pager/host/fault_retry_queue.h"
#include "pager/host/memory_pressure.h"

namespace vmem::pager {

class FailedBlocks : private Shared {
 public:
  FailedBlocks(const Shared& shared, MemoryPressure& pressure) : Shared(shared), pressure_(pressure) {}

  // A write of the block failed; it was written, or its contents are of no interest any more.
  void mark_unknown(Region& r, core::BlockIndex b) VMEM_LOCKED;
  void clear_unknown(core::Block& block) VMEM_LOCKED;
  uint64_t unknown_blocks() const VMEM_LOCKED { return unknown_blocks_; }
  // What the SSD has of it is out of date.
  void forget_store_copy(Region& r, core::BlockIndex b) VMEM_LOCKED;

  // Its only copy is gone, and the block was in state `from`.
  void mark_lost(Region& r, core::BlockIndex b, core::State from, const core::Status& why) VMEM_LOCKED;
  // The disk refused to read it: accesses get SIGBUS, and after a while the next one reads again. Until a read
  // succeeds, or its contents are of no interest, it has kUnread.
  void mark_unread(Region& r, core::BlockIndex b) VMEM_LOCKED;
  void clear_unread(Region& r, core::BlockIndex b) VMEM_LOCKED;
  // -EIO when blocks of the range are lost, or their bytes could not be read back; `again`: also when a call has said
  // so before.
  core::Status tell_lost(Region& r, core::BlockIndex first, core::BlockIndex last, bool again) VMEM_LOCKED;

  // State poisoned: accesses get SIGBUS from here on.
  void fail_accesses(Region& r, core::BlockIndex b) VMEM_LOCKED;
  // The trap refused what would answer accesses of the block.
  void answer_later(Region& r, core::BlockIndex b, const core::Status& why) VMEM_LOCKED;
  // .. an access of it: it is made again later. False: it has been refused before, lately.
  bool ask_later(Region& r, core::BlockIndex b) VMEM_LOCKED;
  // The kernel had no memory to read it: an access of it is made again later, too.
  void read_later(Region& r, core::BlockIndex b, const core::Status& why) VMEM_LOCKED;
  // .. and this is what an acquire says that has waited for it for too long.
  core::Status not_read(const Region& r, core::BlockIndex b) const VMEM_LOCKED;
  // Those that are due are made again, and accesses read again that got SIGBUS for as long as is meant. Locked on entry
  // and on return. False: there are none.
  bool ask_again(Lock& lock, uint64_t now_ns) VMEM_LOCKED;
  FaultRetryQueue& retries() VMEM_LOCKED { return retries_; }
  // When that is to be done next; UINT64_MAX: never.
  uint64_t next_ns() const VMEM_LOCKED {
    return std::min(retries_.next_ns(), unread_.empty() ? UINT64_MAX : unread_.front().until_ns);
  }
  // The block is about to go in place: accesses that got SIGBUS because the trap refused it do not any more.
  void goes_in_place(const Region& r, core::BlockIndex b) VMEM_LOCKED;

  // A fault has waited for memory for too long. reserve_dropped(): to know one more by. False: no memory for that.
  bool reserve_dropped() VMEM_LOCKED { return dropped_.reserve(dropped_.size() + 1); }
  bool drop(Region& r, core::BlockIndex b, const core::Status& why) VMEM_LOCKED;
  bool any_dropped() const VMEM_LOCKED { return !dropped_.empty(); }
  // There may be room for all that were dropped.
  void revive_dropped() VMEM_LOCKED;
  // State poisoned. On error it is poisoned as it was: no access would reach the trap.
  core::Status revive(Region& r, core::BlockIndex b) VMEM_LOCKED;

  // State unpopulated, and there is no room for it in its region's table: accesses get SIGBUS until there is.
  void refuse_growth(Region& r, core::BlockIndex b) VMEM_LOCKED;
  core::Status no_table(const Region& r, core::BlockIndex b) const VMEM_LOCKED;

  // Room for a region's blocks; false: no memory. It goes.
  bool reserve(size_t blocks) VMEM_LOCKED {
    return dropped_.reserve(blocks) && retries_.reserve(blocks) && unread_.reserve(blocks);
  }
  void forget(const Region& r) VMEM_LOCKED;

  // Tests: recounts what is unknown or unread, and what was dropped waits. What is wrong; empty: nothing.
  std::string check() const VMEM_LOCKED;

 private:
  struct ReadError {
    Region* region = nullptr;
    core::BlockIndex block = 0;
    uint64_t until_ns = 0;  // its accesses get SIGBUS until then
  };
  void read_again() VMEM_LOCKED;
  void forget_unread(const Region& r, core::BlockIndex b) VMEM_LOCKED;
  void end_process(const Region& r, core::BlockIndex b, const core::Status& why) VMEM_LOCKED;

  MemoryPressure& pressure_;
  PooledList<std::pair<Region*, core::BlockIndex>> dropped_
      VMEM_GUARDED_BY(core::big_lock);                            // failed for want of memory; bytes intact
  FaultRetryQueue retries_ VMEM_GUARDED_BY(core::big_lock);       // blocks whose accesses could not be answered
  PooledList<ReadError> unread_ VMEM_GUARDED_BY(core::big_lock);  // in the order of their times; a poisoned block once
  uint64_t unknown_blocks_ VMEM_GUARDED_BY(core::big_lock) = 0;
  bool ending_ VMEM_GUARDED_BY(core::big_lock) = false;
};

}  // namespace vmem::pager
