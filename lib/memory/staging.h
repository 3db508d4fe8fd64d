// Host memory that devices copy from and to at full speed: frames of one size, pinned for every device, in slabs that
// stay while a region needs them. Where the module is the trap they are its frames: contiguous, charged to the
// machine's limits, given back by the kernel when the process ends. Not thread-safe: the pager's lock protects it,
// except make_slab() and end_slab().
//
//   charged from reserve() on, until all of it goes: the host budget's charge for staging has every slab in it
//
// Faults never wait for a staging frame: they have frames of their own (frame_pool.h).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/os_allocator.h"
#include "core/status.h"
#include "core/types.h"
#include "device/device.h"
#include "memory/host_budget.h"
#include "trap/trap.h"

namespace vmem::memory {

class Staging {
 public:
  Staging(HostBudget& budget, size_t frame)
      : budget_(budget), frame_(frame) {}  // bytes, a power of two of 2 MiB or more
  struct Slab {
    std::byte* at = nullptr;
    size_t size = 0;
    trap::Trap* owner = nullptr;  // whose arena it is; null: plain memory
  };
  // No device may be copying; the traps of slabs are there.
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // Populated, pinned memory for `frames` frames. Blocks (16 to 40 ms/GiB). -ENOMEM, -EDQUOT: a limit of the module.
  // The module's frames where it installs frames, and plain memory, with one line, when no device pins those. Any
  // thread, no lock.
  static core::Status make_slab(device::Devices& devices, trap::Trap& trap, size_t frames, size_t frame,
                                const std::vector<int>& nodes, Slab* slab);
  // Charges so many frames more, and makes room to know them by. False: the budget has no room beside `keep` bytes, or
  // there is no memory. unreserve(): they could not be made.
  bool reserve(size_t frames, uint64_t keep) noexcept;
  void unreserve(size_t frames) { budget_.credit(frames * frame_, Use::staging); }
  // From now on its frames are handed out. After reserve().
  void add_slab(device::Devices& devices, const Slab& slab);
  // Nobody has any of the frames: a slab of them, which is no more from now on, for end_slab() and then unreserve().
  // Null `at`: there is none.
  Slab take_slab();
  // Any thread, no lock; no device may be copying.
  static void end_slab(device::Devices& devices, const Slab& slab);

  // nullptr when no more than `keep` frames are free.
  std::byte* get(size_t keep);
  void put(std::byte* frame) { free_.push_back(frame); }
  bool owns(const std::byte* at) const;
  size_t free() const { return free_.size(); }  // frames
  size_t total() const { return total_; }       // frames
  uint64_t bytes() const { return total_ * frame_; }
  size_t frame() const { return frame_; }  // bytes: a block of any region with a device tier
  // Blocks that move together: 32 MiB, where the driver's cost is spread thin, so long as those are several.
  size_t batch() const { return std::max<size_t>(2, (size_t{32} << 20) / frame_); }
  // Frames made at once: 64 MiB, so long as those are enough to move anything.
  size_t slab_frames() const { return std::max(kLeast, (size_t{64} << 20) / frame_); }
  static constexpr size_t kLeast = 4;  // frames without which nothing moves

 private:
  HostBudget& budget_;
  const size_t frame_;
  device::Devices* devices_ = nullptr;
  core::OwnVector<Slab> slabs_;
  core::OwnVector<std::byte*> free_;
  size_t total_ = 0;
};

}  // namespace vmem::memory
