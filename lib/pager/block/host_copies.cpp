#include "pager/block/host_copies.h"

#include <utility>

#include "pager/block/advice.h"

namespace vmem::pager {

void HostCopies::keep(Region& r, BlockIndex b, std::byte* bytes) {
  const FrameId on_device = r.table[b].aux, id = frame_table_.take(r, b, bytes, staging_pool(r));
  Frame& copy = frame_table_[id];
  copy.is_copy = true;
  copy.shadow = frame_table_[on_device].shadow;
  frame_table_[on_device].dev.copy = id;
  ++count_;
  admit(id);
}

void HostCopies::admit(FrameId id, bool refused) {
  Frame& copy = frame_table_[id];
  policy::Admission a;
  a.id = id;
  a.weight = static_cast<uint32_t>(copy.region->block_size / core::kPage);
  a.priority = copy.region->advice.priority;
  a.temperature = copy_temperature(*copy.region, copy.block);
  a.probes = false;
  a.refused = refused;
  if (copy.shadow != 0) a.age = nonresident_age_.age(copy.shadow);
  policy(id).admit(a);
  copy.admitted = true;
}

void HostCopies::give(FrameId id) {
  if (frame_table_[id].admitted) policy(id).remove(id);
  staging_.of(frame_table_[id].region->block_size).frames.put(frame_table_[id].bytes);
  frame_table_.give(id);
  --count_;
}

void HostCopies::follow_advice(FrameId on_device) {
  const FrameId id = frame_table_[on_device].dev.copy;
  if (id == kNoFrame) return;
  const Frame& copy = frame_table_[id];
  policy(id).advise(id, copy_temperature(*copy.region, copy.block), copy.region->advice.priority, false);
}

void HostCopies::drop(FrameId on_device) {
  const FrameId id = std::exchange(frame_table_[on_device].dev.copy, kNoFrame);
  if (id != kNoFrame) give(id);
}

std::byte* HostCopies::hold(FrameId on_device) {
  const FrameId id = frame_table_[on_device].dev.copy;
  policy(id).hold(id);
  return frame_table_[id].bytes;
}

FrameId HostCopies::become(FrameId on_device) {
  const FrameId id = std::exchange(frame_table_[on_device].dev.copy, kNoFrame);
  frame_table_[id].is_copy = false;
  policy(id).unhold(id);
  --count_;
  return id;
}

void HostCopies::evict(FrameId id) {
  const Frame& copy = frame_table_[id];
  frame_table_[copy.region->table[copy.block].aux].dev.copy = kNoFrame;
  frame_table_[id].admitted = false;
  give(id);
}

size_t HostCopies::count(const memory::Staging& in) const {
  size_t count = 0;
  for (FrameId id = 0; id < frame_table_.size(); ++id) {
    const Frame& frame = frame_table_[id];
    count += frame.region != nullptr && frame.is_copy && frame.region->block_size == in.frame() ? 1 : 0;
  }
  return count;
}

std::string HostCopies::check() const {
  size_t copies = 0, named = 0;
  for (FrameId id = 0; id < frame_table_.size(); ++id) {
    const Frame& frame = frame_table_[id];
    if (frame.region == nullptr) continue;
    copies += frame.is_copy ? 1 : 0;
    if (frame.dev.copy == kNoFrame) continue;
    ++named;
    const Frame& copy = frame_table_[frame.dev.copy];
    if (!copy.is_copy || copy.region != frame.region || copy.block != frame.block ||
        copy.pool != staging_pool(*copy.region) || !copy.admitted || (frame.dev.changed && !frame.dev.undecided) ||
        !staging_.of(copy.region->block_size).frames.owns(copy.bytes) ||
        !core::on_a_device(frame.region->table[frame.block].state)) {
      return core::strprintf("a host copy is not the block's: region %llu, block %llu",
                             static_cast<unsigned long long>(frame.region->id),
                             static_cast<unsigned long long>(frame.block));
    }
  }
  if (copies != named || copies != count_)
    return core::strprintf("%zu host copies are known, blocks have %zu, and there are %zu", count_, named, copies);
  return "";
}

}  // namespace vmem::pager
