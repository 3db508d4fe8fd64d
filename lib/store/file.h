// Files that regions map, and what every room needs to know of a descriptor.
#pragma once

#include <string>

#include "core/status.h"
#include "store/io.h"

namespace vmem::store {

// A user's file behind vmem_map. Regular files and block devices; anything else -EINVAL (directory: -EISDIR).
// write: opened read-write with an exclusive flock; a second holder gets -EBUSY naming the file. Otherwise read-only,
// no lock, O_CLOEXEC. direct: O_DIRECT is tried and a read of the first page proves it; else buffered, said once per
// file system type. The tail beyond the last full page of a direct file is read and written through a second, buffered
// descriptor (tail_fd) so that no byte after the end of the file is ever written.
struct MappedFile {
  OpenedFile file;
  int tail_fd = -1;  // buffered; -1 when file is buffered itself
  std::string path;
};
core::Status open_mapped(const std::string& path, bool write, bool direct, MappedFile* out);
void close_mapped(MappedFile* file);
// Bytes in the file now.
core::Status current_size(const MappedFile& file, uint64_t* size);

// How a transfer of [offset, offset + length) splits, in this order: `main` bytes through file.fd, `tail` bytes (less
// than a page) through tail_fd, `beyond` bytes that the file does not have: zeros when read, never written. offset: a
// multiple of 4 KiB. file_size: what current_size said.
struct TailSplit {
  size_t main = 0, tail = 0, beyond = 0;
};
TailSplit split_tail(const MappedFile& file, uint64_t file_size, uint64_t offset, size_t length);

}  // namespace vmem::store
