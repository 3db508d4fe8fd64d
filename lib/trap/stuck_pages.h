// Pages that the kernel does not move or does not drop: in sealed mappings (mseal, Linux 6.10), or
// with rights of their own when the process has no mapping left (vm.max_map_count). No function
// here needs a mapping.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/status.h"
#include "trap/transfer.h"
#include "trap/trap.h"
#include "trap/waking.h"

namespace vmem::trap {

// Takes the pages of [start, start + size), from position `moved` on, to `frame`. Pages that cannot
// be moved are write-protected, copied and dropped one by one. pagemap: /proc/self/pagemap. `done`
// counts from `start`.
Outcome copy_out(int fd, int pagemap, Waking& waking, uintptr_t start, size_t size, uintptr_t frame, size_t moved);

// Drops a range, part of which is sealed and not writable. Returns -EBUSY if its start is such a
// part; nothing is dropped then. Otherwise drops all other pages; a later fill finds the sealed
// ones in place.
core::Status drop_unsealed(const Range& range);

// For a range that can neither be unmapped nor replaced: makes accesses get SIGBUS after threads
// are woken, except for pages that the kernel does not drop. Returns false if that fails.
bool shut(int fd, int pagemap, uintptr_t start, size_t size);

// Logs once that such pages stay in memory.
void say_sealed();

}  // namespace vmem::trap
