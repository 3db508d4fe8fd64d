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
#include "pager/calls/tunables_update.h"
#include "pager/tier/device_tier.h"

namespace vmem::pager {

struct Calls {
  Calls(PagerContext& context, HostTier& host_room, LeaseRoom& leases_room, DeviceTier& tier_room)
      : ctx(context), host(host_room), leases(leases_room), tier(tier_room) {}
  Calls(const Calls&) = delete;
  Calls& operator=(const Calls&) = delete;

  PagerContext& ctx;
  HostTier& host;
  LeaseRoom& leases;
  DeviceTier& tier;

  RangeFlush range_flush{ctx, *this};
  DeviceAcquire device_acquire{ctx, *this};
  HostAcquire host_acquire{ctx, *this};
  Sync sync{ctx, *this};
  ExitFlush exit_flush{ctx, *this};
  Prefetch prefetch{ctx, *this};
  Advise advise{ctx, *this};
  RegionCreate region_create{ctx, *this};
  RegionFree region_free{ctx, *this};
  Query query{ctx, *this};
  Export exports{ctx, *this};
  TunablesUpdate tunables_update{ctx, *this};
};

}  // namespace vmem::pager
