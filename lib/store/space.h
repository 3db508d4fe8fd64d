// Room for blocks of anonymous regions on the SSD: paths, extents, budget.
#pragma once

#include <chrono>
#include <memory>
#include <span>
#include <string>

#include "core/status.h"
#include "core/types.h"
#include "store/io.h"

namespace vmem::store {

struct SpaceOptions {
  std::string paths;  // colon-separated; "" = $TMPDIR or /var/tmp
  uint64_t budget = UINT64_MAX;
  bool direct = true;
  // How long nothing may have been allocated before freed room goes back to the file system; twelve times that at most
  // while allocations go on. Room that was written before takes writes faster than new room does (ext4 here: by a
  // fifth), and what is freed is often wanted again. A file that cannot grow is trimmed at once.
  std::chrono::milliseconds trim_delay{5000};
  // A path that was full, or to which a write failed, is tried again so much later: somebody may have mended it.
  std::chrono::milliseconds full_delay{1000};
};

// Thread-safe. Extents are multiples of 4 KiB up to 64 MiB + 4 KiB, taken round-robin from the paths, first from freed
// ones. A directory gets an unlinked O_TMPFILE (or an unlinked temporary) that grows as needed. A regular file or a
// block device begins with a signature, blocks come after it; a file is made (O_EXCL, 0600) or grows, a device is used
// up to its size. What exists already is taken only if nobody else can reach it and nothing is lost: a file of our own
// user, without permissions for others, with one name, no symbolic link (-EPERM, -ELOOP); empty, laid out and never
// written, or with the signature of a store that was killed, which is emptied (else -EEXIST); a device that carries our
// signature or zeros in its first MiB and is not mounted. Two processes given one file or device: the second gets
// -EBUSY (flock, O_EXCL). Freed extents are reused; long free runs are returned to the file system after a while (punch
// hole, truncate at the end).
class Space {
 public:
  virtual ~Space() = default;  // files are closed; extents die with it
  // One extent of `size` bytes, or `count` extents of `size` bytes each that lie one after the other on one path when
  // that is possible (so that the engine can merge them). -ENOSPC with budget, use and path when there is no room:
  // all or nothing.
  virtual core::Status allocate(size_t size, unsigned codec, std::span<core::Extent> out) = 0;
  // Memory for the map of what is free, for so many bytes more in live extents; unreserve() says that they will not
  // come. What goes beyond all of it asks for memory when it is allocated. False: there is not enough.
  virtual bool reserve(uint64_t) { return true; }
  virtual void unreserve(uint64_t) {}
  virtual void release(core::Extent extent) = 0;
  // A write to the extent failed: its path gets nothing for a while, unless no other has room.
  virtual void avoid(core::Extent) {}
  // The same, and the extent is released.
  virtual void refuse(core::Extent extent) {
    avoid(extent);
    release(extent);
  }
  // Writes to its path have failed lately: one to a new extent there is expected to fail. One over what was written
  // may not.
  virtual bool expected_to_fail(core::Extent) const { return false; }
  virtual unsigned paths() const { return 1; }
  virtual FileId file(core::Extent extent) const = 0;
  virtual void set_budget(uint64_t bytes) = 0;
  virtual uint64_t used() const = 0;                                // bytes in live extents
  virtual core::OwnString describe(core::Extent extent) const = 0;  // "path X, offset N": for messages
};

core::Status make_space(const SpaceOptions& options, Engine& engine, std::unique_ptr<Space>* out);

}  // namespace vmem::store
