// Counts mapped pages of this process in /proc/self/pagemap, which every user can read for their
// own process (core/process/page_map.h has the meaning of its words).
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/status.h"

namespace vmem::device {

// Counts the 4 KiB pages of [address, address + size) that have a page table entry, PROT_NONE ones
// included. Whole pages. Stops at the first if `first_only`. Any thread; blocks only for the
// process's mmap lock.
core::Status mapped_pages(uintptr_t address, size_t size, bool first_only, uint64_t* count);

}  // namespace vmem::device
