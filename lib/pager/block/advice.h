// How advice decides the order in which blocks leave a pool. Advised temperatures and pins come
// first. Where they say nothing, the advised location counts:
//
// - Preferred location: the block is hot there, and stays while any other block can go. On another
//   device it is cold: it leaves first, and DeviceReclaim sends it to the preferred device if that
//   has room.
// - Read mostly: the block's bytes in a staging frame are hot. While the block is on a device, they
//   are its host copy. Until the block may change there, it can leave the device at no cost.
//
// Code that admits a block or a host copy to a policy asks here, under the lock that protects the
// advice. BlockMap::follow_advice() tells a policy that knows the block already. A policy thus
// always has the latest advice.
#pragma once

#include "pager/block/frame_table.h"
#include "pager/block/placement_advice.h"
#include "pager/block/region.h"

namespace vmem::pager {

// Returns the temperature of a block in `pool`. *pinned: whether the program pinned it.
inline policy::Temperature temperature_in(const Region& r, core::BlockIndex b, uint8_t pool, bool* pinned) {
  using policy::Temperature;
  const Temperature said = temperature(r, b, pinned);
  if (said != Temperature::normal || *pinned || r.advice.places.empty()) return said;
  const PlacementAdvice::Said place = r.advice.places.at(b);
  if (pool >= kDevicePools) {
    if (place.preferred == PlacementAdvice::kNowhere) return said;
    return place.preferred == pool - kDevicePools ? Temperature::hot : Temperature::cold;
  }
  const bool stays = place.preferred == VMEM_HOST || (place.read_mostly && in_staging(pool));
  return stays ? Temperature::hot : said;
}

// Returns the temperature of the host copy of a block on a device.
inline policy::Temperature copy_temperature(const Region& r, core::BlockIndex b) {
  const PlacementAdvice::Said place = r.advice.places.at(b);
  const bool stays = place.preferred == VMEM_HOST || place.read_mostly;
  return stays ? policy::Temperature::hot : policy::Temperature::normal;
}

// Returns the device that is the block's preferred location, or -1 if that is no device.
inline int home_of(const Region& r, core::BlockIndex b) {
  return std::max<int>(r.advice.places.at(b).preferred, -1);
}

}  // namespace vmem::pager
