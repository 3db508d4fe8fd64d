// The only interface through which the pager's rooms call upward. Pager implements it. All but
// tunables_changed() are called under the pager's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "core/big_lock.h"
#include "core/types.h"

namespace vmem::pager {

struct DeferredWork;
struct Region;

class Upcalls {
 public:
  // Memory or a buffer came free: serves the waiters, most urgent first.
  virtual void memory_freed(DeferredWork& after) VMEM_LOCKED = 0;
  // The block's transition is over and the block is in host memory. A prefetch to the SSD met the
  // block in that transition.
  virtual void evict_after_transition(Region& r, core::BlockIndex b) VMEM_LOCKED = 0;
  // Returns how many pages of 4 KiB the blocks of a pool may occupy.
  virtual uint64_t pages(uint8_t pool) const VMEM_LOCKED = 0;
  // Reserves room in the devices' queues for that many transitions. Throws std::bad_alloc.
  virtual void reserve_queues(size_t transitions) VMEM_LOCKED = 0;

  // Returns a staging frame for a block of the region: a free one while more than `keep` are free,
  // else one that can be taken without waiting, else null.
  virtual std::byte* staging_frame(const Region& r, size_t keep) VMEM_LOCKED = 0;
  // Returns the pool of a size of staging frames that is short, so that blocks have to leave it, or
  // nothing. Looks from the pool `first` on.
  virtual std::optional<uint8_t> short_of_staging(uint8_t first) VMEM_LOCKED = 0;
  // The policy has chosen a host copy. Returns false if the copy stays because it is all there is
  // of its block.
  virtual bool evict_copy(core::FrameId copy) VMEM_LOCKED = 0;
  // Host memory is short: the CPU's copies of blocks on devices may go.
  virtual void host_is_short() VMEM_LOCKED = 0;

  virtual void tunables_changed() VMEM_UNLOCKED = 0;  // the module's tunables

 protected:
  ~Upcalls() = default;
};

}  // namespace vmem::pager
