// Wakes threads that wait for a page, even if the program forbids UFFDIO_WAKE later. Also
// write-protects pages, which such a wake must not undo.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/mutex.h"
#include "trap/signal_faults.h"
#include "trap/transfer.h"
#include "trap/trap.h"

namespace vmem::trap {

// Any thread. Addresses and sizes are multiples of 4 KiB. Errors are 0 or a negative errno.
class Waking {
 public:
  // faults: the kernel parks no thread, and these do. May be nullptr.
  Waking(int fd, int pagemap, const Caps& caps, SignalFaults* faults)
      : fd_(fd), pagemap_(pagemap), write_protect_(caps.write_protect), move_(caps.move), faults_(faults) {}
  ~Waking();
  Waking(const Waking&) = delete;
  Waking& operator=(const Waking&) = delete;

  // Makes all threads that wait for a page of the range look again. On error some may still wait.
  int wake(uintptr_t start, size_t size);
  // Same after a call that makes the kernel wake them.
  void woken(uintptr_t start, size_t size) {
    if (faults_ != nullptr) faults_->wake(start, size);
  }
  // Same for a range over which an empty file has been mapped (replace_with_sigbus).
  int wake_where_nothing_is(uintptr_t start, size_t size);
  // Same for a range whose pages are all present and whose stores need no report. Also removes
  // write protection, without UFFDIO_WRITEPROTECT. An access of an absent page may see zeros.
  // Returns -EPERM if nothing has changed.
  int let_go_on(uintptr_t start, size_t size);
  int protect(uintptr_t start, size_t size);
  // As copy_pages().
  Outcome copy_in(uintptr_t start, uintptr_t frame, size_t size, Protect protect);

 private:
  int first_protected(uintptr_t start, size_t size, uintptr_t* first) const;
  int wake_without_a_call(uintptr_t start, size_t size);
  int wake_by_moving_nothing(uintptr_t start, size_t size);
  int have_nothing() VMEM_REQUIRES(waking_);
  template <typename Put>
  auto while_nobody_is_woken(Put put);

  const int fd_, pagemap_;
  const bool write_protect_, move_;
  SignalFaults* const faults_;
  // Held while threads are woken by unprotecting pages that are not protected. No thread may
  // protect pages, or put protected pages in place, during that.
  core::Mutex waking_;
  // Threads that do so without the lock, before the first such wake.
  std::atomic<unsigned> protecting_{0};
  // One huge page of address space that stays empty, for calls that put nothing in place. 0: not
  // yet reserved.
  uintptr_t nothing_ VMEM_GUARDED_BY(waking_) = 0;
};

}  // namespace vmem::trap
