// Writes those blocks of a range that the store does not have, for a call that waits. The blocks
// stay where they are, or leave memory or their device.
//
// - The thread owns no transition while it waits for one of another thread.
// - Leased blocks (if blocks stay: those under WRITE) are skipped and reported, unless the scan
//   says `all`.
// - On return, all writes have ended. The first failure is returned.
// - A call over many ranges begins to write one range while others are being written.
// - The functions drop the lock. The region stays while its `in_flight` counts the caller.
#pragma once

#include "pager/host/writeback.h"
#include "pager/lease/stream_releases.h"
#include "pager/tier/demoter.h"

namespace vmem::pager {

struct Calls;
struct DeviceTier;
struct HostTier;
struct LeaseRoom;

class RangeFlush {
 public:
  RangeFlush(PagerContext& ctx, Calls& calls);

  // Writes that a call over several ranges has begun.
  struct Writes {
    Completion completion;
    Batch batch;  // of one size of blocks; not begun yet
  };

  // keep: the blocks stay where they are; else they leave memory. With `keep` and scan->all, blocks
  // that are lent to kernels are written too, without a wait for them.
  core::Status write(Lock& lock, Region& r, core::BlockIndex first, core::BlockIndex last, bool keep,
                     RangeScan* scan) VMEM_LOCKED;
  // write() in two steps: begin() for each range, then end() once, which waits and returns the
  // first failure of all. Between them a region stays while blocks of it are written.
  void begin(Lock& lock, const BlockSpan& span, bool keep, RangeScan* scan, Writes* writes) VMEM_LOCKED;
  core::Status end(Lock& lock, Writes* writes) VMEM_LOCKED;
  // Demotes the blocks that are on a device, or writes the dirty ones there (`how` is sync). Leaves
  // other blocks alone.
  core::Status demote(Lock& lock, Region& r, core::BlockIndex first, core::BlockIndex last, Leave how,
                      RangeScan* scan) VMEM_LOCKED;
  // Returns why a block cannot leave its device, after nothing went on for the whole time-out.
  core::Status cannot_leave(const Region& r, core::BlockIndex b) VMEM_LOCKED;
  // Makes durable what was written to the region's file.
  core::Status flush_file(Lock& lock, Region& r) VMEM_LOCKED;

 private:
  struct Late;
  void write_batch(Lock& lock, Batch* batch) VMEM_LOCKED;
  void write_late(Lock& lock, Region& r, core::BlockIndex b, const Late& late, RangeScan* scan, Batch* batch,
                  core::Status* result) VMEM_LOCKED;
  class UnderWay;
  void look_for_loss(Lock& lock) VMEM_LOCKED;
  bool went_with_its_context(const Region& r, core::BlockIndex b) VMEM_LOCKED;
  bool passes_over(const Region& r, core::BlockIndex b, Leave how, RangeScan* scan) VMEM_LOCKED;
  Leave goes_how(const Region& r, core::BlockIndex b, Leave how) VMEM_LOCKED;

  PagerContext& ctx_;
  HostTier& host_;
  LeaseRoom& leases_;
  DeviceTier& tier_;
};

}  // namespace vmem::pager
