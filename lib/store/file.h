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
struct MappedFile {
  OpenedFile file;
  std::string path;
  bool shared = false;              // open for writing
  uint64_t offset = 0, length = 0;  // .. for these bytes
};
core::Status open_mapped(const std::string& path, bool write, bool direct, MappedFile* out, uint64_t offset = 0,
                         uint64_t length = UINT64_MAX);
void close_mapped(MappedFile* file);
// Bytes in the file now.
core::Status current_size(const MappedFile& file, uint64_t* size);

}  // namespace vmem::store
