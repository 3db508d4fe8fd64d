// Files that regions map, and what every room needs to know of a descriptor.
#pragma once

#include <string>

#include "core/status.h"
#include "store/io.h"

namespace vmem::store {

// A user's file behind vmem_map. Regular files and block devices; anything else -EINVAL (directory: -EISDIR). One
// descriptor, O_CLOEXEC. direct: O_DIRECT is tried and a read of the first page proves it; else buffered, said once per
// file system type.
// write: opened read-write with an exclusive flock; -EBUSY, naming the file, when somebody else holds it for a second.
// This process may open it again for other bytes: all share the descriptor and the lock. Ranges that overlap: -EBUSY.
// lock: false: without a lock, and whoever holds one. Closing the file drops no POSIX lock of this process: its
// descriptor stays open while there are some.
// Files that file_checks.h refuses are refused.
struct MappedFile {
  OpenedFile file;
  std::string path;
  bool shared = false;              // open for writing
  uint64_t offset = 0, length = 0;  // .. for these bytes
};
// In a forked child: what its parent has open is not the child's.
void leave_parents_files();
core::Status open_mapped(const std::string& path, bool write, bool direct, MappedFile* out, uint64_t offset = 0,
                         uint64_t length = UINT64_MAX, bool lock = true);
void close_mapped(MappedFile* file);
// True when the file may have holes that find_hole() can tell: blocks are missing, and the file system is one whose
// answers count what has been written and not yet stored (ext2 to ext4, XFS, tmpfs). No other is believed.
bool may_have_holes(const MappedFile& file);
// True when a read of [offset, offset + size) would find zeros at this moment: the file reaches to the end of it and
// has no data there; *data is where the next data begin, or the file ends. Who writes at the same time comes before it
// or after it, as with a read.
bool find_hole(int fd, uint64_t offset, uint64_t size, uint64_t* data);
// Bytes in the file now.
core::Status current_size(const MappedFile& file, uint64_t* size);

}  // namespace vmem::store
