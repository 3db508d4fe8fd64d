#include "trap/stuck_pages.h"

#include <cerrno>

#include "core/log.h"
#include "core/process/guarded_read.h"
#include "core/step.h"
#include "core/types.h"
#include "trap/os.h"

namespace vmem::trap {

namespace {

int copy_page_out(int fd, int pagemap, Waking& waking, uintptr_t page, uintptr_t to) {
  uint64_t state = 0;
  if (!os::page_states(pagemap, page, 1, &state)) return -EINVAL;
  if ((state & os::kPageGuard) != 0 || (state & os::kPageExists) == 0) return 0;
  int error = waking.protect(page, core::kPage);
  if (error != 0) return error;
  error = core::read_guarded_at_once(reinterpret_cast<void*>(to), reinterpret_cast<void*>(page), core::kPage,
                                     core::Absent::zeros);
  if (error == 0) error = os::drop(page, core::kPage);
  if (error != 0) write_protect_pages(fd, page, core::kPage, false);
  return error;
}

}  // namespace

Outcome copy_out(int fd, int pagemap, Waking& waking, uintptr_t start, size_t size, uintptr_t frame, size_t moved) {
  core::step("trap.take.copied");
  for (size_t done = moved; done < size; done += core::kPage) {
    const Outcome out = move_pages(fd, pagemap, frame + done, start + done, size - done, Holes::keep, kTakeBusyNs);
    done += out.done;
    if (out.error != -EINVAL) return {out.error, done};
    if (const int error = copy_page_out(fd, pagemap, waking, start + done, frame + done); error != 0)
      return {error, done};
  }
  return {0, size};
}

core::Status drop_unsealed(const Range& range) {
  say_sealed();
  if (os::keeps_its_pages(range.address))
    return core::error(EBUSY, "drop: %zu bytes at 0x%zx are sealed and read-only (mseal), and stay in memory",
                       range.size, range.address);
  os::some_pages_stayed = true;
  const int error = drop_what_goes(range.address, range.size);
  return error == 0 ? core::Status() : core::system_error(error, "drop: %zu bytes at 0x%zx", range.size, range.address);
}

bool shut(int fd, int pagemap, uintptr_t start, size_t size) {
  if (drop_what_goes(start, size) != 0) return false;
  os::some_pages_stayed = true;
  return poison_pages(fd, pagemap, start, size).error == 0;
}

void say_sealed() {
  VMEM_LOG_ONCE(core::Level::warning,
                "pages of a region are sealed and read-only (mseal): the kernel neither moves nor drops them, so their "
                "blocks stay in memory until the process ends");
}

}  // namespace vmem::trap
