// Spilled blocks: blocks that found no room on their device, and went to another one with room to
// spare. A spilled block is used only after it went back or was leased where it is. So the order in
// which they came is that of their last use: the first to come leaves first, and all leave before
// the device's own blocks.
//
// - A spilled block is on its device, on its way there or about to leave it. The device's policy
//   does not know it.
// - bytes(d) is the sum of the spilled blocks of device d.
// - A block becomes one only if, with it, they take no more than a share of the device's limit, and
//   no block waits for room there.
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

  void set_share(unsigned percent) { share_ = percent; }  // 0: none come, and those that exist leave

  // Whether device d, which has this budget, has room for a spilled block of so many bytes.
  bool fits(size_t d, const DeviceBudget& budget, uint64_t bytes, uint64_t now_ns) const;
  // Returns the bytes that must leave device d, because its share is exceeded or because it may
  // have none now.
  uint64_t over(size_t d, const DeviceBudget& budget, uint64_t now_ns) const;
  // refuse(): one could not come to device d, so none comes before `until_ns`. send_away(): none
  // stays either, since the device has little memory for other processes.
  void refuse(size_t d, uint64_t until_ns) { lists_[d].refused_until_ns = until_ns; }
  void send_away(size_t d, uint64_t until_ns) { lists_[d].refused_until_ns = lists_[d].away_until_ns = until_ns; }

  bool is(core::FrameId id) const { return frame_table_[id].dev.spilled_to != DeviceFrame::kNotSpilled; }
  void add(core::FrameId id, size_t d);
  // The block leaves, or is the device's own from now on. Returns false if it was not spilled.
  bool remove(core::FrameId id);
  uint64_t bytes(size_t d) const { return lists_[d].bytes; }
  // In the order in which they came. Return kNoFrame at the end.
  core::FrameId first(size_t d) const { return lists_[d].first; }
  core::FrameId after(core::FrameId id) const { return frame_table_[id].dev.next_spilled; }

  // For tests: recounts everything. Returns what is wrong, or an empty string.
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
