// Which pages of this process are mapped, counted in /proc/self/pagemap (what its words mean: core/page_map.h).
// Readable by any user for its own process.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/status.h"

namespace vmem::device {

// Counts 4 KiB pages of [address, address + size) that have a page table entry, PROT_NONE ones included. Whole pages.
// Stops at the first when `first_only`. Any thread; blocks only for the process's mmap lock.
core::Status mapped_pages(uintptr_t address, size_t size, bool first_only, uint64_t* count);

}  // namespace vmem::device
