// Checks a file before it is mapped. A file that a region could not serve correctly later is
// refused at once, with the reason and what to do.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <string>

#include "core/status.h"

namespace vmem::store {

// The use that a caller makes of a file.
struct FileUse {
  bool write = false;
  uint64_t end = 0;  // end of the range; 0: to the end of the file
};

// Refuses pseudo file systems, untrue sizes, seals, huge pages, swap files, and a range that the
// file can never have. Blocks on I/O: may read a byte.
core::Status check_mappable(const std::string& path, int fd, const struct stat& st, const FileUse& use);

// Makes the error of an open(2) that failed with `error`, with the reason if it can be found.
core::Status cannot_open(const std::string& path, const struct stat& st, bool write, int error);

// Makes the -EBUSY for a refused flock, naming the lock in the way and its holder.
core::Status lock_refused(const std::string& path, const struct stat& st);

// Returns true if this process holds a POSIX lock (fcntl with F_SETLK) on the file, or if it may:
// other processes hold some and /proc does not tell. fd: any descriptor of the file. May throw
// bad_alloc.
bool has_own_posix_lock(int fd, const struct stat& st);

// Returns true for a file in memory that can still be sealed against writing (memfd_create with
// MFD_ALLOW_SEALING).
bool may_be_sealed(int fd);

}  // namespace vmem::store
