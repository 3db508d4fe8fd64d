#include "trap/taking.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>

#include "core/break.h"
#include "core/log.h"
#include "core/process/guarded_read.h"
#include "core/step.h"
#include "core/types.h"
#include "trap/mapping.h"
#include "trap/os.h"
#include "trap/stuck_pages.h"

namespace vmem::trap {

using core::Status;

namespace {

// Bytes of each half of aside_: one for huge pages, and one for small pages, which leave page
// tables behind.
constexpr size_t kAside = size_t{64} << 20;

void say_forbidden() {
  VMEM_LOG_ONCE(core::Level::error,
                "UFFDIO_MOVE is refused. Was ioctl forbidden after libvmem had started? Pinned pages are no longer "
                "noticed: hold a VMEM_HOST lease over memory that direct I/O uses");
}

}  // namespace

Taking::~Taking() {
  if (aside_ != 0) munmap(reinterpret_cast<void*>(aside_), 2 * kAside);
}

// Moves the rest of the range. The frame to take into is empty, but mlockall() populates empty
// memory. That may show only behind guard pages.
void Taking::move_rest(uintptr_t start, size_t size, uintptr_t frame, PinWait wait, Outcome* out) {
  const uint64_t busy_ns = wait == PinWait::brief ? kTakeBusyNs : 0;
  for (bool emptied = false;; emptied = true) {
    const size_t done = out->done;
    const Outcome more = move_pages(fd_, pagemap_, frame + done, start + done, size - done, Holes::keep, busy_ns);
    *out = {more.error, done + more.done, out->passed || more.passed};
    if (out->error != -EEXIST || emptied || os::drop(frame + out->done, size - out->done) != 0) return;
  }
}

// The rest begins with a mapping whose rights the program has changed, and the kernel moves no
// pages between mappings with different rights. The pages are remapped to free address space and
// copied from there. That does not notice pins, so only pages that need it go this way.
void Taking::carry_some(uintptr_t start, size_t size, uintptr_t frame, Outcome* out, bool* sealed) {
  const uintptr_t from = start + out->done, to = frame + out->done;
  const size_t rest = size - out->done;
  const auto copied = [&](size_t done) {
    const Outcome all = copy_out(fd_, pagemap_, waking_, start, size, frame, done);
    *out = {all.error, all.done, out->passed || all.passed};
  };
  uintptr_t space = 0;
  const Outcome carried = remap_elsewhere(from, rest, &space);
  *sealed = carried.error == -EPERM;
  if (*sealed) say_sealed();
  const int lost =
      core::read_guarded_untrapped(reinterpret_cast<void*>(to), reinterpret_cast<void*>(space), carried.done);
  for (size_t page = 0; page < carried.done; page += core::kPage) {  // guard pages have left with the others
    if (is_guard(pagemap_, space + page)) os::advise(from + page, core::kPage, os::kMadvGuardInstall);
  }
  if (carried.done != 0) munmap(reinterpret_cast<void*>(space), carried.done);
  if (carried.error == -ENOMEM) return copied(out->done);
  out->done += carried.done;
  out->error = lost != 0 ? -ENOTRECOVERABLE : carried.error;
}

Status Taking::by_remap(uintptr_t start, size_t size, uintptr_t frame, CoreDump dump) const {
  const int error = by_remap_ ? remap_pages(frame, start, size).error : -EOPNOTSUPP;
  // The frame inherited the range's dump setting, and will serve other regions.
  if (error == 0 && dump == CoreDump::yes) os::advise(frame, size, MADV_DONTDUMP);
  if (error == 0) return {};
  return core::system_error(error, "take: cannot remap %zu bytes at 0x%zx to 0x%zx", size, start, frame);
}

Status Taking::take(uintptr_t start, size_t size, uintptr_t frame, CoreDump dump, PinWait wait) {
  bool sealed = false;
  return take_unless_sealed(start, size, frame, dump, wait, &sealed);
}

Status Taking::take_unless_sealed(uintptr_t start, size_t size, uintptr_t frame, CoreDump dump, PinWait wait,
                                  bool* sealed) {
  if (!move_) return by_remap(start, size, frame, dump);
  Outcome out;
  move_rest(start, size, frame, wait, &out);
  while (out.error == -EINVAL) {
    carry_some(start, size, frame, &out, sealed);
    if (out.error != 0 || out.done == size) break;
    move_rest(start, size, frame, wait, &out);
  }
  if (out.error == -EINVAL) out.error = -EBUSY;  // the program set these rights, and may change them
  if (out.error == 0 && write_protect_) out.error = let_store(fd_, pagemap_, frame, size);
  if (out.error == 0) return {};
  if (out.error == -ENOTRECOVERABLE)
    return core::error(ENOTRECOVERABLE, "take: a part of the range at 0x%zx has no rights and cannot be read", start);
  core::step("trap.take.undo");
  if (out.done != 0) {
    const Outcome back = move_pages(fd_, pagemap_, start, frame, out.done, Holes::keep, kFillBusyNs);
    const size_t left = out.done - back.done;
    // A guard page kept bytes out, which are stale now.
    if (back.error == 0 && back.passed) os::drop(frame, out.done);
    // Copying back needs memory, but nothing else that moving needs.
    if (back.error != 0 && copy_pages(fd_, pagemap_, start + back.done, frame + back.done, left, false).error == 0) {
      os::drop(frame + back.done, left);
    } else if (back.error != 0) {
      return core::error(
          ENOTRECOVERABLE,
          "take: %zu bytes of the range at 0x%zx are in the frame at 0x%zx and cannot go back (errno %d after "
          "errno %d)",
          left, start + back.done, frame + back.done, -back.error, -out.error);
    }
  }
  waking_.wake(start, size);
  return core::system_error(out.error, "take: %zu of %zu bytes at 0x%zx%s", out.done, size, start,
                            out.error == -EBUSY    ? " (a page is pinned: by I/O in flight or a registered buffer)"
                            : out.error == -EEXIST ? " (the frame is not empty)"
                                                   : "");
}

Status Taking::take_anyhow(uintptr_t start, size_t size, uintptr_t frame, CoreDump dump, PinWait wait) {
  bool sealed = false;
  Status s = take_unless_sealed(start, size, frame, dump, wait, &sealed);
  if (!forbidden(s.code()) || !move_ || sealed) return s;
  say_forbidden();
  return by_remap(start, size, frame, dump);
}

int Taking::have_aside() {
  if (aside_ != 0) return 0;
  uintptr_t start = 0;
  if (Status s = reserve_space(2 * kAside, core::kHugePage, &start); !s.ok()) return s.code();
  if (Status s = arm(fd_, start, 2 * kAside, os::kRegisterWp, HugePages::no); !s.ok()) {
    munmap(reinterpret_cast<void*>(start), 2 * kAside);
    return s.code();
  }
  aside_ = start;
  return 0;
}

void Taking::prepare() {
  const core::MutexLock lock(dropping_);
  if (move_) have_aside();
}

Status Taking::drop(uintptr_t start, size_t size) {
  int error = 0;
  for (size_t done = 0; done < size && move_ && !core::broken("pins");) {
    const size_t bytes = std::min(kAside, size - done);
    const bool huge = (start | done | bytes) % core::kHugePage == 0;
    const core::MutexLock lock(dropping_);
    error = have_aside();
    const uintptr_t to = aside_ + (huge ? 0 : kAside);
    bool sealed = false;
    Status s = error != 0 ? core::system_error(error, "drop: no address space")
                          : take_unless_sealed(start + done, bytes, to, CoreDump::no, PinWait::brief, &sealed);
    if (sealed) s = drop_unsealed({start + done, bytes});
    if (!sealed && forbidden(s.code())) {
      say_forbidden();
      break;
    }
    // Drop a part that could not be read or put back with the rest.
    if (s.code() == -ENOTRECOVERABLE) os::drop(start + done, bytes);
    if (s.ok() || s.code() == -ENOTRECOVERABLE) {
      os::drop(to, bytes);
      done += bytes;
      if (done == size) return {};
      continue;
    }
    if (s.code() == -EBUSY) return s;
    return core::error(EBUSY, "%.*s", static_cast<int>(s.text().size()), s.text().data());
  }
  error = os::drop(start, size);
  if (error == -EPERM) return drop_unsealed({start, size});
  return error == 0 ? Status() : core::system_error(error, "drop: %zu bytes at 0x%zx", size, start);
}

}  // namespace vmem::trap
