// Loops around the kernel's page transfers. They finish what the kernel left half done, wait for
// brief obstacles to pass, and tell how far they came. They wake no thread, log nothing and
// allocate nothing.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>

namespace vmem::trap {

// Longest wait for a pinned page. A frame that was just read into may stay pinned briefly after its
// completion: the kernel unpins from a work queue.
inline constexpr uint64_t kFillBusyNs = 20'000'000;
// A pin found while taking a block out is probably a long one (a registered buffer): give up
// sooner.
inline constexpr uint64_t kTakeBusyNs = 1'000'000;
// Longest wait while the kernel keeps returning EAGAIN without progress.
inline constexpr uint64_t kAgainNs = 1'000'000'000;

struct Outcome {
  int error = 0;        // 0 or a negative errno
  size_t done = 0;      // bytes from the start of the range
  bool passed = false;  // some are guard pages of the program: they stay, and nothing is put there
};

// The meaning of an absent page in the source.
enum class Holes : uint8_t {
  populate,  // fill: it reads as zeros, so it becomes a page of zeros
  keep,      // take: it stays absent on both sides
};

// Addresses and sizes are bytes, multiples of 4 KiB. These block only as the constants above say.
// The destination is absent, and no other thread fills it: move_pages() relies on that. pagemap:
// /proc/self/pagemap.
Outcome move_pages(int fd, int pagemap, uintptr_t dst, uintptr_t src, size_t size, Holes holes, uint64_t busy_ns);
Outcome copy_pages(int fd, int pagemap, uintptr_t dst, uintptr_t src, size_t size, bool protect);
Outcome zero_pages(int fd, int pagemap, uintptr_t dst, size_t size);
Outcome poison_pages(int fd, int pagemap, uintptr_t dst, size_t size);
// Moves pages to `dst`, the caller's own address space, whatever their rights; pinned pages move
// too. The caller can usually read and write them there; read_guarded() always can.
Outcome remap_pages(uintptr_t dst, uintptr_t src, size_t size);
// Same, but only for the mapping in which the range begins, or a part of it, and to free address
// space: *dst, which the caller unmaps.
Outcome remap_elsewhere(uintptr_t src, size_t size, uintptr_t* dst);
// Drops the pages of the range, except those that the kernel refuses to drop (os::keeps_its_pages).
int drop_what_goes(uintptr_t start, size_t size);
// True for errors that a filter of system calls returns.
inline bool forbidden(int error) {
  return error == -EPERM || error == -EACCES || error == -ENOSYS;
}
// Returns -EPERM if it is forbidden and nothing has changed.
int write_protect_pages(int fd, uintptr_t start, size_t size, bool on);
// Removes write protection from pages that were moved to a frame. A present page loses it when it
// moves, but one that the kernel has swapped out keeps it. There it would stop the next library
// thread that uses the frame for good, since no thread serves faults of frames.
int let_store(int fd, int pagemap, uintptr_t frame, size_t size);

// Returns the bytes at the start of the range that have moved from `src` to `dst`: pages that are
// absent at `src` and not at `dst`.
size_t moved_already(int pagemap, uintptr_t dst, uintptr_t src, size_t size);
// True if the program has made it a guard page (MADV_GUARD_INSTALL).
bool is_guard(int pagemap, uintptr_t page);

}  // namespace vmem::trap
