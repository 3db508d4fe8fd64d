// What the classes that move blocks stand on, and share: one of each, made before them. They derive from it, so that
// what stands in their own headers is what only they have.
#pragma once

#include "core/counters.h"
#include "memory/frame_pool.h"
#include "memory/host_budget.h"
#include "pager/account/fault_reserve.h"
#include "pager/account/progress_clock.h"
#include "pager/account/staging_pools.h"
#include "pager/account/table_charges.h"
#include "pager/account/write_back_state.h"
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
  StagingPools& staging_;
  BlockMap& map_;
  WriteBackState& writes_;
  ProgressClock& clock_;
  FaultReserve& reserve_;
  TableCharges& tables_;
};

}  // namespace vmem::pager
