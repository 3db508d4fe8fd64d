// Writes dirty blocks of shared files while nobody asks for it, so that a killed process loses little: a block leaves
// for its file within writeback_interval of the first store that its file lacks, and stays in memory as clean. Faults
// that would make more blocks dirty wait while there are dirty_limit bytes of them.
//
// - The oldest block goes first, and its dirty neighbours with it. They are isolated and compared as for a sync.
// - A block that cannot be written now (a lease for writing, a transition, a loan, a file that refused) goes to the end
//   of the list as overdue, and comes to the front again when its lease or transition ends. A call that leases or
//   evicts such a block writes it first: a program that does so in a loop leaves no other moment for it.
// - Faults wait while writes end. Where none ends or can begin, the faults go on, and the log says so.
//
// Reclaim threads call it, under the pager's lock.
#pragma once

#include "pager/account/shared.h"
#include "pager/host/isolator.h"
#include "pager/host/writeback.h"

namespace vmem::pager {

class BackgroundWrites : private Shared {
 public:
  BackgroundWrites(const Shared& shared, Isolator& isolator, Writeback& write_back)
      : Shared(shared), isolator_(isolator), writeback_(write_back) {}

  // Begins a batch of writes that are due. False: there was none. Locked on entry and on return.
  bool write_some(Lock& lock, uint64_t now_ns) VMEM_LOCKED;
  // Begins the writes of overdue blocks of a range, and waits while too many are under way. The caller keeps its
  // region.
  void write_overdue(Lock& lock, const BlockSpan& span) VMEM_LOCKED;
  // Lets faults go on that waited for fewer dirty blocks.
  void wake_slowed(uint64_t now_ns) VMEM_LOCKED;
  // When there is something to do; UINT64_MAX: not before somebody rings.
  uint64_t next_ns(uint64_t now_ns) const VMEM_LOCKED;

 private:
  bool may_write(Region& r, core::BlockIndex b, uint64_t now_ns) const VMEM_LOCKED;
  bool take(Region& r, core::BlockIndex b, Batch* batch) VMEM_LOCKED;
  uint64_t take_run(Region& r, core::BlockIndex b, uint64_t now_ns, Batch* batch) VMEM_LOCKED;
  bool pick(uint64_t now_ns, Batch* batch) VMEM_LOCKED;
  void give_up(uint64_t now_ns) VMEM_LOCKED;

  Isolator& isolator_;
  Writeback& writeback_;
  // Nothing was found that can be written: not before this, unless there has been a change since.
  uint64_t again_ns_ VMEM_GUARDED_BY(core::big_lock) = 0;
  uint64_t again_changes_ VMEM_GUARDED_BY(core::big_lock) = 0;
  // Bytes of the list that were looked at since something could be written.
  uint64_t in_vain_ VMEM_GUARDED_BY(core::big_lock) = 0;
};

}  // namespace vmem::pager
