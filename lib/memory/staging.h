// Host memory that devices copy from and to at full speed: frames of one size, pinned for every
// device, in slabs that stay while a region needs them. With the module as the trap they are its
// frames: contiguous, charged to the machine's limits, and freed by the kernel when the process
// ends.
//
// - Frames are charged from reserve() on until their slab goes: the host budget's charge for
//   staging includes every slab.
// - Faults never wait for a staging frame: they have frames of their own (frame_pool.h).
//
// Not thread-safe: the pager's lock protects it, except make_slab() and end_slab().
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/os_allocator.h"
#include "core/status.h"
#include "core/types.h"
#include "device/host_pinning.h"
#include "memory/host_budget.h"
#include "trap/trap.h"

namespace vmem::memory {

class Staging {
 public:
  Staging(HostBudget& budget, size_t frame)
      : budget_(budget), frame_(frame) {}  // frame: bytes, a power of two, at least 2 MiB
  struct Slab {
    std::byte* at = nullptr;
    size_t size = 0;
    trap::Trap* owner = nullptr;  // the trap whose arena it is; null: plain memory
  };
  // No device may be copying, and the traps of the slabs must still exist.
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // Makes populated, pinned memory for `frames` frames; blocks, for tens of milliseconds per GiB.
  // Uses the module's frames if it installs frames; if no device pins those, plain memory, and logs
  // one line. Returns -ENOMEM or -EDQUOT at a limit of the module. Any thread, no lock.
  static core::Status make_slab(device::HostPinning& devices, trap::Trap& trap, size_t frames, size_t frame,
                                const std::vector<int>& nodes, Slab* slab);
  // Charges `frames` more frames, and makes room to list them. Returns false if the budget has no
  // room besides `keep` bytes, or if there is no memory. unreserve() undoes it if they could not be
  // made.
  bool reserve(size_t frames, uint64_t keep) noexcept;
  void unreserve(size_t frames) { budget_.credit(frames * frame_, Use::staging); }
  // Adds the slab's frames to the free frames. Call it after reserve().
  void add_slab(device::HostPinning& devices, const Slab& slab);
  // Removes and returns a slab while no frame is in use, for end_slab() and then unreserve().
  // Returns a null `at` if there is no slab.
  Slab take_slab();
  // Frees a slab. Any thread, no lock; no device may be copying.
  static void end_slab(device::HostPinning& devices, const Slab& slab);

  // Returns nullptr if at most `keep` frames are free.
  std::byte* get(size_t keep);
  void put(std::byte* frame) { free_.push_back(frame); }
  bool owns(const std::byte* at) const;
  size_t free() const { return free_.size(); }  // frames
  size_t total() const { return total_; }       // frames
  uint64_t bytes() const { return total_ * frame_; }
  size_t frame() const { return frame_; }  // bytes; the block size of its regions
  // Blocks that move together: 32 MiB, which spreads the driver's cost, but at least two.
  size_t batch() const { return std::max<size_t>(2, (size_t{32} << 20) / frame_); }
  // Frames made at once: 64 MiB, but enough to move a block.
  size_t slab_frames() const { return std::max(kLeast, (size_t{64} << 20) / frame_); }
  static constexpr size_t kLeast = 4;  // with fewer frames nothing moves

 private:
  HostBudget& budget_;
  const size_t frame_;
  device::HostPinning* devices_ = nullptr;
  core::OwnVector<Slab> slabs_;
  core::OwnVector<std::byte*> free_;
  size_t total_ = 0;
};

}  // namespace vmem::memory
