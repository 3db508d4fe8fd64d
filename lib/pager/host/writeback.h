// The way out of host memory: isolates a block, compares it with the store's copy, and writes it if
// they differ. Then IsolatedBlocks lets the block go, or puts it back because it is to stay, is
// wanted again, or could not be written.
//
// - In states isolating and writing_back Writeback owns the block, from evict_batch() until
//   IsolatedBlocks has it.
// - The block's memory goes only when the store has the bytes, or when they are of no interest.
#pragma once

#include <span>

#include "pager/account/context.h"
#include "pager/host/emergency_buffer.h"
#include "pager/host/isolated_blocks.h"
#include "pager/host/isolator.h"
#include "pager/host/page_in.h"
#include "pager/host/store_writer.h"

namespace vmem::pager {

struct HostTier;

class Writeback final : private IoEnd {
 public:
  Writeback(PagerContext& ctx, HostTier& host);

  // Takes each transition, in state isolating, to its end, or to a write that ends later. Takes at
  // most a Batch. The overload with a lock drops and retakes it.
  void evict_batch(std::span<Transition*> batch) VMEM_UNLOCKED;
  void evict_batch(Lock& lock, std::span<Transition*> batch) VMEM_LOCKED;

  // See Installer::any_pinned() and Installer::retry_pinned().
  bool any_pinned() const VMEM_LOCKED;
  void retry_pinned(Lock& lock) VMEM_LOCKED;

 private:
  void io_ended(Transition* m) VMEM_UNLOCKED override;
  void settle_taken(Transition* m, DeferredWork& after) VMEM_LOCKED;
  void put_back_dirty(Transition* m, DeferredWork& after) VMEM_LOCKED;
  void finish_clean(Transition* m, DeferredWork& after) VMEM_LOCKED;
  void finish_write(Transition* m, DeferredWork& after) VMEM_UNLOCKED;
  bool drop_written(Transition* m) VMEM_UNLOCKED;
  void drop_cut_off(Transition* m) VMEM_UNLOCKED;
  void stays_cut_off(Transition* m) VMEM_LOCKED;
  void end_write(Transition* m, DeferredWork& after) VMEM_UNLOCKED;
  bool write_aside(Transition* m) VMEM_UNLOCKED;
  bool write_copy(Transition* m, std::byte* copy) VMEM_UNLOCKED;
  void pass_spare(DeferredWork& after) VMEM_UNLOCKED;
  void settle_write(Transition* m, DeferredWork& after) VMEM_UNLOCKED;

  PagerContext& ctx_;
  HostTier& host_;
  EmergencyBuffer spare_;
};

}  // namespace vmem::pager
