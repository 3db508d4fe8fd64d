// The staging frames of the tier. Frames of one size serve the blocks of that size.
//
// - A region has frames of its size from its creation until it is freed, at least as many as it
//   takes to move a block.
// - Frames of a size that no region has are given back when others need the memory.
// - The share keeps room for the first frames of each size that has none.
//
// Not thread-safe: the pager's lock protects it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "device/device.h"
#include "memory/host_budget.h"
#include "memory/staging.h"
#include "pager/account/staging_growth.h"
#include "pager/block/frame_table.h"
#include "pager/block/region.h"

namespace vmem::pager {

struct StagingPool {
  StagingPool(memory::HostBudget& budget, size_t frame, unsigned share, const StagingOthers* others)
      : frames(budget, frame), growth(frames, budget, share, others) {}
  memory::Staging frames;
  StagingGrowth growth;
  size_t regions = 0;  // with blocks of its size
  size_t lent = 0;     // frames that kernels load from
};

class StagingPoolSet final : public StagingOthers {
 public:
  // largest: the largest blocks that a region may have.
  StagingPoolSet(memory::HostBudget& budget, unsigned share, size_t largest = device::kLargestUnit)
      : largest_(largest), pools_{StagingPool(budget, device::kUnit, share, this),
                                  StagingPool(budget, 2 * device::kUnit, share, this),
                                  StagingPool(budget, 4 * device::kUnit, share, this),
                                  StagingPool(budget, 8 * device::kUnit, share, this),
                                  StagingPool(budget, 16 * device::kUnit, share, this),
                                  StagingPool(budget, 32 * device::kUnit, share, this)} {}
  StagingPoolSet(const StagingPoolSet&) = delete;
  StagingPoolSet& operator=(const StagingPoolSet&) = delete;
  StagingPool& of(size_t block) { return pools_[device::unit_class(block)]; }
  const StagingPool& of(size_t block) const { return pools_[device::unit_class(block)]; }
  StagingPool& of(const Region& r) { return of(r.block_size); }
  auto begin() { return pools_.begin(); }
  auto end() { return pools_.end(); }
  bool owns(const std::byte* at) const {
    return std::any_of(pools_.begin(), pools_.end(), [at](const StagingPool& p) { return p.frames.owns(at); });
  }
  bool growing() const {
    return std::any_of(pools_.begin(), pools_.end(), [](const StagingPool& p) { return p.growth.growing(); });
  }
  // Returns the largest block of the regions that exist, or 0.
  size_t largest_block() const {
    size_t largest = 0;
    for (const StagingPool& p : pools_) largest = p.regions != 0 ? p.frames.frame() : largest;
    return largest;
  }
  // Whether a region may have blocks of that size: frames of it exist, or there is room for some.
  bool can_serve(size_t block) { return of(block).frames.total() != 0 || of(block).growth.has_room(); }
  // Returns a pool whose frames no region needs, or null. No pool gives up frames while kernels
  // may ask for blocks: a driver may wait for kernels before it unpins memory.
  StagingPool* unused() {
    const auto p = std::find_if(begin(), end(), [this](const StagingPool& of) { return goes(of); });
    return p == end() ? nullptr : &*p;
  }
  uint64_t unused(const memory::Staging& by) const override {
    uint64_t bytes = 0;
    for (const StagingPool& p : pools_) bytes += &p.frames != &by && goes(p) ? p.frames.bytes() : 0;
    return bytes;
  }
  // The first frames of the sizes that have none, small sizes first, within an eighth of the share.
  uint64_t kept(const memory::Staging& from) const override {
    uint64_t bytes = 0;
    for (const StagingPool& p : pools_) {
      if (&p.frames == &from || p.frames.total() != 0 || p.frames.frame() > largest_) continue;
      const uint64_t least = memory::Staging::kLeast * p.frames.frame();
      if (bytes + least > p.growth.most() / 8) break;
      bytes += least;
    }
    return bytes;
  }
  size_t kernel_ranges = 0;  // ranges open to kernels that ask for blocks
  size_t ending = 0;         // slabs that are being given back, without the lock

 private:
  bool goes(const StagingPool& p) const {
    return kernel_ranges == 0 && p.regions == 0 && p.frames.total() != 0 && !p.growth.growing();
  }

  const size_t largest_;
  std::array<StagingPool, device::kUnitSizes> pools_;
};

}  // namespace vmem::pager
