// Blocks whose contents are unavailable: lost, unreadable, or refused for want of memory. Reports
// them to accessing threads, to calls and to the log, and revives them. Also counts the blocks of
// which it is unknown what the SSD has.
//
// - A failed block has a reason, if there was memory for it.
// - A block that was refused for want of memory (kDropped) waits here for some. Its contents are
//   intact.
// - unknown_blocks() = the blocks with kUnknown.
// - A poisoned block that the disk refused to read (kUnread) waits here until it is absent again.
//   Then the next access reads it anew. This needs a trap that undoes a poison without a moment of
//   SIGSEGV (caps().poison).
// - If the trap refuses to answer accesses of a block, or the kernel has no memory to read it, its
//   threads sleep for a pause, and repeat the access. A pause is twice as long as the one before,
//   up to kLongestPause. The block is in retries_ once. Its threads sleep, were woken and not
//   refused since, or get SIGBUS.
//
// The pager's lock protects this class.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "pager/account/context.h"
#include "pager/block/pooled_list.h"
#include "pager/host/memory_pressure.h"

namespace vmem::pager {

struct HostTier;

class FailedBlocks {
 public:
  static constexpr uint64_t kShortestPause = 1000000, kLongestPause = 256 * kShortestPause, kSlice = 100000000;  // ns
  static constexpr unsigned kRefusals = 10;  // before accesses are given up: time alone proves nothing

  FailedBlocks(PagerContext& ctx, HostTier& host);

  // mark_unknown(): a write of the block failed. clear_unknown(): the block was written, or its
  // contents are of no interest.
  void mark_unknown(Region& r, core::BlockIndex b) VMEM_LOCKED;
  void clear_unknown(Region& r, BlockIndex b) VMEM_LOCKED;
  uint64_t unknown_blocks() const VMEM_LOCKED { return unknown_blocks_; }
  // Forgets the store's copy of the block, which is out of date.
  void forget_store_copy(Region& r, core::BlockIndex b) VMEM_LOCKED;

  // Poisons a block whose only copy is gone, and whose memory is given back already. `from` is its
  // state.
  void mark_lost(Region& r, core::BlockIndex b, const core::Status& why) VMEM_LOCKED;
  // The disk refused to read the block. Accesses get SIGBUS, and after a while the next one reads
  // the block again. The block has kUnread until a read succeeds, or its contents are of no
  // interest.
  void mark_unread(Region& r, core::BlockIndex b) VMEM_LOCKED;
  void clear_unread(Region& r, core::BlockIndex b) VMEM_LOCKED;
  // Returns -EIO if blocks of the range are lost and no call has said so. again: also if a call
  // has, or if bytes in the store could not be read back.
  core::Status tell_lost(Region& r, core::BlockIndex first, core::BlockIndex last, bool again) VMEM_LOCKED;

  // State poisoned: accesses get SIGBUS from here on. If the trap refuses that (no memory, no
  // mappings), later accesses ask it again.
  void fail_accesses(Region& r, core::BlockIndex b) VMEM_LOCKED;
  // The block is not in place, and the trap refused to answer its accesses: they are repeated after
  // a while.
  void answer_later(Region& r, core::BlockIndex b, const core::Status& why) VMEM_LOCKED;
  // Has accesses of the block repeated after a while. Returns false if it was refused lately
  // already.
  bool ask_later(Region& r, core::BlockIndex b) VMEM_LOCKED;
  // The block is absent, and the kernel had no memory to read it: accesses are repeated after a
  // while, and acquires look again.
  void read_later(Region& r, core::BlockIndex b, const core::Status& why) VMEM_LOCKED;
  // Returns the error of an acquire that has waited too long for such a block.
  core::Status not_read(const Region& r, core::BlockIndex b) const VMEM_LOCKED;
  // Handles one block that is due. Repeats its accesses, or gives them SIGBUS if they were refused
  // for the whole time-out; later ones begin anew. Or makes an unread block absent. Drops and
  // retakes the lock. Returns false if no block is due.
  bool ask_again(Lock& lock, uint64_t now_ns) VMEM_LOCKED;
  // Returns when ask_again() has work next; UINT64_MAX: never.
  uint64_t next_ns() const VMEM_LOCKED;
  // Returns true if threads sleep for the block: others that meet it join them. waits(): the same
  // for an access, which the entry remembers.
  bool asleep(const Region& r, core::BlockIndex b) VMEM_LOCKED {
    const Retry* const known = find_retry(r, b);
    return known != nullptr && known->asleep;
  }
  bool waits(const Region& r, core::BlockIndex b) VMEM_LOCKED {
    Retry* const known = find_retry(r, b);
    if (known == nullptr || !known->asleep) return false;
    return known->accessed = true;
  }
  bool any_retries() const VMEM_LOCKED { return !retries_.empty(); }
  // Returns true if such a block was refused for want of memory.
  bool want_memory() const VMEM_LOCKED;
  // The block is about to go in place: ends the SIGBUS of accesses that the trap had refused to
  // answer.
  void goes_in_place(const Region& r, core::BlockIndex b) VMEM_LOCKED;

  // A fault has waited for memory too long. reserve_dropped() makes room for one more block, and
  // returns false if there is no memory. drop(): accesses of the block get SIGBUS until there may
  // be memory again; returns false, with nothing changed, if there is no room.
  bool reserve_dropped() VMEM_LOCKED { return dropped_.reserve(dropped_.size() + 1); }
  bool drop(Region& r, core::BlockIndex b, const core::Status& why) VMEM_LOCKED;
  bool any_dropped() const VMEM_LOCKED { return !dropped_.empty(); }
  // There may be memory again: makes the dropped blocks absent.
  void revive_dropped() VMEM_LOCKED;
  // Makes a poisoned block absent again. On error it stays poisoned, since accesses would not reach
  // the trap.
  core::Status revive(Region& r, core::BlockIndex b) VMEM_LOCKED;

  // State unpopulated, and the region's table has no room for the block: accesses get SIGBUS until
  // it has. no_table() returns the error.
  void refuse_growth(Region& r, core::BlockIndex b) VMEM_LOCKED;
  core::Status no_table(const Region& r, core::BlockIndex b) const VMEM_LOCKED;

  // Makes room for a region's blocks. Returns false if there is no memory. forget(): the region is
  // being freed.
  bool reserve(size_t blocks) VMEM_LOCKED {
    return dropped_.reserve(blocks) && retries_.reserve(blocks) && unread_.reserve(blocks);
  }
  void forget(const Region& r) VMEM_LOCKED;

  // For tests: recounts unknown and unread blocks, and looks whether dropped ones wait. Returns the
  // first error, or an empty string.
  std::string check() const VMEM_LOCKED;

 private:
  struct ReadError {
    Region* region = nullptr;
    core::BlockIndex block = 0;
    uint64_t until_ns = 0;  // its accesses get SIGBUS until then
  };
  struct Retry {
    Region* region = nullptr;
    core::BlockIndex block = 0;
    uint64_t due_ns = 0, pause_ns = 0;  // the end of the pause, and its length
    uint64_t refused_ns = 0;            // the last time it was refused
    uint64_t lived_ns = 0;              // time of refusal, but none in which the machine stood still
    uint64_t mark = 0;                  // of the wait, as in MemoryWaiter
    unsigned times = 0;                 // refusals since it was last given up
    bool memory = false;                // refused for want of memory: given up when nothing makes progress
    bool accessed = false;              // by a thread of the program; an acquire gives up its own wait
    bool asleep = false;                // threads wait for the end of the pause
    bool bus = false;                   // threads get SIGBUS until the end of the pause
  };
  Retry* find_retry(const Region& r, core::BlockIndex b) VMEM_LOCKED {
    for (Retry& e : retries_)
      if (e.region == &r && e.block == b) return &e;
    return nullptr;
  }
  // The block was refused now: its threads are to sleep. Returns null if there is no memory for the
  // entry.
  Retry* add_retry(Region& r, core::BlockIndex b, uint64_t now_ns) VMEM_LOCKED;
  void read_again() VMEM_LOCKED;
  void forget_unread(const Region& r, core::BlockIndex b) VMEM_LOCKED;
  void end_process(const Region& r, core::BlockIndex b, const core::Status& why) VMEM_LOCKED;

  PagerContext& ctx_;
  HostTier& host_;
  // Failed for want of memory; contents intact.
  PooledList<std::pair<Region*, core::BlockIndex>> dropped_ VMEM_GUARDED_BY(core::big_lock);
  PooledList<Retry> retries_ VMEM_GUARDED_BY(core::big_lock);     // blocks whose accesses could not be answered
  PooledList<ReadError> unread_ VMEM_GUARDED_BY(core::big_lock);  // by until_ns; each poisoned block once
  uint64_t unknown_blocks_ VMEM_GUARDED_BY(core::big_lock) = 0;
  bool ending_ VMEM_GUARDED_BY(core::big_lock) = false;
};

}  // namespace vmem::pager
