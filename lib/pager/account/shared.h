// The objects that all classes which move blocks share. There is one of each, made before those
// classes. They derive from Shared, so that their own headers have only what is their own.
#pragma once

#include "core/counters.h"
#include "memory/frame_pool.h"
#include "memory/host_budget.h"
#include "pager/account/fault_deadline.h"
#include "pager/account/fault_reserve.h"
#include "pager/account/metadata_charges.h"
#include "pager/account/staging_pool_set.h"
#include "pager/account/writeback_throttle.h"
#include "pager/block/block_map.h"
#include "pager/block/config.h"
#include "store/io.h"
#include "store/space.h"
#include "trap/trap.h"

namespace vmem::pager {

struct Shared {
  trap::Trap& trap_;
  store::Engine& engine_;
  store::Space& space_;
  const Config& config_;
  core::Counters& counters_;
  HostBudget& budget_;
  FramePool& frames_;
  StagingPoolSet& staging_;
  BlockMap& map_;
  WritebackThrottle& writes_;
  FaultDeadline& deadline_;
  FaultReserve& reserve_;
  MetadataCharges& tables_;
};

}  // namespace vmem::pager
