// The staging frames of the tier: those of one size serve the blocks of that size.
//
//   a region has frames of its size from when it is made until it is freed, at least as many as it takes to move a
//   block; frames that no region is for go where others need the memory
//
// Not thread-safe: the pager's lock protects it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "device/device.h"
#include "memory/host_budget.h"
#include "memory/staging.h"
#include "pager/region.h"
#include "pager/residents.h"
#include "pager/staging_growth.h"

namespace vmem::pager {

struct StagingPool {
  StagingPool(memory::HostBudget& budget, size_t frame, unsigned share)
      : frames(budget, frame), growth(frames, budget, share) {}
  memory::Staging frames;
  StagingGrowth growth;
  size_t regions = 0;  // with blocks of its size
};

class StagingPools {
 public:
  StagingPools(memory::HostBudget& budget, unsigned share)
      : pools_{StagingPool(budget, device::kUnit, share), StagingPool(budget, 2 * device::kUnit, share),
               StagingPool(budget, 4 * device::kUnit, share), StagingPool(budget, 8 * device::kUnit, share),
               StagingPool(budget, 16 * device::kUnit, share)} {}
  StagingPool& of(size_t block) { return pools_[device::unit_class(block)]; }
  StagingPool& of(const Region& r) { return of(r.block_size); }
  auto begin() { return pools_.begin(); }
  auto end() { return pools_.end(); }
  bool owns(const std::byte* at) const {
    return std::any_of(pools_.begin(), pools_.end(), [at](const StagingPool& p) { return p.frames.owns(at); });
  }
  bool growing() const {
    return std::any_of(pools_.begin(), pools_.end(), [](const StagingPool& p) { return p.growth.growing(); });
  }
  // Of the regions there are; 0: none.
  size_t largest_block() const {
    size_t largest = 0;
    for (const StagingPool& p : pools_) largest = p.regions != 0 ? p.frames.frame() : largest;
    return largest;
  }
  // Whether a region may have blocks of that size: there are frames of it, or there is room for some.
  bool can_serve(size_t block) {
    uint64_t unused = 0;
    for (const StagingPool& p : pools_) unused += p.regions == 0 ? p.frames.bytes() : 0;
    return of(block).frames.total() != 0 || of(block).growth.has_room(unused);
  }
  // One that has frames, and no region that needs them; null: none.
  StagingPool* unused() {
    const auto p = std::find_if(begin(), end(), [](const StagingPool& of) {
      return of.regions == 0 && of.frames.total() != 0 && !of.growth.growing();
    });
    return p == end() ? nullptr : &*p;
  }

 private:
  std::array<StagingPool, device::kUnitSizes> pools_;
};

}  // namespace vmem::pager
