// What the classes that move blocks of host memory stand on, and share: one of each. They are made after these, and
// each takes what it needs.
#pragma once

#include "core/counters.h"
#include "memory/frame_pool.h"
#include "memory/host_budget.h"
#include "pager/block_map.h"
#include "pager/config.h"
#include "pager/host_reserve.h"
#include "pager/progress_clock.h"
#include "pager/staging_pools.h"
#include "pager/table_charges.h"
#include "pager/write_back_state.h"
#include "store/io.h"
#include "store/space.h"
#include "trap/trap.h"

namespace vmem::pager {

struct Shared {
  trap::Trap& trap;
  store::Engine& engine;
  store::Space& space;
  const Config& config;
  core::Counters& counters;
  HostBudget& budget;
  FramePool& frames;
  StagingPools& staging;
  BlockMap& map;
  WriteBackState& writes;
  ProgressClock& clock;
  HostReserve& reserve;
  TableCharges& tables;
};

}  // namespace vmem::pager
