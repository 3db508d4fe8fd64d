#include "trap/transfer.h"

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <array>

#include "core/break.h"
#include "core/step.h"
#include "core/types.h"
#include "trap/os.h"

namespace vmem::trap {

namespace {

uint64_t now_ns() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(t.tv_nsec);
}

// Decides if another try is worthwhile. Reads the clock only after an error.
class Patience {
 public:
  explicit Patience(uint64_t busy_ns) : busy_ns_(busy_ns) {}

  void progress() { tries_ = 0; }

  // Waits a little. Returns false if the time for this error is up, or if the error does not pass
  // with time.
  bool again(int error) {
    uint64_t limit;
    if (error == -EAGAIN || error == -EINTR) {
      limit = kAgainNs;
    } else if (error == -EBUSY) {
      limit = busy_ns_;
    } else {
      return false;
    }
    const uint64_t now = now_ns();
    if (tries_++ == 0) since_ = now;
    if (now - since_ >= limit) return false;
    if (tries_ <= kYields) {
      sched_yield();
    } else {
      const timespec pause{0, 50'000};
      nanosleep(&pause, nullptr);
    }
    return true;
  }

 private:
  static constexpr unsigned kYields = 32;
  uint64_t busy_ns_;
  uint64_t since_ = 0;
  unsigned tries_ = 0;
};

// The range may reach from one mapping into the next: the program has called madvise(), mbind(),
// mlock() or mprotect() for a part of it. The kernel accepts only ranges within one mapping.
bool in_two_mappings(int error) {
  return error == -ENOENT || error == -EINVAL;
}

// step(offset, bytes, &done) returns an error or 0.
template <typename Step>
Outcome run(size_t size, uint64_t busy_ns, Step step) {
  Outcome out;
  Patience patience(busy_ns);
  size_t most = size;
  while (out.done < size) {
    size_t done = 0;
    const size_t bytes = std::min(most, size - out.done);
    const int error = step(out.done, bytes, &done);
    out.done += done;
    if (done != 0) {
      // If the error persists, the next step meets it again.
      patience.progress();
      most = size;
      continue;
    }
    if (in_two_mappings(error) && bytes > core::kPage) {
      most = std::max(core::kPage, core::round_down(bytes / 2, core::kPage));
      continue;
    }
    if (error == 0) {
      out.error = -EIO;  // the kernel reports success without progress
      return out;
    }
    if (!patience.again(error)) {
      out.error = error;
      return out;
    }
  }
  return out;
}

}  // namespace

size_t moved_already(int pagemap, uintptr_t dst, uintptr_t src, size_t size) {
  constexpr size_t kBatch = 64;
  std::array<uint64_t, kBatch> there, here;
  for (size_t done = 0; done < size;) {
    const size_t pages = std::min(kBatch, (size - done) / core::kPage);
    if (!os::page_states(pagemap, src + done, pages, there.data())) return done;
    if (!os::page_states(pagemap, dst + done, pages, here.data())) return done;
    for (size_t i = 0; i < pages; ++i, done += core::kPage) {
      if ((there[i] & os::kPageExists) != 0 || (here[i] & os::kPageExists) == 0) return done;
    }
  }
  return size;
}

bool is_guard(int pagemap, uintptr_t page) {
  uint64_t state = 0;
  return os::page_states(pagemap, page, 1, &state) && (state & os::kPageGuard) != 0;
}

Outcome move_pages(int fd, int pagemap, uintptr_t dst, uintptr_t src, size_t size, Holes holes, uint64_t busy_ns) {
  // Do not allow holes at first: over a hole the kernel would make page tables on both sides, and
  // they would split a huge page that comes later.
  uint64_t mode = 0;
  bool populated = false, passed = false;
  Outcome out = run(size, busy_ns, [&](size_t offset, size_t bytes, size_t* done) {
    for (;;) {
      const int error = os::move(fd, dst + offset, src + offset, bytes, mode, done);
      if (*done != 0) return error;
      if (error == -EEXIST) {
        // Linux 6.18 moves several small pages in one step. If it had to repeat the step before, it
        // forgets to count them, tries them again and finds them present (mm/userfaultfd.c,
        // move_pages(): `err` keeps its -EAGAIN).
        *done = moved_already(pagemap, dst + offset, src + offset, bytes);
      }
      if (*done == 0 && (error == -EEXIST || error == -EFAULT) &&
          (is_guard(pagemap, dst + offset) || is_guard(pagemap, src + offset))) {
        passed = true;
        *done = core::kPage;
      }
      if (error != -ENOENT) return error;
      if (holes == Holes::keep && mode == 0) {
        mode = os::kMoveAllowHoles;
      } else if (holes == Holes::populate && !populated) {
        populated = true;
        if (const int trouble = os::advise(src + offset, bytes, os::kMadvPopulateWrite); trouble != 0) return trouble;
      } else {
        return error;
      }
    }
  });
  out.passed = passed;
  return out;
}

namespace {

// The kernel puts nothing over a guard page of the program, or over a page that has stayed and
// cannot change. This continues behind it. put(offset, bytes, &done) returns an error or 0.
template <typename Put>
Outcome put_around_guards(int pagemap, uintptr_t dst, size_t size, Put put) {
  bool passed = false;
  Outcome out = run(size, 0, [&](size_t offset, size_t bytes, size_t* done) {
    const int error = put(offset, bytes, done);
    if (*done != 0 || error != -EEXIST) return error;
    const bool stayed = os::some_pages_stayed.load(std::memory_order_relaxed) && os::keeps_its_pages(dst + offset);
    if (!stayed && !is_guard(pagemap, dst + offset)) return error;
    passed = true;
    *done = core::kPage;
    return 0;
  });
  out.passed = passed;
  return out;
}

}  // namespace

Outcome copy_pages(int fd, int pagemap, uintptr_t dst, uintptr_t src, size_t size, bool protect) {
  // UFFDIO_COPY alone puts pages over guard pages, which ends the guard.
  return put_around_guards(pagemap, dst, size, [&](size_t offset, size_t bytes, size_t* done) {
    bytes = os::before_guard(pagemap, dst + offset, bytes);
    return bytes == 0 ? -EEXIST : os::copy(fd, dst + offset, src + offset, bytes, protect, done);
  });
}

Outcome zero_pages(int fd, int pagemap, uintptr_t dst, size_t size) {
  return put_around_guards(pagemap, dst, size, [&](size_t offset, size_t bytes, size_t* done) {
    return os::zero(fd, dst + offset, bytes, done);
  });
}

Outcome poison_pages(int fd, int pagemap, uintptr_t dst, size_t size) {
  return put_around_guards(pagemap, dst, size, [&](size_t offset, size_t bytes, size_t* done) {
    return os::poison(fd, dst + offset, bytes, done);
  });
}

Outcome remap_pages(uintptr_t dst, uintptr_t src, size_t size) {
  return run(size, 0, [&](size_t offset, size_t bytes, size_t* done) {
    const int error = os::remap(src + offset, bytes, dst + offset);
    if (error == -EFAULT) {  // it reaches into another mapping
      os::keep_room(dst + offset, bytes);
      return -EINVAL;
    }
    if (error != 0) return error;
    os::open_up(dst + offset, bytes);
    *done = bytes;
    return 0;
  });
}

Outcome remap_elsewhere(uintptr_t src, size_t size, uintptr_t* dst) {
  for (size_t bytes = size;; bytes = std::max(core::kPage, core::round_down(bytes / 2, core::kPage))) {
    const int error = os::remap_elsewhere(src, bytes, dst);
    if (error == 0) os::open_up(*dst, bytes);
    if (error == 0) return {0, bytes};
    if (error != -EFAULT || bytes == core::kPage) return {error == -EFAULT ? -EINVAL : error, 0};
  }
}

int drop_what_goes(uintptr_t start, size_t size) {
  return run(size, 0,
             [&](size_t offset, size_t bytes, size_t* done) {
               const int error = os::drop(start + offset, bytes);
               if (error == -EPERM && bytes > core::kPage) return -EINVAL;  // try half of it
               if (error == 0 || error == -EPERM) *done = bytes;
               return error;
             })
      .error;
}

int write_protect_pages(int fd, uintptr_t start, size_t size, bool on) {
  const Outcome out = run(size, 0, [&](size_t offset, size_t bytes, size_t* done) {
    const int error = os::write_protect(fd, start + offset, bytes, on);
    if (error == 0) *done = bytes;
    return error;
  });
  if (!forbidden(out.error)) return out.error;
  return out.done != 0 ? -EIO : -EPERM;
}

int let_store(int fd, int pagemap, uintptr_t frame, size_t size) {
  core::step("trap.take.moved");
  if (core::broken("let_store")) return 0;
  if (os::any_page(pagemap, frame, size, os::kScanPresent | os::kScanSwapped, os::kScanWritten) == 0) return 0;
  return write_protect_pages(fd, frame, size, false);
}

}  // namespace vmem::trap
