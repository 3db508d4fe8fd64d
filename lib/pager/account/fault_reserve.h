// How much of the host budget is kept free, and for whom: a reserve for faults, as large as regions
// with the largest blocks need, and what reclaim threads keep free ahead of requests. None of the
// reserve is leased.
//
// - largest_block() is the largest block of the counted regions. bytes() is the reserve for it.
// - pinned() counts blocks that cannot be evicted: those leased in host memory, and copies shown to
//   the CPU that have stores which the device lacks.
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

  // Count a region with blocks of this size that is made, and that is freed.
  void add_region(size_t block_size);
  void remove_region(size_t block_size);
  uint64_t largest_block() const { return largest_block_; }  // 0: there is no region
  // The budget in force has changed.
  void follow_budget() { bytes_ = of(budget_.limit()); }
  uint64_t bytes() const { return bytes_; }
  // The reserve with such a budget: at least one block, so that the first access of a region is
  // always served.
  uint64_t of(uint64_t budget) const {
    return std::max(largest_block_, std::min<uint64_t>(4 * largest_block_, budget / 8));
  }

  // Count bytes in host memory that come under leases, and that lose them.
  void lease(uint64_t bytes) { leased_ += bytes; }
  void release(uint64_t bytes) { leased_ -= bytes; }
  // Bytes of blocks in host memory that cannot be evicted.
  uint64_t pinned() const { return leased_ + cpu_mappings_.device_stale_bytes(); }
  // Bytes that are not available: tables, buffers, staging frames, pinned() and the reserve.
  uint64_t kept() const { return frames_.least_overhead() + pinned() + bytes_; }
  // Whether kept() may grow by so many bytes.
  bool fits(uint64_t bytes) const { return kept() + bytes <= budget_.limit(); }
  // The least budget: below it faults can no longer be served.
  uint64_t least() const { return kept() + 4 * largest_block_; }
  // Bytes that growing tables must leave: kept(), but at least what blocks need to move at all.
  uint64_t for_moves() const { return frames_.least_overhead() + std::max(pinned() + bytes_, 4 * largest_block_); }

  // want(): a region that is being made waits for so many bytes. want_nothing(): none waits.
  void want(uint64_t bytes) { wanted_ = std::max(wanted_, bytes); }
  void want_nothing() { wanted_ = 0; }

  // The watermarks that an administrator has set, in percent; 0: not set.
  void set_watermarks(unsigned low, unsigned high) { percent_low_ = low, percent_high_ = high; }
  // Free memory was below the low watermark lately, and is not above the high one yet.
  void set_refilling(bool on) { refilling_ = on; }
  // Bytes that reclaim threads keep free ahead of requests: a part of the memory for blocks that
  // can be evicted. It leaves room for two of the largest blocks; with less, each would be
  // evicted as soon as it is in place.
  uint64_t low_watermark() const;
  // Bytes that a request for `size` bytes leaves free for more urgent ones. Together with `size`
  // that is no more than reclaim threads keep free.
  uint64_t left_free(core::Urgency urgency, uint64_t size) const;
  // Whether free memory, with `leaving` bytes that will come free, is less than the low watermark
  // or less than `first`, the need of the first waiter.
  bool short_of(uint64_t first, uint64_t leaving) const;
  // Whether one more block may be stale at its device. The memory that it leaves to other blocks
  // must exceed what reclaim threads keep free: otherwise they would drop copies for the CPU as
  // soon as these are shown.
  bool room_for_device_stale(uint64_t block_size) const;

  // For tests: compares with recounted leased bytes and regions. Returns what is wrong, or an empty
  // string.
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
