// Staging loans: staging frames that kernels load from where they are, for as long as the service of an open range
// says. A block that is lent is in state isolating, without a transition: to everybody else it is on its way, and who
// wants it waits, as for any other. So nothing changes its bytes, and its frame is nobody else's.
//
//   staged ──lend──> isolating, lent ──end──> staged
//   on_device, with a host copy, nobody leases it ──leaves──> staged
//
//   StagingPool::lent counts them, and leaves some frames of each size for transitions
//
// Whoever waits is seen by wanted(), which the service asks often. A region that is freed by force takes its loans with
// it, after the kernels. At exit kernels may keep what is lent for ever: it is written in state writing back, with a
// transition, and goes back to where it was.
#pragma once

#include <span>

#include "pager/host/reclaim.h"
#include "pager/tier/demoter.h"
#include "pager/tier/kernel_range.h"

namespace vmem::pager {

class StagingLoans : private Shared {
 public:
  // requests: for promotion; under the lock.
  StagingLoans(const Shared& shared, const PooledList<PromotionRequest>& requests, PageIn& page_in, Reclaim& reclaim,
               StagingAllocator& supply, Demoter& demoter, MemoryFreed& freed)
      : Shared(shared),
        requests_(requests),
        page_in_(page_in),
        reclaim_(reclaim),
        supply_(supply),
        demoter_(demoter),
        freed_(freed) {}

  // Of these blocks those that are in staging frames, until end(): they come first in `blocks`, in the order of
  // `frames`, which has room for all. How many they are. leave: also those that are on the range's device, and that
  // nobody leases: where a staging frame has the same bytes they leave it first, which copies nothing.
  size_t lend(const KernelRange& range, std::span<uint32_t> blocks, std::span<const std::byte*> frames,
              bool leave) VMEM_UNLOCKED;
  // No kernel loads from them any more, nor will.
  void end(const KernelRange& range, std::span<const uint32_t> blocks) VMEM_UNLOCKED;
  // Of blocks that are lent those that somebody waits for, as many as fit into `out`: how many.
  size_t wanted(const KernelRange& range, std::span<const uint32_t> lent, std::span<uint32_t> out) VMEM_UNLOCKED;
  // Locked on entry and on return, and not meanwhile. All of a region that is freed, whose kernels have ended.
  void take_back(Lock& lock, Region& r) VMEM_LOCKED;

 private:
  Region* region_of(const KernelRange& range) VMEM_LOCKED;
  size_t most(const StagingPool& pool, size_t asked) const VMEM_LOCKED;
  void take_from_device(Lock& lock, Region& r, core::BlockIndex first, int d,
                        std::span<const uint32_t> blocks) VMEM_LOCKED;
  void end(Region& r, core::BlockIndex b, DeferredWork& after) VMEM_LOCKED;

  const PooledList<PromotionRequest>& requests_;
  PageIn& page_in_;
  Reclaim& reclaim_;
  StagingAllocator& supply_;
  Demoter& demoter_;
  MemoryFreed& freed_;
};

}  // namespace vmem::pager
