// Hands memory of leased blocks out of the process.
//
// - A block is claimed during the export, as for a transition: it neither leaves nor changes its
//   owner.
// - Afterwards it comes and goes as any other block. The device does not give exported memory to
//   another block.
#pragma once

#include "pager/lease/stream_releases.h"
#include "pager/tier/device_blocks.h"

namespace vmem::pager {

struct Calls;
struct DeviceTier;
struct HostTier;
struct LeaseRoom;

class Export {
 public:
  Export(PagerContext& ctx, Calls& calls);

  // Requires live leases at one device on all of the range.
  Status export_range(const void* ptr, size_t size, device::Export how, int* descriptor) VMEM_UNLOCKED;

 private:
  Status exported_from(const BlockSpan& span, int* device) VMEM_LOCKED;

  PagerContext& ctx_;
  HostTier& host_;
  LeaseRoom& leases_;
  DeviceTier& tier_;
};

}  // namespace vmem::pager
