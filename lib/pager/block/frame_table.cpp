#include "pager/block/frame_table.h"

#include <utility>

namespace vmem::pager {

// The lowest new number is taken first.
void FrameTable::grow() {
  const size_t old = all_.size();
  all_.grow(old + 1);
  for (size_t i = all_.size(); i > old; --i) {
    all_[i - 1].dev.copy = std::exchange(first_free_, static_cast<FrameId>(i - 1));
  }
  free_ += all_.size() - old;
}

FrameId FrameTable::take(Region& r, BlockIndex b, std::byte* bytes, uint8_t pool) {
  const FrameId id = first_free_;
  Frame& frame = all_[id];
  first_free_ = frame.dev.copy;
  --free_;
  frame = Frame{};
  frame.region = &r;
  frame.block = b;
  frame.bytes = bytes;
  frame.pool = pool;
  return id;
}

void FrameTable::give(FrameId id) {
  seen(all_[id]);
  all_[id] = Frame{};
  all_[id].dev.copy = std::exchange(first_free_, id);
  ++free_;
}

void FrameTable::read_ahead(Frame& frame) {
  if (!std::exchange(frame.ahead, true)) ahead_bytes_ += frame.region->block_size;
}

void FrameTable::seen(Frame& frame) {
  if (std::exchange(frame.ahead, false)) ahead_bytes_ -= frame.region->block_size;
}

std::string FrameTable::check() const {
  size_t in_list = 0, without_block = 0;
  for (FrameId id = first_free_; id != core::kNoFrame; id = all_[id].dev.copy) {
    if (all_[id].region != nullptr) return "a number that is free names a block";
    if (++in_list > free_) return "more numbers are free than are counted";
  }
  uint64_t ahead = 0;
  for (size_t i = 0; i < all_.size(); ++i) {
    if (all_[i].region == nullptr) {
      ++without_block;
    } else if (all_[i].ahead) {
      ahead += all_[i].region->block_size;
    }
  }
  if (in_list != free_ || without_block != free_) return "a number is not free, and names no block";
  if (ahead != ahead_bytes_) return "bytes that were read ahead and frames disagree";
  return "";
}

}  // namespace vmem::pager
