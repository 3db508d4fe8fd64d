// Pages that the kernel does not move, or does not drop: of a sealed mapping (mseal, Linux 6.10), or with rights of
// their own where the process may have no mapping more (vm.max_map_count). Nothing here takes a mapping.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/status.h"
#include "trap/transfer.h"
#include "trap/trap.h"
#include "trap/waking.h"

namespace vmem::trap {

// Takes the pages of [start, start + size) from `moved` on to `frame`: those that cannot be moved are copied, one by
// one, and go when stores to them wait. pagemap: /proc/self/pagemap. `done` counts from `start`.
Outcome copy_out(int fd, int pagemap, Waking& waking, uintptr_t start, size_t size, uintptr_t frame, size_t moved);

// Drops a range of which a part is sealed and may not be stored to. -EBUSY: its start is such a part, and nothing has
// been dropped. Else all goes but those pages, which are found there when the range is filled again.
core::Status drop_unsealed(const Range& range);

// Of a range that can neither be unmapped nor have another mapping put over it: accesses get SIGBUS once threads have
// been woken, but to pages that the kernel does not drop. False: they cannot be made to.
bool shut(int fd, int pagemap, uintptr_t start, size_t size);

// Says once that such pages stay in memory.
void say_sealed();

}  // namespace vmem::trap
