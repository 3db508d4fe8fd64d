// Waking the threads that wait for a page, also where the program has forbidden UFFDIO_WAKE after the start; and
// putting write protection on pages, which that must not undo.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/mutex.h"
#include "trap/transfer.h"
#include "trap/trap.h"

namespace vmem::trap {

// Any thread. Addresses and sizes are multiples of 4 KiB. Errors are 0 or a negative errno.
class Waking {
 public:
  Waking(int fd, int pagemap, const Caps& caps)
      : fd_(fd), pagemap_(pagemap), write_protect_(caps.write_protect), move_(caps.move) {}
  ~Waking();
  Waking(const Waking&) = delete;
  Waking& operator=(const Waking&) = delete;

  // Whoever waits for a page of the range looks again. An error: perhaps not all of them do.
  int wake(uintptr_t start, size_t size);
  // .. of a range over which an empty file has been mapped (replace_with_sigbus).
  int wake_where_nothing_is(uintptr_t start, size_t size);
  // The same where all pages are there, and stores to them need not be heard of: takes write protection from them, too,
  // without a call for that. A page that is absent may be seen as zeros. -EPERM: nothing has changed.
  int let_go_on(uintptr_t start, size_t size);
  int protect(uintptr_t start, size_t size);
  // copy_pages()
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
  // Nobody protects pages, nor puts protected ones in place, while threads are woken by taking protection from pages
  // that have none.
  core::Mutex waking_;
  std::atomic<unsigned> protecting_{0};  // threads that do, without the lock: as long as nobody is woken so
  // Address space of one huge page in which nothing ever is, for calls that put nothing in place; 0: not yet.
  uintptr_t nothing_ VMEM_GUARDED_BY(waking_) = 0;
};

}  // namespace vmem::trap
