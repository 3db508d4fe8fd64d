// Maps over address space that other threads may be accessing. It bypasses libc: ThreadSanitizer
// treats mmap() as a store to every byte, and would report each such access as a race.
#pragma once

#include <errno.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

namespace vmem::core {

// Returns 0 or -errno.
inline int map_over(uintptr_t start, size_t size, int protection, int flags, int fd, uint64_t offset) {
  return syscall(SYS_mmap, start, size, protection, flags | MAP_FIXED, fd, offset) == -1 ? -errno : 0;
}

}  // namespace vmem::core
