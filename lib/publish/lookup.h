// Names in folders that belong to somebody else, looked up so that he cannot hold us up.
//
// A user's own file system (FUSE) answers what is asked of it when it likes; who waits for that cannot even be killed.
// And a folder's lock, which a look at a name that is not there takes, can be kept for good by who lists the folder
// into memory of such a file system. So a folder and what is in it are opened as places only (O_PATH), which asks no
// file system, from what the kernel knows already, and are used once it is known on which mount they are.
#pragma once

#include <string>

#include "core/status.h"
#include "publish/place.h"

namespace vmem::publish {

// A folder as a place, and `name` in it; no link is followed at the end. -EXDEV: on a file system that a program of a
// user's answers for.
core::Status open_folder_place(const std::string& path, Fd* out);
core::Status open_folder_place(int folder, const std::string& name, Fd* out);

// A name in an open folder as a place: -EXDEV where something is mounted there.
core::Status open_entry_place(int folder, const std::string& name, Fd* out);

// The path and the last name of a path.
struct Path {
  explicit Path(std::string path);
  std::string folder, name;
};

}  // namespace vmem::publish
