#include "pager/lease/lease_room.h"

namespace vmem::pager {

LeaseRoom::LeaseRoom(PagerContext& ctx, HostTier& host_room)
    : host(host_room), lease_manager(ctx), acquire_requests(ctx), releases(ctx, *this) {}

}  // namespace vmem::pager
