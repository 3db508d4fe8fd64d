#include "pager/tier/device_tier.h"

namespace vmem::pager {

DeviceTier::DeviceTier(PagerContext& ctx, HostTier& host_room, LeaseRoom& leases_room)
    : host(host_room),
      leases(leases_room),
      blocks(ctx),
      kernel_ranges(ctx, *this),
      supply(ctx, *this),
      managed_holes(ctx),
      peer_migrator(ctx, *this),
      demoter(ctx, *this),
      staging_loans(ctx, *this),
      cpu_mapper(ctx, *this),
      device_reclaim(ctx, *this),
      promoter(ctx, *this),
      pipelined_copy(ctx, *this),
      copy_in(ctx, *this) {}

}  // namespace vmem::pager
