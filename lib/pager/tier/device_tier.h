// The classes of the device tier, one of each, in the order in which they build on each other.
#pragma once

#include "pager/lease/lease_room.h"
#include "pager/tier/copy_in.h"
#include "pager/tier/cpu_mapper.h"
#include "pager/tier/demoter.h"
#include "pager/tier/device_blocks.h"
#include "pager/tier/device_reclaim.h"
#include "pager/tier/kernel_ranges.h"
#include "pager/tier/managed_holes.h"
#include "pager/tier/peer_migrator.h"
#include "pager/tier/pipelined_copy.h"
#include "pager/tier/promoter.h"
#include "pager/tier/staging_allocator.h"
#include "pager/tier/staging_loans.h"

namespace vmem::pager {

struct DeviceTier {
  DeviceTier(PagerContext& context, HostTier& host_room, LeaseRoom& leases_room)
      : ctx(context), host(host_room), leases(leases_room) {}
  DeviceTier(const DeviceTier&) = delete;
  DeviceTier& operator=(const DeviceTier&) = delete;

  PagerContext& ctx;
  HostTier& host;
  LeaseRoom& leases;

  DeviceBlocks blocks{ctx};
  KernelRanges kernel_ranges{ctx, *this};
  StagingAllocator staging_allocator{ctx, *this};
  ManagedHoles managed_holes{ctx};
  PeerMigrator peer_migrator{ctx, *this};
  Demoter demoter{ctx, *this};
  StagingLoans staging_loans{ctx, *this};
  CpuMapper cpu_mapper{ctx, *this};
  DeviceReclaim device_reclaim{ctx, *this};
  Promoter promoter{ctx, *this};
  PipelinedCopy pipelined_copy{ctx, *this};
  CopyIn copy_in{ctx, *this};
};

}  // namespace vmem::pager
