// Demotes the blocks of a range that are on a device, or writes the dirty ones, for a call of the
// application that waits for it: vmem_evict, vmem_sync, vmem_free.
//
// - The thread owns no transition while it waits for one of another thread.
// - Leased blocks (for writing back: those under WRITE) are skipped, unless the scan says `all`.
// - run() drops the lock.
#pragma once

#include "pager/lease/stream_releases.h"
#include "pager/tier/demoter.h"

namespace vmem::pager {

struct Calls;
struct DeviceTier;
struct HostTier;
struct LeaseRoom;

class RangeDemoter {
 public:
  RangeDemoter(PagerContext& ctx, Calls& calls);

  core::Status run(Lock& lock, Region& r, core::BlockIndex first, core::BlockIndex last, Leave how,
                   RangeScan* scan) VMEM_LOCKED;
  // Returns why a block cannot leave its device, after nothing went on for the whole time-out.
  core::Status cannot_leave(const Region& r, core::BlockIndex b) VMEM_LOCKED;

 private:
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
