// Blocks that their device had no room for, on another one that had some to spare: spilled blocks there. Nobody uses
// one before it goes back, or is leased where it is, so the order in which they came is that of their last use: the
// first to come leaves first, and all of them before the blocks of the device itself.
//
//   a spilled block of a device is on it, on its way there or about to leave it, and the device's policy does not know
//   it; bytes(d) = their blocks; whoever comes as one finds that, with it, they are no more than a share of the limit
//   there, and that nobody waits for room
//
// Not thread-safe: the pager's lock protects it. Needs no memory.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "core/types.h"
#include "memory/device_budget.h"
#include "pager/block/frame_table.h"

namespace vmem::pager {

class SpilledBlocks {
 public:
  explicit SpilledBlocks(FrameTable& frame_table) : frame_table_(frame_table) {}

  void set_share(unsigned percent) { share_ = percent; }  // 0: none come, and those that are there leave

  // There is room for one of so many bytes at device d, whose budget that is.
  bool fits(size_t d, const DeviceBudget& budget, uint64_t bytes, uint64_t now_ns) const;
  // How much is to leave device d because there are too many, or because it is not to have any now.
  uint64_t over(size_t d, const DeviceBudget& budget, uint64_t now_ns) const;
  // None comes to device d before then: one could not. None stays, either: the device has little memory for others.
  void refuse(size_t d, uint64_t until_ns) { lists_[d].refused_until_ns = until_ns; }
  void send_away(size_t d, uint64_t until_ns) { lists_[d].refused_until_ns = lists_[d].away_until_ns = until_ns; }

  bool is(core::FrameId id) const { return frame_table_[id].spilled_to != Frame::kNotSpilled; }
  void add(core::FrameId id, size_t d);
  // It leaves, or is the device's own from now on. False: it was no spilled block.
  bool remove(core::FrameId id);
  uint64_t bytes(size_t d) const { return lists_[d].bytes; }
  // In the order in which they came; kNoFrame: that was the last.
  core::FrameId first(size_t d) const { return lists_[d].first; }
  core::FrameId after(core::FrameId id) const { return frame_table_[id].next_spilled; }

  // Tests: recounts all. What is wrong; empty: nothing.
  std::string check() const;

 private:
  uint64_t most(const DeviceBudget& budget) const { return budget.limit() * share_ / 100; }

  struct List {
    core::FrameId first = core::kNoFrame, last = core::kNoFrame;
    uint64_t bytes = 0;
    uint64_t refused_until_ns = 0, away_until_ns = 0;
  };

  FrameTable& frame_table_;
  unsigned share_ = 0;
  std::array<List, device::kMaxDevices> lists_;
};

}  // namespace vmem::pager
