// Files that regions map, and what every room needs to know of a descriptor.
#pragma once

#include <string>

#include "core/status.h"
#include "store/io.h"

namespace vmem::store {

// A user's file behind vmem_map. Regular files and block devices; anything else -EINVAL (directory: -EISDIR).
// write: opened read-write with an exclusive flock; a second holder gets -EBUSY naming the file. Otherwise read-only,
// no lock, O_CLOEXEC. direct: O_DIRECT is tried and a read of the first page proves it; else buffered, said once per
// file system type.
struct MappedFile {
  OpenedFile file;
  std::string path;
};
core::Status open_mapped(const std::string& path, bool write, bool direct, MappedFile* out);
void close_mapped(MappedFile* file);
// Bytes in the file now.
core::Status current_size(const MappedFile& file, uint64_t* size);

}  // namespace vmem::store
