// Queued requests of the device tier, and sums over all regions. Plain data under the pager's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>

#include "core/pooled_list.h"
#include "pager/block/transition.h"

namespace vmem::pager {

struct DeviceQueues {
  static constexpr size_t kMaxSpeculative = 1024;

  PooledList<PromotionRequest> promotion_requests;  // acquires first
  PooledList<DemotionRequest> demotion_requests;
  std::list<StreamHint> stream_hints;  // at most kMaxSpeculative; those polled longest ago first
  uint64_t last_hint = 0;
};

struct RegionTotals {
  uint64_t reserved_blocks = 0;  // of all regions
  uint64_t next_region_id = 1;
};

}  // namespace vmem::pager
