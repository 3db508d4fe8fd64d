// Staging frames for who moves a block to a device or from one: makes them, says which blocks give up theirs, and gives
// back what no region is for. What a frame is kept for when its block has come to its device is said here, too: a host
// copy.
//
//   frames are made, and given back, without the lock: by one thread for each size, and none that is being given back
//   counts as free; who waits for that is told by BlockMap::notify()
//   a copy that may be all there is of its block is never evicted
//
// Called under the pager's lock, but for what says otherwise.
#pragma once

#include <cstdint>
#include <optional>

#include "device/device.h"
#include "pager/account/device_set.h"
#include "pager/account/shared.h"
#include "pager/host/isolated_blocks.h"
#include "pager/host/memory_pressure.h"

namespace vmem::pager {

class StagingAllocator : private Shared {
 public:
  // devices: null: there is no device tier, and nobody asks for frames.
  StagingAllocator(const Shared& shared, device::Devices* devices, DeviceSet& gpus, MemoryPressure& pressure,
                   IsolatedBlocks& isolated)
      : Shared(shared), devices_(devices), device_set_(gpus), pressure_(pressure), isolated_(isolated) {}

  // A frame for a block of the region while more than `keep` are free; else one of a block that the SSD or a device has
  // too, which takes no I/O and nobody has to be waited for. nullptr: the pool grows, or its blocks have to be written
  // first.
  std::byte* frame(const Region& r, size_t keep) VMEM_LOCKED;
  // The block has come to its device from `frame`. False: that is not kept.
  bool keep_copy(Region& r, core::BlockIndex b, std::byte* bytes) VMEM_LOCKED;
  // The policy has chosen the copy and forgotten it. False: it stays, being all there is of the block.
  bool evict_copy(core::FrameId copy) VMEM_LOCKED;

  // The pool of a size whose frames are short, so that blocks have to leave them; looked for from `first` on.
  std::optional<uint8_t> is_short(uint8_t first = kStagingPools) VMEM_LOCKED;
  void set_share(unsigned percent) VMEM_LOCKED;

  // Unlocked. Frames enough to move blocks of the region at all; more come with need. Blocks that the CPU uses leave
  // for them. mark: of the wait, as FaultDeadline has it.
  core::Status want(const Region& r, uint64_t mark) VMEM_UNLOCKED;
  // Locked on entry and on return, and not meanwhile. Makes frames of a size that is due. False: none is.
  bool grow(Lock& lock) VMEM_LOCKED;
  // .. For whatever else of the host budget would be refused: gives back what no region is for. True also where others
  // do that meanwhile: they have, when this returns. False: there is nothing to give back, or it may not go now.
  bool give_back(Lock& lock) VMEM_LOCKED;

 private:
  core::Status make(Lock& lock, StagingPool& pool, size_t at_most) VMEM_LOCKED;
  bool end_unused(Lock& lock) VMEM_LOCKED;

  device::Devices* const devices_;
  DeviceSet& device_set_;
  MemoryPressure& pressure_;
  IsolatedBlocks& isolated_;
};

}  // namespace vmem::pager
