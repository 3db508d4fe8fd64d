// The calls of the API, one class for each.
#pragma once

#include "pager/calls/advise.h"
#include "pager/calls/device_acquire.h"
#include "pager/calls/exit_flush.h"
#include "pager/calls/export.h"
#include "pager/calls/host_acquire.h"
#include "pager/calls/prefetch.h"
#include "pager/calls/query.h"
#include "pager/calls/range_flush.h"
#include "pager/calls/region_create.h"
#include "pager/calls/region_free.h"
#include "pager/calls/sync.h"
#include "pager/calls/tunables.h"
#include "pager/tier/device_tier.h"

namespace vmem::pager {

struct Calls {
  Calls(PagerContext& ctx, HostTier& host_room, LeaseRoom& leases_room, DeviceTier& tier_room);
  Calls(const Calls&) = delete;
  Calls& operator=(const Calls&) = delete;

  HostTier& host;
  LeaseRoom& leases;
  DeviceTier& tier;

  RangeFlush range_flush;
  DeviceAcquire device_acquire;
  HostAcquire host_acquire;
  Sync sync;
  ExitFlush exit_flush;
  Prefetch prefetch;
  Advise advise;
  RegionCreate region_create;
  RegionFree region_free;
  Query query;
  Export exports;
  Tunables tunables;
};

}  // namespace vmem::pager
