#include "trap/waking.h"

#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "core/fatal.h"
#include "core/log.h"
#include "core/step.h"
#include "core/types.h"
#include "trap/mapping.h"
#include "trap/os.h"

namespace vmem::trap {

Waking::~Waking() {
  const core::MutexLock lock(waking_);
  if (nothing_ != 0) munmap(reinterpret_cast<void*>(nothing_), core::kHugePage);
}

int Waking::wake(uintptr_t start, size_t size) {
  if (faults_ != nullptr) {
    faults_->wake(start, size);
    return 0;
  }
  const int error = os::wake(fd_, start, size);
  if (error == 0 || error == -EINVAL) return error;  // EINVAL: not addresses of a program
  if (os::dont_wake.exchange(0) != 0) {
    core::log(core::Level::error,
              "UFFDIO_WAKE is refused: %s (errno %d). Was ioctl forbidden after libvmem had started? Transfers wake "
              "threads from now on, which is slower",
              strerrordesc_np(-error), -error);
  }
  if (wake_without_a_call(start, size) == 0) return 0;
  if (wake_by_moving_nothing(start, size) == 0) return 0;
  return forbidden(error) ? -EPERM : error;
}

// Finds the first protected page of the range, or its end.
int Waking::first_protected(uintptr_t start, size_t size, uintptr_t* first) const {
  *first = start + size;
  const int any = os::any_page(pagemap_, start, size, os::kScanPresent | os::kScanSwapped, os::kScanWritten, first);
  if (any != -ENOTTY) return std::min(any, 0);
  std::array<uint64_t, 512> pages;  // before Linux 6.7
  for (uintptr_t at = start; at < start + size; at += pages.size() * core::kPage) {
    const size_t count = std::min(pages.size(), (start + size - at) / core::kPage);
    if (!os::page_states(pagemap_, at, count, pages.data())) return -EIO;
    for (size_t i = 0; i < count; ++i) {
      if ((pages[i] & core::kPageProtected) == 0) continue;
      *first = at + i * core::kPage;
      return 0;
    }
  }
  return 0;
}

// Removing write protection wakes the threads that wait for the pages. Only pages without
// protection are used, so nothing changes.
int Waking::wake_without_a_call(uintptr_t start, size_t size) {
  if (!write_protect_) return -EOPNOTSUPP;
  const core::MutexLock lock(waking_);
  while (protecting_.load() != 0) sched_yield();
  for (uintptr_t at = start, end = start + size; at < end;) {
    uintptr_t first = end;
    if (const int error = first_protected(at, end - at, &first); error != 0) return error;
    core::step("trap.wake.looked");
    if (first != at) {
      if (const int error = write_protect_pages(fd_, at, first - at, false); error != 0) return error;
    }
    at = first + core::kPage;
  }
  return 0;
}

int Waking::have_nothing() {
  if (nothing_ != 0) return 0;
  uintptr_t start = 0;
  if (!reserve_space(core::kHugePage, core::kHugePage, &start).ok()) return -ENOMEM;
  if (!arm(fd_, start, core::kHugePage, 0, HugePages::no).ok()) {
    munmap(reinterpret_cast<void*>(start), core::kHugePage);
    return -ENOMEM;
  }
  nothing_ = start;
  return 0;
}

// Moving an absent page to an absent place changes nothing, and wakes. Returns -EEXIST if some
// pages are present.
int Waking::wake_by_moving_nothing(uintptr_t start, size_t size) {
  constexpr size_t kMost = size_t{64} << 20;  // more would create too many page tables
  if (!move_ || size > kMost) return -EOPNOTSUPP;
  const core::MutexLock lock(waking_);
  if (const int error = have_nothing(); error != 0) return error;
  constexpr unsigned kTries = 1000;
  int there = 0;
  unsigned tries = 0;
  for (uintptr_t at = start; at < start + size;) {
    size_t done = 0;
    const size_t bytes = std::min(core::kHugePage, start + size - at);
    const int error = os::move(fd_, at, nothing_, bytes, os::kMoveAllowHoles, &done);
    at += done;
    if (error == 0 || done != 0) continue;
    if ((error == -EAGAIN || error == -EBUSY) && ++tries < kTries) {
      sched_yield();
    } else if (error == -EEXIST) {
      there = error;
      at += core::kPage;
    } else {
      return error;
    }
  }
  return there;
}

// Unregistering a mapping wakes its waiters. The empty file has no pages that could show before.
int Waking::wake_where_nothing_is(uintptr_t start, size_t size) {
  if (faults_ != nullptr) return wake(start, size);
  const int error = os::wake(fd_, start, size);
  if (error == 0 || error == -EINVAL) return error;
  const int made = os::enroll(fd_, start, size, os::kRegisterMissing);
  return made != 0 ? made : os::dismiss(fd_, start, size);
}

int Waking::let_go_on(uintptr_t start, size_t size) {
  constexpr unsigned kTries = 1000;
  const uint64_t mode = os::kRegisterMissing | (write_protect_ ? os::kRegisterWp : 0);
  {
    // Try both calls elsewhere first: if they are forbidden, do not begin.
    const core::MutexLock lock(waking_);
    if (have_nothing() != 0 || os::enroll(fd_, nothing_, core::kPage, mode) != 0 ||
        os::dismiss(fd_, nothing_, core::kPage) != 0)
      return -EPERM;
  }
  const int dismissed = os::dismiss(fd_, start, size);
  core::step("trap.let_go_on");
  int error = os::enroll(fd_, start, size, mode);
  for (unsigned tries = 1; error != 0 && tries < kTries; ++tries) {
    usleep(1000);
    error = os::enroll(fd_, start, size, mode);
  }
  if (error != 0) {
    core::fatal(
        "%zu bytes at 0x%zx cannot be registered with userfaultfd again: %s. The process would see zeros in "
        "place of its data",
        size, start, strerrordesc_np(-error));
  }
  if (dismissed == 0) woken(start, size);
  return dismissed == 0 ? 0 : -EPERM;
}

// Runs put(), which leaves pages protected, while no thread is woken by wake_without_a_call().
template <typename Put>
auto Waking::while_nobody_is_woken(Put put) {
  ++protecting_;
  if (os::dont_wake.load() != 0) {
    auto out = put();
    --protecting_;
    return out;
  }
  --protecting_;
  const core::MutexLock lock(waking_);
  return put();
}

int Waking::protect(uintptr_t start, size_t size) {
  return while_nobody_is_woken([&] { return write_protect_pages(fd_, start, size, true); });
}

Outcome Waking::copy_in(uintptr_t start, uintptr_t frame, size_t size, Protect protect) {
  if (protect == Protect::no) return copy_pages(fd_, pagemap_, start, frame, size, false);
  return while_nobody_is_woken([&] { return copy_pages(fd_, pagemap_, start, frame, size, true); });
}

}  // namespace vmem::trap
