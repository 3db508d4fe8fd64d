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
  DeviceTier(PagerContext& ctx, HostTier& host_room, LeaseRoom& leases_room);
  DeviceTier(const DeviceTier&) = delete;
  DeviceTier& operator=(const DeviceTier&) = delete;

  HostTier& host;
  LeaseRoom& leases;

  DeviceBlocks blocks;
  KernelRanges kernel_ranges;
  StagingAllocator supply;
  ManagedHoles managed_holes;
  PeerMigrator peer_migrator;
  Demoter demoter;
  StagingLoans staging_loans;
  CpuMapper cpu_mapper;
  DeviceReclaim device_reclaim;
  Promoter promoter;
  PipelinedCopy pipelined_copy;
  CopyIn copy_in;
};

}  // namespace vmem::pager
