#include "pager/block/dirty_blocks.h"

#include <algorithm>

#include "core/status.h"

namespace vmem::pager {

void DirtyBlocks::append(FrameId id, uint64_t now_ns) {
  Frame& frame = frame_table_[id];
  frame.dirty.since_ns = std::max<uint64_t>(now_ns, 1);
  if (last_ != kNoFrame) frame.dirty.since_ns = std::max(frame.dirty.since_ns, since(last_));
  frame.dirty.after = kNoFrame;
  frame.dirty.before = last_;
  (last_ == kNoFrame ? first_ : frame_table_[last_].dirty.after) = id;
  last_ = id;
  bytes_ += frame.region->block_size;
}

void DirtyBlocks::prepend(FrameId id, uint64_t since_ns) {
  Frame& frame = frame_table_[id];
  frame.dirty.since_ns = std::max<uint64_t>(since_ns, 1);
  if (first_ != kNoFrame) frame.dirty.since_ns = std::min(frame.dirty.since_ns, since(first_));
  frame.dirty.before = kNoFrame;
  frame.dirty.after = first_;
  (first_ == kNoFrame ? last_ : frame_table_[first_].dirty.before) = id;
  first_ = id;
  bytes_ += frame.region->block_size;
}

void DirtyBlocks::unlink(FrameId id) {
  Frame& frame = frame_table_[id];
  const FrameId before = frame.dirty.before, after = frame.dirty.after;
  (before == kNoFrame ? first_ : frame_table_[before].dirty.after) = after;
  (after == kNoFrame ? last_ : frame_table_[after].dirty.before) = before;
  bytes_ -= frame.region->block_size;
  frame.dirty.since_ns = 0;
  if (frame.dirty.overdue == DirtyFrame::Overdue::leased) leased_ -= frame.region->block_size;
  frame.dirty.overdue = DirtyFrame::Overdue::no;
  frame.dirty.before = frame.dirty.after = kNoFrame;
}

void DirtyBlocks::add(FrameId id, uint64_t now_ns) {
  if (listed(id)) return;
  const bool few = !many();
  append(id, now_ns);
  ++changes_;
  if (interval_ns() != 0 && (first_ == id || (few && many()))) ring();
}

void DirtyBlocks::remove(FrameId id) {
  if (listed(id)) unlink(id);
}

void DirtyBlocks::put_off(FrameId id, uint64_t now_ns, DirtyFrame::Overdue overdue) {
  if (!listed(id)) return;
  unlink(id);
  append(id, now_ns);
  frame_table_[id].dirty.overdue = overdue;
  if (overdue == DirtyFrame::Overdue::leased) leased_ += frame_table_[id].region->block_size;
}

void DirtyBlocks::bring_forward(FrameId id, uint64_t now_ns) {
  unlink(id);
  prepend(id, now_ns - std::min(now_ns, interval_ns()));
  frame_table_[id].dirty.overdue = DirtyFrame::Overdue::yes;
  ++changes_;
  if (interval_ns() != 0) ring();
}

void DirtyBlocks::write_ends(uint64_t bytes, uint64_t now_ns) {
  const bool enough = writes_enough();
  writing_ -= bytes;
  ended_ns_ = now_ns;
  ++changes_;
  if (!slowed_.empty() || many() || (enough && !writes_enough())) ring();
}

void DirtyBlocks::settings_changed() {
  lifted_until_ns_ = 0;
  if (bell_ != nullptr) bell_->notify_all();
}

bool DirtyBlocks::slow(Region& r, BlockIndex b, uint64_t now_ns) {
  if (slowed_.size() >= kMostSlowed) return false;
  const auto same = [&](const BlockSpan& s) { return s.region == &r && s.first == b; };
  if (std::any_of(slowed_.begin(), slowed_.end(), same)) return true;
  if (slowed_.empty()) slowing_since_ns_ = now_ns;
  if (!slowed_.push_back({&r, b, b})) return false;
  ring();
  return true;
}

uint64_t DirtyBlocks::stuck_ns(uint64_t now_ns) const {
  const uint64_t since = std::max(slowing_since_ns_, ended_ns_);
  return slowed_.empty() || now_ns <= since ? 0 : now_ns - since;
}

BlockSpan DirtyBlocks::wake_one(uint64_t now_ns, uint64_t woken) {
  const bool room = writable() + woken < limit() || writable() + woken == 0;
  const bool waits = interval_ns() != 0 && !room && now_ns >= lifted_until_ns_;
  if (slowed_.empty() || waits) return {};
  const BlockSpan first = slowed_.front();
  slowed_.pop_front();
  return first;
}

void DirtyBlocks::forget(const Region& r) {
  slowed_.erase_if([&](const BlockSpan& s) { return s.region == &r; });
}

std::string DirtyBlocks::check() const {
  uint64_t bytes = 0, leased = 0, since_ns = 0;
  size_t count = 0, marked = 0;
  FrameId before = kNoFrame;
  for (FrameId id = first_; id != kNoFrame; before = id, id = frame_table_[id].dirty.after) {
    const Frame& frame = frame_table_[id];
    if (frame.region == nullptr || frame.dirty.before != before || ++count > frame_table_.size())
      return "dirty blocks are not in order";
    if (since(id) < since_ns || since(id) == 0) return "a dirty block is younger than those after it";
    if (frame.region->backing != Backing::file_shared || !core::in_memory(frame.region->table[frame.block].state))
      return "a dirty block is not in host memory, or no shared file's";
    since_ns = since(id);
    bytes += frame.region->block_size;
    if (frame.dirty.overdue == DirtyFrame::Overdue::leased) leased += frame.region->block_size;
  }
  if (before != last_ || bytes != bytes_ || leased != leased_) return "dirty bytes and dirty blocks disagree";
  for (FrameId id = 0; id < frame_table_.size(); ++id) marked += listed(id) ? 1 : 0;
  return count == marked ? "" : core::strprintf("%zu dirty blocks are listed, %zu are marked so", count, marked);
}

}  // namespace vmem::pager
