// Host copies of blocks that are on a device. A block that came through a staging frame leaves its
// bytes there until the frame is needed for something else. While the copy is kept, the block can
// leave its device at once: the device forgets it, and it is in host memory. Without the copy, a
// block that is clean on the SSD would be read again, and a changed one copied back.
//
// - Frame::copy of a block on a device names a frame of the staging pool with the same bytes
//   (is_copy). Only that block uses it.
// - The copy goes when the block may change on its device: for a WRITE lease or a store of the CPU.
//   The copy of an undecided block stays, unused, until the decision.
//
// Copies compete with blocks that are only in staging frames; each size has one policy. A block's
// age is how long ago it last left its device. Not thread-safe: the pager's lock protects it. Needs
// no memory.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "memory/staging_pool_set.h"
#include "pager/block/frame_table.h"
#include "pager/block/nonresident_age.h"
#include "policy/eviction_policy.h"

namespace vmem::pager {

class HostCopies {
 public:
  // policies: indexed by Frame::pool.
  HostCopies(FrameTable& frame_table, memory::StagingPoolSet& staging,
             std::span<const std::unique_ptr<policy::EvictionPolicy>> policies, const NonresidentAge& age)
      : frame_table_(frame_table), staging_(staging), policies_(policies), nonresident_age_(age) {}

  // Makes the staging frame at `bytes`, through which the block came to its device, its copy. A
  // frame number must be free.
  void keep(Region& r, core::BlockIndex b, std::byte* bytes);
  // Whether the block has a copy with its current bytes.
  bool has(core::FrameId on_device) const {
    return frame_table_[on_device].dev.copy != core::kNoFrame && !frame_table_[on_device].dev.undecided;
  }
  size_t count() const { return count_; }
  size_t count(const memory::Staging& in) const;  // recounts; for tests
  // Gives up the copy, if there is one: the block may have changed, or is gone.
  void drop(core::FrameId on_device);

  // Returns the copy's bytes for a transition that reads them. The copy is not evicted until
  // unhold().
  std::byte* hold(core::FrameId on_device);
  // The block's advice has changed.
  void follow_advice(core::FrameId on_device);
  void unhold(core::FrameId on_device) {
    const core::FrameId id = frame_table_[on_device].dev.copy;
    policy(id).unhold(id);
  }
  // Makes a held copy the block, and returns its number. The caller frees the entry of the block on
  // the device.
  core::FrameId become(core::FrameId on_device);

  // The policy has chosen the copy, and forgotten it. evict() gives it up; refuse() keeps it, since
  // it may be all that is left of the block.
  void evict(core::FrameId copy);
  void refuse(core::FrameId copy) { admit(copy, true); }

  // For tests: recounts everything. Returns what is wrong, or an empty string.
  std::string check() const;

 private:
  void admit(core::FrameId copy, bool refused = false);
  void give(core::FrameId copy);
  policy::EvictionPolicy& policy(core::FrameId copy) { return *policies_[frame_table_[copy].pool]; }

  FrameTable& frame_table_;
  memory::StagingPoolSet& staging_;
  const std::span<const std::unique_ptr<policy::EvictionPolicy>> policies_;
  const NonresidentAge& nonresident_age_;
  size_t count_ = 0;
};

}  // namespace vmem::pager
