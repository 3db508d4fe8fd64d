// Opens files for the store and for regions: direct I/O where it works, and checks of block
// devices.
#pragma once

#include <cstdint>
#include <string>

#include "core/status.h"

namespace vmem::store {

// A file opened for direct I/O if the file system allows it, otherwise buffered.
struct OpenedFile {
  int fd = -1;
  bool direct = false;
  bool block_device = false;
  uint64_t size = 0;               // bytes, when opened
  uint64_t device = 0, inode = 0;  // 0: unknown
  uint32_t memory_align = 1;       // of buffers
  uint32_t offset_align = 1;       // of offsets and sizes
};

// Fills in `file`, whose fd is open already. If `direct`, turns O_DIRECT on and proves it by a
// transfer of the first page. scratch: the file is empty and ours, so the test may write a page and
// leaves the file empty; otherwise it only reads. Falls back to buffered I/O, logged once for each
// type of file system, and silently on tmpfs, which has no page cache to bypass. Blocks on I/O.
core::Status probe_direct(const std::string& path, bool direct, bool scratch, OpenedFile* file);

// Returns -EBUSY if the block device behind fd is mounted.
core::Status check_block_device_unmounted(const std::string& path, int fd);
// Same. Also returns -EEXIST if the device carries a known file system, partition table, volume or
// swap signature, or if its first MiB is not all zeros. Overwriting such a device would destroy
// data. own: bytes at the start that belong to the caller and are not checked.
core::Status check_block_device_unused(const std::string& path, int fd, size_t own = 0);

// Returns true if RLIMIT_FSIZE allows a file of this size. Beyond the limit the kernel sends
// SIGXFSZ, which kills.
bool within_size_limit(uint64_t bytes);

// Clears O_NONBLOCK, which is only set so that opening a FIFO or a device cannot hang.
core::Status make_blocking(const std::string& path, int fd);

// A process that has ended may still hold its files: the kernel takes io_uring down later. So a
// busy file is tried again, with a pause before each try, for about a second.
inline constexpr int kBusyTries = 500;
void pause_while_busy();

// Takes a flock. Returns -EBUSY, naming the path, if it is held.
core::Status lock_once(const std::string& path, int fd);
// Same, but returns -EBUSY only after a second of tries.
core::Status lock_exclusively(const std::string& path, int fd);

// Calls open(2); with O_EXCL that claims a block device. Fails with EBUSY only after a second of
// tries.
int open_claimed(const std::string& path, int flags);

}  // namespace vmem::store
