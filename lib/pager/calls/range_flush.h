// Writes the blocks of a range that the store does not have, for a call that waits for it: they stay where they are, or
// leave memory. What a device has changed is RangeDemoter's.
//
//   no transition of a block is this thread's own while it waits for another one's
//   leased blocks (to stay: those under WRITE) are skipped and said, unless the scan says `all`
//   all that was begun has ended when it returns, and the first failure is told
//   a call over many ranges begins to write one while others are being written
//
// Locked on entry and on return, and not meanwhile; the region stays while its `in_flight` counts the caller.
#pragma once

#include "pager/calls/range_demoter.h"
#include "pager/host/writeback.h"
#include "pager/lease/stream_releases.h"

namespace vmem::pager {

class RangeFlush : private Shared {
 public:
  RangeFlush(const Shared& shared, Isolator& isolator, Writeback& write_back, StreamReleases& releases,
             RangeDemoter& range_demoter)
      : Shared(shared),
        isolator_(isolator),
        writeback_(write_back),
        releases_(releases),
        range_demoter_(range_demoter) {}

  // What a call over several ranges has begun.
  struct Writes {
    Completion completion;
    Batch batch;  // of one size of blocks; not begun yet
  };

  // keep: the blocks stay where they are, else they leave memory. Under `all` what is lent to kernels is written, too,
  // and not waited for.
  core::Status write(Lock& lock, Region& r, core::BlockIndex first, core::BlockIndex last, bool keep,
                     RangeScan* scan) VMEM_LOCKED;
  // The same in two steps: begin() for each range, and end() once, which waits, and tells the first failure of all.
  // Between them a region stays for as long as blocks of it are written.
  void begin(Lock& lock, const BlockSpan& span, bool keep, RangeScan* scan, Writes* writes) VMEM_LOCKED;
  core::Status end(Lock& lock, Writes* writes) VMEM_LOCKED;
  // What the region's file was written is durable.
  core::Status flush_file(Lock& lock, Region& r) VMEM_LOCKED;

 private:
  struct Late;
  void write_batch(Lock& lock, Batch* batch) VMEM_LOCKED;
  void write_late(Lock& lock, Region& r, core::BlockIndex b, const Late& late, RangeScan* scan, Batch* batch,
                  core::Status* result) VMEM_LOCKED;

  Isolator& isolator_;
  Writeback& writeback_;
  StreamReleases& releases_;
  RangeDemoter& range_demoter_;
};

}  // namespace vmem::pager
