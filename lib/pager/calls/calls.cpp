#include "pager/calls/calls.h"

namespace vmem::pager {

Calls::Calls(PagerContext& ctx, HostTier& host_room, LeaseRoom& leases_room, DeviceTier& tier_room)
    : host(host_room),
      leases(leases_room),
      tier(tier_room),
      range_flush(ctx, *this),
      device_acquire(ctx, *this),
      host_acquire(ctx, *this),
      sync(ctx, *this),
      exit_flush(ctx, *this),
      prefetch(ctx, *this),
      advise(ctx, *this),
      region_create(ctx, *this),
      region_free(ctx, *this),
      query(ctx, *this),
      exports(ctx, *this),
      tunables(ctx, *this) {}

}  // namespace vmem::pager
