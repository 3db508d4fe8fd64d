// What follows from advice for the order in which blocks leave a place. What was said of temperature and pins comes
// first; where that is silent, what was said of places:
//
//   preferred     there it is hot: it stays while anything else can go. On a device that is another it is cold: it
//                 leaves first, and DeviceReclaim sends it to the preferred device if that has room
//   read mostly   its bytes in staging frames are hot. While it is on a device they are its host copy: until it may
//                 change there, it leaves by that and costs nothing
//
// Whoever admits a block, or a copy, to a policy asks here, under the lock that the advice is given under; where it is
// known already, BlockMap::follow_advice() tells. So what the policy knows is always the last word.
#pragma once

#include "pager/block/frame_table.h"
#include "pager/block/placement_advice.h"
#include "pager/block/region.h"

namespace vmem::pager {

// Of a block in this pool.
inline policy::Temperature temperature_in(const Region& r, core::BlockIndex b, uint8_t pool, bool* pinned) {
  using policy::Temperature;
  const Temperature said = temperature(r, b, pinned);
  if (said != Temperature::normal || *pinned || r.places.empty()) return said;
  const PlacementAdvice::Said place = r.places.at(b);
  if (pool >= kDevicePools) {
    if (place.preferred == PlacementAdvice::kNowhere) return said;
    return place.preferred == pool - kDevicePools ? Temperature::hot : Temperature::cold;
  }
  const bool stays = place.preferred == VMEM_HOST || (place.read_mostly && in_staging(pool));
  return stays ? Temperature::hot : said;
}

// Of the host copy of a block on a device.
inline policy::Temperature copy_temperature(const Region& r, core::BlockIndex b) {
  const PlacementAdvice::Said place = r.places.at(b);
  const bool stays = place.preferred == VMEM_HOST || place.read_mostly;
  return stays ? policy::Temperature::hot : policy::Temperature::normal;
}

// The device that the block was said to be best on; -1: none.
inline int home_of(const Region& r, core::BlockIndex b) {
  return std::max<int>(r.places.at(b).preferred, -1);
}

}  // namespace vmem::pager
