// How much of the host budget is kept free, and for whom: for faults what regions of the largest blocks need; ahead of
// those who ask, what reclaim threads keep free for them; and none of it is leased.
//
//   largest_block() is that of the regions counted, and bytes() what faults are kept for it
//   what is leased in host memory, and what is stale at a device, nobody can evict: pinned()
//
// Not thread-safe: the pager's lock protects it. Needs no memory.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>

#include "core/types.h"
#include "memory/frame_pool.h"
#include "memory/host_budget.h"
#include "pager/account/cpu_mappings.h"

namespace vmem::pager {

class FaultReserve {
 public:
  FaultReserve(const memory::HostBudget& budget, const memory::FramePool& frames, const CpuMappings& cpu_mappings)
      : budget_(budget), frames_(frames), cpu_mappings_(cpu_mappings) {}

  // A region with blocks of this size is made; it goes.
  void add_region(size_t block_size);
  void remove_region(size_t block_size);
  uint64_t largest_block() const { return largest_block_; }  // 0: there is no region
  // The budget in force has changed.
  void follow_budget() { bytes_ = of(budget_.limit()); }
  uint64_t bytes() const { return bytes_; }
  // .. with a budget of so many: the first access of a region is always served.
  uint64_t of(uint64_t budget) const {
    return std::max(largest_block_, std::min<uint64_t>(4 * largest_block_, budget / 8));
  }

  // Leased in host memory.
  void lease(uint64_t bytes) { leased_ += bytes; }
  void release(uint64_t bytes) { leased_ -= bytes; }
  // Of blocks in host memory that nobody can evict.
  uint64_t pinned() const { return leased_ + cpu_mappings_.device_stale_bytes(); }
  // What is not to be had: tables, buffers, staging frames, what is pinned, and this.
  uint64_t kept() const { return frames_.least_overhead() + pinned() + bytes_; }
  // Blocks need `bytes` more that are not to be had.
  bool fits(uint64_t bytes) const { return kept() + bytes <= budget_.limit(); }
  // Below this faults can no longer be served.
  uint64_t least() const { return kept() + 4 * largest_block_; }
  // What tables leave: the rest, and what blocks need to move at all.
  uint64_t for_moves() const { return frames_.least_overhead() + std::max(pinned() + bytes_, 4 * largest_block_); }

  // A region that is being made waits for so much room, until nobody does.
  void want(uint64_t bytes) { wanted_ = std::max(wanted_, bytes); }
  void want_nothing() { wanted_ = 0; }

  // What an administrator says of the watermarks, in percent; 0: nothing.
  void set_watermarks(unsigned low, unsigned high) { percent_low_ = low, percent_high_ = high; }
  // Free memory was below the low watermark lately, and is not above the high one yet.
  void set_refilling(bool on) { refilling_ = on; }
  // What is kept free ahead of those who need it: a part of what blocks can have that may leave, and never so much that
  // two of the largest could not stay, or each would be evicted as soon as it is in place.
  uint64_t low_watermark() const;
  // What whoever asks for so many bytes leaves to those who are more urgent: no more than reclaim threads keep free
  // with them.
  uint64_t left_free(core::Urgency urgency, uint64_t size) const;
  // Free memory, or on its way to being free, is short of the low watermark, or of what the first that waits needs.
  bool short_of(uint64_t first, uint64_t leaving) const;
  // One more block may be stale at its device, where others move in what it leaves with more free than reclaim threads
  // want: else they would take away what the CPU is shown as soon as it is.
  bool room_for_device_stale(uint64_t block_size) const;

  // Tests: `leased` are recounted, as the regions with blocks of each size. What is wrong; empty: nothing.
  std::string check(uint64_t leased, uint64_t regions) const;

 private:
  void count();
  static size_t size_class(size_t block_size) {
    return static_cast<size_t>(std::countr_zero(block_size / core::kPage));
  }

  const memory::HostBudget& budget_;
  const memory::FramePool& frames_;
  const CpuMappings& cpu_mappings_;
  std::array<uint32_t, core::kBlockSizes> regions_{};  // by the size of their blocks: 4 KiB, 8 KiB, ..
  uint64_t largest_block_ = 0, bytes_ = 0;
  uint64_t leased_ = 0, wanted_ = 0;
  unsigned percent_low_ = 0, percent_high_ = 0;
  bool refilling_ = false;
};

}  // namespace vmem::pager
