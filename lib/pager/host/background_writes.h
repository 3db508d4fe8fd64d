// Writes dirty blocks of shared files in the background, so that a killed process loses little: a
// block is written to its file within writeback_interval of the first store that its file lacks,
// and stays in memory as clean. Faults that would make more blocks dirty wait while dirty_limit
// bytes are dirty.
//
// - The oldest block goes first, and its dirty neighbours with it. They are isolated and compared
//   as for a sync.
// - A block that cannot be written now (a lease for writing, a transition, a loan, a file that
//   refused) goes to the end of the list as overdue, and comes to the front again when its lease or
//   transition ends. A call that leases or evicts such a block writes it first: a program that
//   makes such calls in a loop leaves no other moment for the write.
// - Faults wait while writes end. If no write ends or can begin, the faults go on, and the log says
//   so.
//
// Reclaim threads call it, under the pager's lock.
#pragma once

#include "pager/account/context.h"
#include "pager/host/isolator.h"
#include "pager/host/writeback.h"

namespace vmem::pager {

struct HostTier;

class BackgroundWrites {
 public:
  BackgroundWrites(PagerContext& ctx, HostTier& host);

  // Begins a batch of writes that are due. Returns false if there was none. Drops and retakes the
  // lock.
  bool write_some(Lock& lock, uint64_t now_ns) VMEM_LOCKED;
  // Begins the writes of overdue blocks of a range, and waits while too many are under way. The
  // caller keeps the region alive. Drops and retakes the lock.
  void write_overdue(Lock& lock, const BlockSpan& span) VMEM_LOCKED;
  // Wakes the faults that may go on because fewer blocks are dirty.
  void wake_slowed(uint64_t now_ns) VMEM_LOCKED;
  // The write of a block failed, but not because of its file: such blocks are left alone for an
  // interval.
  void write_failed(core::FrameId id, uint64_t now_ns) VMEM_LOCKED;
  // Returns when there is work next; UINT64_MAX: not before a reclaim thread is woken.
  uint64_t next_ns(uint64_t now_ns) const VMEM_LOCKED;

 private:
  bool may_write(Region& r, core::BlockIndex b, uint64_t now_ns) const VMEM_LOCKED;
  bool take(Region& r, core::BlockIndex b, Batch* batch) VMEM_LOCKED;
  uint64_t take_run(Region& r, core::BlockIndex b, uint64_t now_ns, Batch* batch) VMEM_LOCKED;
  bool pick(uint64_t now_ns, Batch* batch) VMEM_LOCKED;
  bool left_alone(core::FrameId id, uint64_t now_ns) const VMEM_LOCKED {
    return now_ns < failed_until_ns_ && ctx_.map.dirty().failed(id);
  }
  void give_up(uint64_t now_ns) VMEM_LOCKED;

  PagerContext& ctx_;
  HostTier& host_;
  // The last look found nothing that can be written: the next is at again_ns_, or after a change.
  uint64_t again_ns_ VMEM_GUARDED_BY(core::big_lock) = 0;
  uint64_t again_changes_ VMEM_GUARDED_BY(core::big_lock) = 0;
  uint64_t failed_until_ns_ VMEM_GUARDED_BY(core::big_lock) = 0;
  // Bytes of the list that were looked at since the last block that could be written.
  uint64_t in_vain_ VMEM_GUARDED_BY(core::big_lock) = 0;
};

}  // namespace vmem::pager
