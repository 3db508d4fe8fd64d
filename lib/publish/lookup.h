// Looks up names in folders of other users so that those users cannot block us.
//
// A user's file system (FUSE) may delay its answers for ever, and a thread that waits for one
// cannot be killed. Also, a lookup of a missing name takes the folder's lock. A user can hold that
// lock for ever by listing the folder into memory of such a file system. So folders and their
// entries are opened as places only (O_PATH), from the kernel's caches, which asks no file system.
// They are used once their mount is known.
#pragma once

#include <string>

#include "core/status.h"
#include "publish/fd.h"

namespace vmem::publish {

// Opens a folder as a place, or `name` in a folder without following a link. Returns -EXDEV on a
// file system that a user's program serves.
core::Status open_folder_place(const std::string& path, Fd* out);
core::Status open_folder_place(int folder, const std::string& name, Fd* out);

// Opens a name in an open folder as a place. Returns -EXDEV if another file system is mounted
// there.
core::Status open_entry_place(int folder, const std::string& name, Fd* out);

// Splits a path into its folder and its last name.
struct Path {
  explicit Path(std::string path);
  std::string folder, name;
};

}  // namespace vmem::publish
