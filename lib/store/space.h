// Space on the SSD for blocks of anonymous regions: paths, extents, budget.
#pragma once

#include <chrono>
#include <memory>
#include <span>
#include <string>

#include "core/status.h"
#include "core/types.h"
#include "store/engine.h"

namespace vmem::store {

struct SpaceOptions {
  std::string paths;  // colon-separated; "": $TMPDIR or /var/tmp
  uint64_t budget = UINT64_MAX;
  bool direct = true;
  // Freed space goes back to the file system after this long without an allocation, or twelve times
  // this while allocations go on. Space that was written before takes writes faster than new space,
  // and freed space is often needed again. A file that cannot grow is trimmed at once.
  std::chrono::milliseconds trim_delay{5000};
  // A path that was full, or to which a write failed, is tried again after this time; it may work
  // again.
  std::chrono::milliseconds full_delay{1000};
};

// Thread-safe. Extents are multiples of 4 KiB up to 64 MiB + 4 KiB, taken from the paths in turn,
// from freed ones first. Freed extents are reused. After a while, long free runs go back to the
// file system (hole punching; truncation at the end).
//
// - A directory gets an unlinked O_TMPFILE (or an unlinked temporary) that grows as needed.
// - A regular file or block device begins with a signature; blocks follow. A file is created
//   (O_EXCL, 0600) or grows. A device is used up to its size.
// - An existing file must be our own user's, without permissions for others, with one name and no
//   symbolic link (-EPERM, -ELOOP).
// - It must also be empty, or preallocated and never written, or carry the signature of a store
//   that was killed, which is emptied. Otherwise -EEXIST.
// - A device must carry our signature or zeros in its first MiB, and must not be mounted.
// - If two processes are given one file or device, the second gets -EBUSY (flock, O_EXCL).
class Space {
 public:
  virtual ~Space() = default;  // closes the files; their extents are lost
  // Allocates `out.size()` extents of `size` bytes each, contiguous on one path if possible (so
  // that the engine can merge them). All or nothing: returns -ENOSPC, with budget, use and path, if
  // there is no space.
  virtual core::Status allocate(size_t size, unsigned codec, std::span<core::Extent> out) = 0;
  // Reserves memory for the free map, for `bytes` more in live extents; unreserve() undoes it.
  // Extents beyond all reservations take memory when they are allocated. Returns false without
  // memory.
  virtual bool reserve(uint64_t) { return true; }
  virtual void unreserve(uint64_t) {}
  virtual void release(core::Extent extent) = 0;
  // A write to the extent failed: avoids its path for a while, unless no other has space.
  virtual void avoid(core::Extent) {}
  // Same, and releases the extent.
  virtual void refuse(core::Extent extent) {
    avoid(extent);
    release(extent);
  }
  // Returns true if writes to its path have failed lately, so a write to a new extent there will
  // probably fail. Overwriting an extent may still work.
  virtual bool expected_to_fail(core::Extent) const { return false; }
  virtual unsigned paths() const { return 1; }
  virtual FileId file(core::Extent extent) const = 0;
  virtual void set_budget(uint64_t bytes) = 0;
  virtual uint64_t used() const = 0;                                // bytes in live extents
  virtual core::OwnString describe(core::Extent extent) const = 0;  // "path X, offset N", for messages
};

core::Status make_space(const SpaceOptions& options, Engine& engine, std::unique_ptr<Space>* out);

}  // namespace vmem::store
