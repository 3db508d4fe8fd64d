// Host copies of blocks that are on a device. A block that came through a staging frame leaves its bytes there until
// the frame is wanted for something else: while the copy is kept, the block leaves its device by being forgotten there,
// and is in host memory at once. Without it a block that is clean on the SSD would be read again, and one that is not
// would be copied back.
//
//   Frame::copy of a block on a device names a frame of the staging pool with the same bytes (is_copy), which is
//   nobody else's; it goes when the block may change there: a WRITE lease, a store of the CPU; of a block that is
//   undecided it waits until that is said
//
// Copies compete with blocks that are only in staging frames, those of one size under one policy: how long ago a block
// left its device last is its age. Not thread-safe: the pager's lock protects it. Needs no memory.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "pager/account/staging_pool_set.h"
#include "pager/block/frame_table.h"
#include "pager/block/nonresident_age.h"
#include "policy/eviction_policy.h"

namespace vmem::pager {

class HostCopies {
 public:
  // policies: by Frame::pool.
  HostCopies(FrameTable& frame_table, StagingPoolSet& staging,
             std::span<const std::unique_ptr<policy::EvictionPolicy>> policies, const NonresidentAge& age)
      : frame_table_(frame_table), staging_(staging), policies_(policies), nonresident_age_(age) {}

  // The block, which has come to its device from `frame`, keeps it. A resident must be free.
  void keep(Region& r, core::BlockIndex b, std::byte* bytes);
  // It has one with the same bytes.
  bool has(core::FrameId on_device) const {
    return frame_table_[on_device].copy != core::kNoFrame && !frame_table_[on_device].undecided;
  }
  size_t count() const { return count_; }
  size_t count(const memory::Staging& in) const;  // counted; tests
  // The block has changed, or may, or is gone. Nothing where it has no copy.
  void drop(core::FrameId on_device);

  // Its frame, for a transition that reads it: nobody evicts it until unhold().
  std::byte* hold(core::FrameId on_device);
  // Something else has been advised of the block.
  void follow_advice(core::FrameId on_device);
  void unhold(core::FrameId on_device) {
    const core::FrameId id = frame_table_[on_device].copy;
    policy(id).unhold(id);
  }
  // A copy that is held is the block from now on, and of the block on the device nothing is left to be known.
  core::FrameId become(core::FrameId on_device);

  // The policy has chosen the copy, and forgotten it: it goes; or it stays, being all there is of the block.
  void evict(core::FrameId copy);
  void refuse(core::FrameId copy) { admit(copy); }

  // Tests: recounts all. What is wrong; empty: nothing.
  std::string check() const;

 private:
  void admit(core::FrameId copy);
  void give(core::FrameId copy);
  policy::EvictionPolicy& policy(core::FrameId copy) { return *policies_[frame_table_[copy].pool]; }

  FrameTable& frame_table_;
  StagingPoolSet& staging_;
  const std::span<const std::unique_ptr<policy::EvictionPolicy>> policies_;
  const NonresidentAge& nonresident_age_;
  size_t count_ = 0;
};

}  // namespace vmem::pager
