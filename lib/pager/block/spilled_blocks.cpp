#include "pager/block/spilled_blocks.h"

#include <algorithm>

#include "core/status.h"

namespace vmem::pager {

bool SpilledBlocks::fits(size_t d, const DeviceBudget& budget, uint64_t bytes, uint64_t now_ns) const {
  return budget.begun() && !budget.is_short() && budget.wanted() == 0 && budget.missing() == 0 && budget.fits(bytes) &&
         lists_[d].bytes + bytes <= most(budget) && now_ns >= lists_[d].refused_until_ns;
}

uint64_t SpilledBlocks::over(size_t d, const DeviceBudget& budget, uint64_t now_ns) const {
  if (now_ns < lists_[d].away_until_ns) return lists_[d].bytes;
  return lists_[d].bytes - std::min(lists_[d].bytes, most(budget));
}

void SpilledBlocks::add(FrameId id, size_t d) {
  List& list = lists_[d];
  Frame& frame = frame_table_[id];
  frame.dev.spilled_to = static_cast<uint8_t>(d);
  frame.dev.next_spilled = kNoFrame;
  frame.dev.previous_spilled = list.last;
  (list.last == kNoFrame ? list.first : frame_table_[list.last].dev.next_spilled) = id;
  list.last = id;
  list.bytes += frame.region->block_size;
}

bool SpilledBlocks::remove(FrameId id) {
  Frame& frame = frame_table_[id];
  if (frame.dev.spilled_to == DeviceFrame::kNotSpilled) return false;
  List& list = lists_[frame.dev.spilled_to];
  const FrameId before = frame.dev.previous_spilled, after = frame.dev.next_spilled;
  (before == kNoFrame ? list.first : frame_table_[before].dev.next_spilled) = after;
  (after == kNoFrame ? list.last : frame_table_[after].dev.previous_spilled) = before;
  list.bytes -= frame.region->block_size;
  frame.dev.spilled_to = DeviceFrame::kNotSpilled;
  frame.dev.next_spilled = frame.dev.previous_spilled = kNoFrame;
  return true;
}

std::string SpilledBlocks::check() const {
  size_t listed = 0, marked = 0;
  for (size_t d = 0; d < lists_.size(); ++d) {
    uint64_t bytes = 0;
    FrameId before = kNoFrame;
    for (FrameId id = lists_[d].first; id != kNoFrame; before = id, id = frame_table_[id].dev.next_spilled, ++listed) {
      const Frame& frame = frame_table_[id];
      if (frame.region == nullptr || frame.dev.spilled_to != d || frame.dev.previous_spilled != before ||
          listed > frame_table_.size())
        return core::strprintf("the spilled blocks of device %zu are not in order", d);
      const core::Block& block = frame.region->table[frame.block];
      if (frame.admitted || !core::on_a_device(block.state) || block.device != d)
        return core::strprintf("a spilled block of device %zu is not there, or is known to its policy", d);
      bytes += frame.region->block_size;
    }
    if (before != lists_[d].last || bytes != lists_[d].bytes) {
      return core::strprintf("spilled blocks of device %zu have %llu bytes, %llu are counted", d,
                             static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(lists_[d].bytes));
    }
  }
  for (FrameId id = 0; id < frame_table_.size(); ++id) marked += is(id) ? 1 : 0;
  return listed == marked ? ""
                          : core::strprintf("%zu spilled blocks are listed, %zu blocks are marked so", listed, marked);
}

}  // namespace vmem::pager
