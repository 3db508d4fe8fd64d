// Takes pages out of a range so that no access finds them: for a block that leaves, or to drop
// them. UFFDIO_MOVE refuses pinned pages; MADV_DONTNEED does not check.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/mutex.h"
#include "trap/transfer.h"
#include "trap/trap.h"
#include "trap/waking.h"

namespace vmem::trap {

// Any thread; concurrent calls name disjoint ranges. Addresses and sizes are multiples of 4 KiB.
class Taking {
 public:
  Taking(int fd, int pagemap, const Caps& caps, bool by_remap, Waking& waking)
      : fd_(fd),
        pagemap_(pagemap),
        move_(caps.move),
        write_protect_(caps.write_protect),
        by_remap_(by_remap),
        waking_(waking) {}
  ~Taking();
  Taking(const Taking&) = delete;
  Taking& operator=(const Taking&) = delete;

  // Takes bytes that are all in place into an empty frame. On error everything is back in the
  // range, and its threads were woken; -ENOTRECOVERABLE: it could not go back. dump: the range's
  // setting.
  core::Status take(uintptr_t start, size_t size, uintptr_t frame, CoreDump dump, PinWait wait);
  // Same, even if UFFDIO_MOVE has been forbidden since the start; then pins are no longer seen.
  core::Status take_anyhow(uintptr_t start, size_t size, uintptr_t frame, CoreDump dump, PinWait wait);
  // Reserves what drop() needs, if possible: later there may be no mapping left (vm.max_map_count).
  void prepare();
  // Drops the pages of a range. Returns -EBUSY if one is pinned, or without memory to check. Each
  // 64 MiB from the start is then dropped as a whole or not at all.
  core::Status drop(uintptr_t start, size_t size);

 private:
  // *sealed: the kernel does not let a part go, because it is sealed (mseal).
  core::Status take_unless_sealed(uintptr_t start, size_t size, uintptr_t frame, CoreDump dump, PinWait wait,
                                  bool* sealed);
  void move_rest(uintptr_t start, size_t size, uintptr_t frame, PinWait wait, Outcome* out);
  void carry_some(uintptr_t start, size_t size, uintptr_t frame, Outcome* out, bool* sealed);
  core::Status by_remap(uintptr_t start, size_t size, uintptr_t frame, CoreDump dump) const;
  int have_aside() VMEM_REQUIRES(dropping_);

  const int fd_, pagemap_;
  const bool move_, write_protect_, by_remap_;
  Waking& waking_;
  core::Mutex dropping_;                            // protects the use of `aside_`
  uintptr_t aside_ VMEM_GUARDED_BY(dropping_) = 0;  // empty address space; 0: not yet reserved
};

}  // namespace vmem::trap
