// Staging loans: kernels load from staging frames in place, until the service of an open range ends
// the loan. A lent block is in state isolating, without a transition. To other code it is in
// transition, and requests for it wait as usual, so its bytes do not change and its frame is not
// reused.
//
//   staged ──lend──> isolating, lent ──end──> staged
//   on_device, with a host copy, not leased ──leaves──> staged
//
// - StagingPool::lent counts the loans, and leaves some frames of each size for transitions.
// - wanted() reports waiters; the service calls it often.
// - A region that is freed by force takes its loans with it, after the kernels.
// - At exit kernels may keep loans for ever: a lent block is written in state writing back, with a
//   transition, and goes back to where it was.
#pragma once

#include <span>

#include "pager/host/reclaim.h"
#include "pager/tier/demoter.h"
#include "pager/tier/kernel_ranges.h"

namespace vmem::pager {

struct DeviceTier;
struct HostTier;

class StagingLoans {
 public:
  StagingLoans(PagerContext& ctx, DeviceTier& tier);

  // Lends those of `blocks` that are in staging frames, until end(), and returns how many. They
  // come first in `blocks`, in the order of `frames`, which has room for all. leave: also lends
  // blocks on the range's device without leases that have a host copy; they leave the device first,
  // which copies nothing.
  size_t lend(const KernelRange& range, std::span<uint32_t> blocks, std::span<const std::byte*> frames,
              bool leave) VMEM_UNLOCKED;
  // Ends loans: no kernel loads from these blocks any more.
  void end(const KernelRange& range, std::span<const uint32_t> blocks) VMEM_UNLOCKED;
  // Puts lent blocks that a thread or request waits for into `out`, as many as fit. Returns how
  // many.
  size_t wanted(const KernelRange& range, std::span<const uint32_t> lent, std::span<uint32_t> out) VMEM_UNLOCKED;
  // Ends all loans of a region that is being freed, whose kernels have ended. Drops the lock while
  // it works.
  void take_back(Lock& lock, Region& r) VMEM_LOCKED;

 private:
  Region* region_of(const KernelRange& range) VMEM_LOCKED;
  size_t most(const StagingPool& pool, size_t asked) const VMEM_LOCKED;
  void take_from_device(Lock& lock, Region& r, core::BlockIndex first, int d,
                        std::span<const uint32_t> blocks) VMEM_LOCKED;
  void end(Region& r, core::BlockIndex b, DeferredWork& after) VMEM_LOCKED;

  PagerContext& ctx_;
  HostTier& host_;
  DeviceTier& tier_;
};

}  // namespace vmem::pager
