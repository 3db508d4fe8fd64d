// The objects that all rooms of the pager share, one of each. A class that moves blocks is made
// with this context and with its own room (HostTier, LeaseRoom, DeviceTier, Calls).
#pragma once

#include "core/counters.h"
#include "memory/frame_pool.h"
#include "memory/host_budget.h"
#include "memory/staging_pool_set.h"
#include "pager/account/cpu_mappings.h"
#include "pager/account/device_set.h"
#include "pager/account/fault_deadline.h"
#include "pager/account/fault_reserve.h"
#include "pager/account/metadata_charges.h"
#include "pager/account/writeback_throttle.h"
#include "pager/block/block_map.h"
#include "pager/block/config.h"
#include "pager/block/upcalls.h"
#include "store/engine.h"
#include "store/space.h"
#include "trap/trap.h"

namespace vmem::pager {

// The objects below the pager. They outlive the context.
struct Backends {
  trap::Trap& trap;
  store::Engine& engine;
  store::Space& space;
  device::Devices* devices;  // null: no device tier
};

struct RegionTotals {
  uint64_t reserved_blocks = 0;  // of all regions
  uint64_t next_region_id = 1;
};

struct PagerContext {
  PagerContext(const Backends& backends, Config fixed, const Tunables& changing, Upcalls& pager);
  PagerContext(const PagerContext&) = delete;
  PagerContext& operator=(const PagerContext&) = delete;

  trap::Trap& trap;
  store::Engine& engine;
  store::Space& space;
  device::Devices* const devices;  // null: no device tier
  Upcalls& upcalls;
  const Config config;
  Tunables tunables;
  core::Counters counters;
  HostBudget budget VMEM_GUARDED_BY(core::big_lock);
  FramePool frames;  // under the lock, but for populate()
  StagingPoolSet staging VMEM_GUARDED_BY(core::big_lock);
  DeviceQueues queues VMEM_GUARDED_BY(core::big_lock);
  RegionTotals totals VMEM_GUARDED_BY(core::big_lock);
  BlockMap map;
  DeviceSet device_set;
  WritebackThrottle writeback_throttle VMEM_GUARDED_BY(core::big_lock);
  FaultDeadline deadline;
  CpuMappings cpu_mappings VMEM_GUARDED_BY(core::big_lock);
  FaultReserve reserve VMEM_GUARDED_BY(core::big_lock);
  MetadataCharges metadata_charges VMEM_GUARDED_BY(core::big_lock);
};

}  // namespace vmem::pager
