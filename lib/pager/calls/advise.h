// Takes advice. Keeps advice about blocks with their region, and passes it on to the policy that
// has the blocks, or to the driver. Fetches blocks that are needed soon to the best place, and
// drops contents that the program does not need any more.
//
// - At most 256 ranges of a region have advice of their own. The last advice that covers a block
//   counts.
// - Leased blocks keep their contents; the call reports that (-EBUSY).
// - Of a shared file, only refused changes are dropped; the call reports that (-EIO).
#pragma once

#include "pager/calls/prefetch.h"
#include "pager/calls/range_flush.h"
#include "pager/host/truncated_files.h"

namespace vmem::pager {

struct Calls;
struct DeviceTier;
struct HostTier;
struct LeaseRoom;

class Advise {
 public:
  Advise(PagerContext& ctx, Calls& calls);

  // advice: one of enum vmem_advice.
  core::Status advise(const void* ptr, size_t size, int advice, int location) VMEM_UNLOCKED;

 private:
  core::Status will_need(const void* ptr, size_t size) VMEM_UNLOCKED;
  struct Place {  // advice about a place, as a device takes it
    device::Advice what;
    int location;
    bool set;
  };
  core::Status note_places(const BlockSpan& span, const Place& place) VMEM_LOCKED;
  core::Status advise_block(Lock& lock, Region& r, core::BlockIndex b, const Place& place, bool* claimed) VMEM_LOCKED;
  core::Status advise_device(Lock& lock, const BlockSpan& span, const Place& place) VMEM_LOCKED;
  static bool extend(Region& r, const AdvisedRange& range);
  core::Status keep(Region& r, const AdvisedRange& range, bool normal) VMEM_LOCKED;
  void tell_policies(Lock& lock, const BlockSpan& span) VMEM_LOCKED;
  core::Status drop_contents(const void* ptr, size_t size) VMEM_UNLOCKED;
  core::Status drop_block(Lock& lock, Region& r, core::BlockIndex b, bool* skipped) VMEM_LOCKED;
  core::Status drop_refused(Lock& lock, Region& r, core::BlockIndex first, core::BlockIndex end,
                            core::Status why) VMEM_LOCKED;

  PagerContext& ctx_;
  HostTier& host_;
  LeaseRoom& leases_;
  DeviceTier& tier_;
  Calls& calls_;
};

}  // namespace vmem::pager
