// Isolates blocks of host memory: takes them out of the region, or write-protects them in place, so
// that their image cannot change. Then finds out whether the store has the same bytes.
//
// Marks alone do not decide whether a block is written: the digest of the image is compared with
// that of the store's copy. There are two exceptions: blocks of read-only files, which are never
// written, and blocks that stayed write-protected since they were equal to the store.
//
// - After isolate() a transition of the batch has a failed status, or an image that does not
//   change.
// - A clean block that is not to stay is no longer in place.
#pragma once

#include <span>

#include "core/process/guarded_read.h"
#include "pager/account/context.h"

namespace vmem::pager {

class Isolator {
 public:
  explicit Isolator(PagerContext& ctx);

  // Claims a resident or staged block, which is in state isolating from here on. A block that is
  // lent to kernels is kept, in state writing_back. keep: the block stays in memory. probe: it is
  // only isolated, and its frame is kept. Returns null if there is no memory, or no address space
  // for the image.
  Transition* begin_take(Region& r, core::BlockIndex b, bool keep, bool probe) VMEM_LOCKED;
  // Returns true if the block may turn out to need no write.
  bool may_be_clean(const Region& r, core::BlockIndex b) const VMEM_LOCKED;
  // Returns true if a block that was written from its place still has its digest. A device that had
  // pinned a page may have stored to it during the write: then it is not known what was written.
  bool still_same(const Transition* m) const VMEM_UNLOCKED;
  // Isolates and compares a batch. Adds the transitions that are to be written to `writes`. Takes
  // at most a Batch.
  void isolate(std::span<Transition*> batch, Batch* writes) VMEM_UNLOCKED;

 private:
  // The result of the last look at a region's mappings: whether [first, last) may be loaded from.
  // It holds for `left` more bytes.
  struct Look {
    const std::byte *first = nullptr, *last = nullptr;
    size_t left = 0;
    bool loads = false;
  };
  void take_one(Transition* m, Look* look) VMEM_UNLOCKED;
  core::Status digest_in_place(Transition* m, Look* look) VMEM_UNLOCKED;
  void take_to_slots(std::span<Transition* const> batch) VMEM_UNLOCKED;
  void empty_clean(std::span<Transition* const> batch) VMEM_UNLOCKED;
  void drop_clean(std::span<Transition* const> batch) VMEM_UNLOCKED;
  void settle_torn_take(Transition* m) VMEM_UNLOCKED;

  PagerContext& ctx_;
  const core::MappingQuery mappings_;
  const core::GuardedReader reader_;
};

}  // namespace vmem::pager
