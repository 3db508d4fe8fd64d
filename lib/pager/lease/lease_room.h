// The classes that grant and end leases, one of each.
#pragma once

#include "pager/host/host_tier.h"
#include "pager/lease/acquire_requests.h"
#include "pager/lease/lease_manager.h"
#include "pager/lease/stream_releases.h"

namespace vmem::pager {

struct LeaseRoom {
  LeaseRoom(PagerContext& ctx, HostTier& host_room);
  LeaseRoom(const LeaseRoom&) = delete;
  LeaseRoom& operator=(const LeaseRoom&) = delete;

  HostTier& host;

  LeaseManager lease_manager;
  AcquireRequests acquire_requests;
  StreamReleases releases;
};

}  // namespace vmem::pager
