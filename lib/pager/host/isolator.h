// Isolates blocks of host memory: takes them out of sight, or write-protects them where they are, so that their image
// cannot change any more; and says whether the store has the same bytes.
//
// Whether a block must be written is never guessed from marks: the digest of the image is compared with the digest of
// what the store holds. The exceptions are blocks of read-only files, which are never written, and blocks that stood
// write-protected since they were equal to the store.
//
//   after isolate() a transition of the batch has a status, or an image that does not change; one that is clean, and
//   not to stay, is not in place any more
#pragma once

#include <span>

#include "core/guarded_read.h"
#include "pager/account/shared.h"

namespace vmem::pager {

class Isolator : private Shared {
 public:
  explicit Isolator(const Shared& shared) : Shared(shared) {}

  // Claims a resident or staged block, which is in state isolating from here on. keep: it stays in memory; probe: it is
  // only isolated, and its frame is kept. nullptr: no memory, or no address space for its image.
  Transition* begin_take(Region& r, core::BlockIndex b, bool keep, bool probe) VMEM_LOCKED;
  // It might turn out that the block need not be written.
  bool may_be_clean(const Region& r, core::BlockIndex b) const VMEM_LOCKED;
  // Unlocked; what was written from its place has its digest still. A device may have stored to it meanwhile that had
  // pinned a page before: then nobody knows what was written.
  bool still_same(const Transition* m) const VMEM_UNLOCKED;
  // Those that are to be written are in `writes` afterwards. No more than a Batch holds.
  void isolate(std::span<Transition*> batch, Batch* writes) VMEM_UNLOCKED;

 private:
  // What was found when a region was last looked at: [first, last) may be loaded from, or not, for `left` bytes more.
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

  const core::MappingQuery mappings_;
};

}  // namespace vmem::pager
