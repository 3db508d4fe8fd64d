// Checks of a file that is to be mapped. What a region could not serve right later is refused when it is asked for,
// with the reason and what to do.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <string>

#include "core/status.h"

namespace vmem::store {

// What a caller wants of a file.
struct FileUse {
  bool write = false;
  uint64_t end = 0;  // the first byte behind the range; 0: as far as the file goes
};

// What an open file is, and what it refuses: pseudo file systems and sizes that are not true, seals, huge pages, swap
// files, a range that it can never have. Blocks on I/O: may read a byte.
core::Status check_mappable(const std::string& path, int fd, const struct stat& st, const FileUse& use);

// The error of an open(2) that failed with `error`, with the reason where one can be found.
core::Status cannot_open(const std::string& path, const struct stat& st, bool write, int error);

// -EBUSY for a flock that was not to be had: names the lock that is in the way, and who holds it.
core::Status lock_refused(const std::string& path, const struct stat& st);

// This process holds a POSIX lock (fcntl with F_SETLK) on the file, or may: other processes do, and /proc does not say.
// fd: any of the file. It may throw for want of memory.
bool has_own_posix_lock(int fd, const struct stat& st);

// True for a file in memory that somebody may yet seal against writing (memfd_create with MFD_ALLOW_SEALING).
bool may_be_sealed(int fd);

}  // namespace vmem::store
