// StagingAllocator makes staging frames for moves to and from devices, chooses the blocks that give
// up their frames, and frees frames of sizes that no region needs. It also decides which blocks
// keep their frame as a host copy when they have come to a device.
//
// - Frames are made and freed without the lock, by one thread for each size. A frame that is being
//   freed does not count as free. BlockMap::notify() wakes waiters.
// - A copy that may be the only one of its block is never evicted.
//
// Called under the pager's lock, except where noted.
#pragma once

#include <cstdint>
#include <optional>

#include "device/device.h"
#include "pager/account/context.h"
#include "pager/account/device_set.h"
#include "pager/host/memory_pressure.h"
#include "pager/host/writeback.h"

namespace vmem::pager {

struct DeviceTier;
struct HostTier;

class StagingAllocator {
 public:
  StagingAllocator(PagerContext& ctx, DeviceTier& tier);

  // Returns a frame for a block of the region while more than `keep` are free. Otherwise takes one
  // from a block that the SSD or a device also has, which needs no I/O and no wait. Returns nullptr
  // if the pool grows, or if its blocks must be written first.
  std::byte* frame(const Region& r, size_t keep) VMEM_LOCKED;
  // The block has come to its device from `bytes`: keeps these as its host copy. Returns false if
  // they are not kept.
  bool keep_copy(Region& r, core::BlockIndex b, std::byte* bytes) VMEM_LOCKED;
  // The policy has chosen the copy and forgotten it. Returns false if it stays, because it may be
  // the only copy of the block.
  bool evict_copy(core::FrameId copy) VMEM_LOCKED;

  // Returns a pool, searched from `first` on, whose frames are so short that blocks must leave
  // them.
  std::optional<uint8_t> is_short(uint8_t first = kStagingPools) VMEM_LOCKED;
  void set_share(unsigned percent) VMEM_LOCKED;

  // Makes the few frames without which no block of the region can move; more are made on demand.
  // Blocks that the CPU uses leave for them. mark: of the wait, as in FaultDeadline. Returns
  // -ENOMEM if the host budget has no room.
  core::Status want(const Region& r, uint64_t mark) VMEM_UNLOCKED;
  // Makes frames of a size that is due; drops the lock while it works. Returns false if none is
  // due.
  bool grow(Lock& lock) VMEM_LOCKED;
  // Frees frames that no region needs, for a charge to the host budget that would be refused; drops
  // the lock while it works. If other threads are freeing frames, waits for them and returns true.
  // Returns false if there is nothing to free, or it cannot be freed now.
  bool give_back(Lock& lock) VMEM_LOCKED;

 private:
  core::Status make(Lock& lock, StagingPool& pool, size_t at_most) VMEM_LOCKED;
  bool end_unused(Lock& lock) VMEM_LOCKED;

  PagerContext& ctx_;
  HostTier& host_;
};

}  // namespace vmem::pager
