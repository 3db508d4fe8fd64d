// Taking pages out of a range, so that nobody finds them any more: as a block leaves, or to be dropped. UFFDIO_MOVE
// refuses a page that somebody pins; MADV_DONTNEED does not look.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/mutex.h"
#include "trap/transfer.h"
#include "trap/trap.h"
#include "trap/waking.h"

namespace vmem::trap {

// Any thread; ranges that are named at once do not overlap. Addresses and sizes are multiples of 4 KiB.
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

  // Takes bytes that are all in place, into a frame that is empty. On error everything is back in the range, and its
  // threads were woken; -ENOTRECOVERABLE: it could not go back. dump: of the range.
  core::Status take(uintptr_t start, size_t size, uintptr_t frame, CoreDump dump, PinWait wait);
  // The same where UFFDIO_MOVE may have been forbidden since the start: pins are not seen any more then.
  core::Status take_anyhow(uintptr_t start, size_t size, uintptr_t frame, CoreDump dump, PinWait wait);
  // Has what drop() needs, if it is to be had: later there may be no more mappings (vm.max_map_count).
  void prepare();
  // Drops the pages of a range. -EBUSY: one is pinned, or there is no memory to look; of each 64 MiB from the start on
  // all has gone, or none.
  core::Status drop(uintptr_t start, size_t size);

 private:
  // *sealed: the kernel lets nobody take a part of it, which is sealed (mseal).
  core::Status take_unless_sealed(uintptr_t start, size_t size, uintptr_t frame, CoreDump dump, PinWait wait,
                                  bool* sealed);
  void move_rest(uintptr_t start, size_t size, uintptr_t frame, PinWait wait, Outcome* out);
  void carry_some(uintptr_t start, size_t size, uintptr_t frame, Outcome* out, bool* sealed);
  core::Status by_remap(uintptr_t start, size_t size, uintptr_t frame, CoreDump dump) const;
  int have_aside() VMEM_REQUIRES(dropping_);

  const int fd_, pagemap_;
  const bool move_, write_protect_, by_remap_;
  Waking& waking_;
  core::Mutex dropping_;                            // whoever has it uses `aside_`
  uintptr_t aside_ VMEM_GUARDED_BY(dropping_) = 0;  // address space in which nothing is; 0: not yet
};

}  // namespace vmem::trap
