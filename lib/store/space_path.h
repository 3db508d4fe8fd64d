// One path of the store: its file, its free pages, and how it grows and shrinks.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "core/mutex.h"
#include "core/status.h"
#include "store/engine.h"
#include "store/extent_allocator.h"
#include "store/open.h"

namespace vmem::store {

// Lock order: resize_mutex, then the Space's mutex.
struct SpacePath {
  SpacePath() = default;
  SpacePath(const SpacePath&) = delete;
  SpacePath& operator=(const SpacePath&) = delete;
  ~SpacePath();  // removes the file from the engine, restores a named file's size, unlocks, closes

  std::string name;
  OpenedFile file;
  Engine* engine = nullptr;  // set once the engine knows the file
  FileId id = 0;
  bool named_file = false;      // outlives us: a regular file given by its own name
  uint64_t head_pages = 0;      // before the first block, for the signature of a named file or device
  uint64_t original_pages = 0;  // never shrunk below that
  uint64_t limit_pages = 0;     // a block device's size, otherwise the most that an extent can address

  core::Mutex resize_mutex;                               // serializes fallocate and ftruncate
  bool preallocate VMEM_GUARDED_BY(resize_mutex) = true;  // fallocate works here

  // Protected by the Space's mutex:
  ExtentAllocator extents;
  uint64_t live_pages = 0;                             // in extents handed out
  bool punch = true;                                   // holes can be punched
  std::chrono::steady_clock::time_point full_until{};  // set when a write failed, as in a full file system
  bool shrinkable = true;
  core::OwnString trouble;  // why the last growth failed, for messages
};

// Splits a path list. "" means $TMPDIR or /var/tmp. Returns -EINVAL for only colons, or for more
// than kMaxStorePaths.
core::Status split_paths(const std::string& paths, std::vector<std::string>* out);

// For file systems without O_TMPFILE: creates a file and unlinks it at once. Returns -EPERM if it
// has another name by then.
core::Status open_and_unlink(const std::string& directory, int* fd);

// Opens and tests one path and registers it with the engine. Blocks on I/O.
core::Status open_space_path(const std::string& name, bool direct, Engine& engine, std::unique_ptr<SpacePath>* out);

// Extends the file by pages [end, end + pages). Allocates them on disk if the file system can, so
// that a full disk shows now and not when a block must be written. Returns 0 or an errno. Call with
// resize_mutex held and without the Space's mutex.
int extend_file(SpacePath& path, uint64_t end, uint64_t pages) VMEM_REQUIRES(path.resize_mutex);
// Truncates the file to `pages`. Same locks.
int shrink_file(SpacePath& path, uint64_t pages) VMEM_REQUIRES(path.resize_mutex);
// Frees the disk space of a range. Returns 0 or an errno.
int punch_hole(SpacePath& path, uint64_t first, uint64_t pages);

}  // namespace vmem::store
