// One path of the store: its file, which pages of it are free, and how it grows and shrinks.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "core/mutex.h"
#include "core/status.h"
#include "store/extent_allocator.h"
#include "store/io.h"

namespace vmem::store {

// Lock order: resize_mutex, then the Space's mutex.
struct SpacePath {
  SpacePath() = default;
  SpacePath(const SpacePath&) = delete;
  SpacePath& operator=(const SpacePath&) = delete;
  ~SpacePath();  // takes the file out of the engine, gives a named file its old size back, unlocks, closes

  std::string name;
  OpenedFile file;
  Engine* engine = nullptr;  // set once the file is known there
  FileId id = 0;
  bool named_file = false;      // outlives us: a regular file given by its own name
  uint64_t head_pages = 0;      // before the first block: where a file or device with a name carries the signature
  uint64_t original_pages = 0;  // never shrunk below that
  uint64_t limit_pages = 0;     // of a block device; else what an extent can name

  core::Mutex resize_mutex;                               // one fallocate or ftruncate at a time
  bool preallocate VMEM_GUARDED_BY(resize_mutex) = true;  // fallocate works here

  // Protected by the Space's mutex:
  ExtentAllocator extents;
  uint64_t live_pages = 0;                             // in extents handed out
  bool punch = true;                                   // holes can be punched
  std::chrono::steady_clock::time_point full_until{};  // a write failed, as in a full file system
  bool shrinkable = true;
  core::OwnString trouble;  // why the last growth failed, for messages
};

// "" means $TMPDIR or /var/tmp. -EINVAL for nothing but colons or more than kMaxStorePaths.
core::Status split_paths(const std::string& paths, std::vector<std::string>* out);

// Where the file system has no files without a name: one that loses it at once. -EPERM when it has another by then.
core::Status open_and_unlink(const std::string& directory, int* fd);

// Opens and proves one path and makes it known to the engine. Blocks on I/O.
core::Status open_space_path(const std::string& name, bool direct, Engine& engine, std::unique_ptr<SpacePath>* out);

// Adds room to the file for pages [end, end + pages): allocated on disk where the file system can, so that a full disk
// shows now and not when a block must be written. 0 or an errno. resize_mutex held, the Space's mutex not.
int extend_file(SpacePath& path, uint64_t end, uint64_t pages) VMEM_REQUIRES(path.resize_mutex);
// Cuts the file to `pages`. Same locks.
int shrink_file(SpacePath& path, uint64_t pages) VMEM_REQUIRES(path.resize_mutex);
// Gives the disk space of a range back. 0 or an errno.
int punch_hole(SpacePath& path, uint64_t first, uint64_t pages);

}  // namespace vmem::store
