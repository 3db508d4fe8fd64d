// Files that regions map.
#pragma once

#include <string>

#include "core/status.h"
#include "store/open.h"

namespace vmem::store {

// A user's file behind vmem_map: a regular file or block device. Anything else is refused with
// -EINVAL (a directory: -EISDIR), and so are files that file_checks.h refuses. It has one O_CLOEXEC
// descriptor. Closing the file drops no POSIX lock of this process: the descriptor stays open while
// there are any.
//
// Parameters of open_mapped():
// - direct: try O_DIRECT and prove it by reading the first page. Otherwise use buffered I/O, logged
//   once for each type of file system.
// - write: open read-write with an exclusive flock. Returns -EBUSY, naming the file, if another
//   process holds the lock for a second. This process may open the file again for other bytes; all
//   share the descriptor and the lock. Overlapping ranges get -EBUSY.
// - lock = false: take no lock, and ignore locks of others.
struct MappedFile {
  OpenedFile file;
  std::string path;
  bool shared = false;              // open for writing
  uint64_t offset = 0, length = 0;  // the bytes, if open for writing
};
// Call in a forked child, which does not own its parent's open files.
void leave_parents_files();
core::Status open_mapped(const std::string& path, bool write, bool direct, MappedFile* out, uint64_t offset = 0,
                         uint64_t length = UINT64_MAX, bool lock = true);
void close_mapped(MappedFile* file);
// Returns true if the file may have holes that find_hole() can find: some blocks are missing, and
// the file system also reports data that is written but not yet on disk (ext2 to ext4, XFS, tmpfs).
// No other file system is trusted.
bool may_have_holes(const MappedFile& file);
// Returns true if a read of [offset, offset + size) would find only zeros now: the range has no
// data and lies within the file. *data is where the next data begins, or the end of the file. A
// concurrent write takes effect before or after this call, as with a read.
bool find_hole(int fd, uint64_t offset, uint64_t size, uint64_t* data);
// Gets the number of bytes in the file now.
core::Status current_size(const MappedFile& file, uint64_t* size);

}  // namespace vmem::store
