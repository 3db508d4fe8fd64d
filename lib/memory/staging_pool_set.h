// The staging frames of the tier. Frames of one size serve the blocks of that size.
//
// - A region has frames of its size from its creation until it is freed, at least as many as it
//   takes to move a block.
// - Frames of a size that no region has are given back when others need the memory.
// - The share keeps room for the first frames of each size that has none.
//
// Not thread-safe: the pager's lock protects it. StagingGrowth needs no memory.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "device/device.h"
#include "memory/host_budget.h"
#include "memory/staging.h"

namespace vmem::memory {

class StagingPoolSet;

// Decides when more frames of one size are made. Making them takes long, and is done without the
// pager's lock.
//
// - One thread at a time makes frames, at most as many as the share of the budget has room for.
// - Frames that were refused stay refused until some have been made. The next try is due after
//   kAgain, or after kLater if there was no memory.
class StagingGrowth {
 public:
  static constexpr uint64_t kAgain = 50000000, kLater = 100 * kAgain;  // ns

  StagingGrowth(const Staging& staging, const HostBudget& budget, unsigned share,
                const StagingPoolSet* others = nullptr)
      : staging_(staging), budget_(budget), share_(share), others_(others) {}
  unsigned share() const { return share_; }  // percent of the budget, at most
  void set_share(unsigned percent) { share_ = percent; }

  // Frames that are kept for demotion. Otherwise promotions could wait for room that only
  // demotion can make.
  size_t reserve() const;
  uint64_t most() const;  // most bytes of frames of all sizes
  // has_room(): the share has room for a few more frames, once unused frames of other sizes
  // have gone. fits(): it has room now. grows(): it has room and none were refused, or some are
  // being made, which are charged already and may be the last.
  bool has_room() const;
  bool fits() const;
  bool grows() const { return growing_ || (has_room() && !refused_); }
  // Whether too few frames are free, with `leaving` bytes that will be, and no more are made soon.
  bool blocks_must_leave(uint64_t leaving) const;

  // A block found no free frame.
  void want() { wanted_ = true; }
  // Frames were refused a while ago, and there may be memory by now: a block that finds none may
  // call want().
  bool may_try_again(uint64_t now_ns) const { return has_room() && refused_ && now_ns >= again_ns_; }
  // Whether a thread should make frames now.
  bool due(uint64_t now_ns) const { return wanted_ && has_room() && !growing_ && now_ns >= again_ns_; }

  // Returns how many frames to make, or 0 if there is no room or a thread makes some already. Takes
  // back want().
  size_t take(size_t at_most);
  // The budget has no room for more frames beside blocks. Until the next try, blocks leave the
  // frames that there are.
  void no_room(uint64_t now_ns);
  // The caller makes frames from begin() to end().
  void begin() { growing_ = true; }
  void end(bool made, uint64_t now_ns);
  bool growing() const { return growing_; }

  // For tests: returns what is wrong, or an empty string.
  std::string check(uint64_t now_ns) const;

 private:
  uint64_t held() const, kept() const;

  const Staging& staging_;
  const HostBudget& budget_;
  unsigned share_;
  const StagingPoolSet* others_;  // the frames of other sizes; null: there are none
  bool wanted_ = false, growing_ = false, refused_ = false;
  uint64_t again_ns_ = 0;
};

struct StagingPool {
  StagingPool(HostBudget& budget, size_t frame, unsigned share, const StagingPoolSet* others)
      : frames(budget, frame), growth(frames, budget, share, others) {}
  Staging frames;
  StagingGrowth growth;
  size_t regions = 0;  // with blocks of its size
  size_t lent = 0;     // frames that kernels load from
};

class StagingPoolSet {
 public:
  // largest: the largest blocks that a region may have.
  StagingPoolSet(HostBudget& budget, unsigned share, size_t largest = device::kLargestUnit)
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
  // Bytes that the other pools give back when `by` needs them.
  uint64_t unused(const Staging& by) const {
    uint64_t bytes = 0;
    for (const StagingPool& p : pools_) bytes += &p.frames != &by && goes(p) ? p.frames.bytes() : 0;
    return bytes;
  }
  // Bytes of the share that `from` leaves to the others: for the first frames of the sizes that have
  // none, small sizes first, within an eighth of the share.
  uint64_t kept(const Staging& from) const {
    uint64_t bytes = 0;
    for (const StagingPool& p : pools_) {
      if (&p.frames == &from || p.frames.total() != 0 || p.frames.frame() > largest_) continue;
      const uint64_t least = Staging::kLeast * p.frames.frame();
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

}  // namespace vmem::memory
