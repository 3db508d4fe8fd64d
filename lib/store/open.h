// Opening files for the store and for regions: direct I/O where it works, and whose block device it is.
#pragma once

#include <string>

#include "core/status.h"
#include "store/io.h"

namespace vmem::store {

// Fills everything of `file` but fd, which is open already, and turns O_DIRECT on when `direct` is wanted and a
// transfer of the first page proves it. scratch: the file is empty and ours, so the proof may write a page and leaves
// the file empty; otherwise the proof only reads. Falls back to buffered I/O with a line in the log, once per file
// system type; on tmpfs silently, where there is nothing to go around. Blocks on I/O.
core::Status probe_direct(const std::string& path, bool direct, bool scratch, OpenedFile* file);

// -EBUSY when the block device behind fd is mounted.
core::Status check_block_device_unmounted(const std::string& path, int fd);
// The same; -EEXIST when it carries a known file system, partition table, volume or swap signature, or when its first
// MiB is not all zeros: overwriting it would destroy somebody's data.
// own: bytes at the start that are the caller's own and not looked at.
core::Status check_block_device_unused(const std::string& path, int fd, size_t own = 0);

// Whether RLIMIT_FSIZE lets a file of ours be so long. Beyond it the kernel also sends SIGXFSZ, which kills.
bool within_size_limit(uint64_t bytes);

// Takes O_NONBLOCK off, which is only there so that opening a FIFO or a device cannot hang.
core::Status make_blocking(const std::string& path, int fd);

// A process that has ended may hold what it had open still: the kernel takes io_uring down in its own time (seen:
// 68 ms). So what is in use is tried again, with a pause before each try: for a second in all.
inline constexpr int kBusyTries = 500;
void pause_while_busy();

// flock; -EBUSY names the path.
core::Status lock_once(const std::string& path, int fd);
// The same; -EBUSY only when that lasts for a second.
core::Status lock_exclusively(const std::string& path, int fd);

// open(2) that claims a block device (O_EXCL), or opens anything else; EBUSY only when that lasts for a second.
int open_claimed(const std::string& path, int flags);

}  // namespace vmem::store
