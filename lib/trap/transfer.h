// Loops around the kernel's page transfers: they finish what the kernel left half done, wait out its short-lived
// troubles and tell how far they came. Nothing here wakes a thread, logs or allocates.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>

namespace vmem::trap {

// Longest wait for a page that somebody pins. A frame that was just read into may stay pinned for a moment after the
// completion was seen: the kernel unpins from a work queue.
inline constexpr uint64_t kFillBusyNs = 20'000'000;
// A pin found while taking a block out is more likely a long one (a registered buffer): give up sooner.
inline constexpr uint64_t kTakeBusyNs = 1'000'000;
// Longest wait when the kernel keeps answering "again" without progress.
inline constexpr uint64_t kAgainNs = 1'000'000'000;

struct Outcome {
  int error = 0;        // 0 or a negative errno
  size_t done = 0;      // bytes from the start of the range
  bool passed = false;  // some of them the program has made guard pages: they stay, and nothing is put there
};

// What an absent page of the source means.
enum class Holes : uint8_t {
  populate,  // fill: it reads as zeros, so it becomes a page of zeros
  keep,      // take: it stays absent on both sides
};

// Addresses and size in bytes, multiples of 4 KiB. Both blocking only as the constants above say.
// The destination is absent and nobody else fills it: move_pages() relies on that. pagemap: /proc/self/pagemap.
Outcome move_pages(int fd, int pagemap, uintptr_t dst, uintptr_t src, size_t size, Holes holes, uint64_t busy_ns);
Outcome copy_pages(int fd, int pagemap, uintptr_t dst, uintptr_t src, size_t size, bool protect);
Outcome zero_pages(int fd, int pagemap, uintptr_t dst, size_t size);
Outcome poison_pages(int fd, int pagemap, uintptr_t dst, size_t size);
// Takes pages away, whatever the program may do with them, to `dst`: space of the caller's own, which it may read and
// store to afterwards, as a rule; read_guarded() can in any case. One that is pinned is moved all the same.
Outcome remap_pages(uintptr_t dst, uintptr_t src, size_t size);
// The same of the mapping that the range begins in alone, or of a part of it, to where the kernel finds room: *dst,
// which the caller unmaps.
Outcome remap_elsewhere(uintptr_t src, size_t size, uintptr_t* dst);
// Drops the pages of the range but those that the kernel refuses to drop (os::keeps_its_pages).
int drop_what_goes(uintptr_t start, size_t size);
// What a filter of system calls answers.
inline bool forbidden(int error) {
  return error == -EPERM || error == -EACCES || error == -ENOSYS;
}
// -EPERM: it is forbidden, nothing has changed.
int write_protect_pages(int fd, uintptr_t start, size_t size, bool on);
// A page that is present loses its write protection when it moves, one that the kernel has swapped out takes it along.
// In a frame it would stop the thread of ours that uses the frame next, for good: nobody answers for frames.
int let_store(int fd, int pagemap, uintptr_t frame, size_t size);

// Bytes at the start of the range that have left `src` and are at `dst`: pages absent there and not absent here.
size_t moved_already(int pagemap, uintptr_t dst, uintptr_t src, size_t size);
// The program has made the page a guard page (MADV_GUARD_INSTALL).
bool is_guard(int pagemap, uintptr_t page);

}  // namespace vmem::trap
