// Frames: what is known of each block in memory or on a device, by the number that the block has
// while it is there (core::Block::aux). Also counts the bytes that were read ahead and not used
// yet.
//
// - A number is free, or names one block.
// - ahead_bytes() is the sum of the blocks whose frames are `ahead`.
//
// Not thread-safe: the pager's lock protects it. Only grow() needs memory. References stay valid.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <string>

#include "core/types.h"
#include "device/device.h"
#include "pager/block/region.h"
#include "policy/chunks.h"

namespace vmem::pager {

// Values of Frame::pool: host memory, then staging frames of each block size, then each device.
inline constexpr uint8_t kHostPool = 0, kStagingPools = 1, kDevicePools = kStagingPools + device::kUnitSizes;
constexpr bool in_staging(uint8_t pool) {
  return pool >= kStagingPools && pool < kDevicePools;
}

// Frame::pool of the region's blocks in staging frames.
inline uint8_t staging_pool(const Region& r) {
  return static_cast<uint8_t>(kStagingPools + device::unit_class(r.block_size));
}

// Fields of a frame whose block is on a device.
struct DeviceFrame {
  device::Ticket ticket;  // of its copy, if issued
  bool issued = false;    // promoting: its copy is issued, and ends with `ticket`
  bool changed = false;   // may differ from the bytes that were copied there
  // undecided: changed, unless the kernels that asked for the block say at the end that they did
  // not store to it. Then it is unchanged, and clean unless was_dirty. Until then its host copy is
  // not used.
  bool undecided = false, was_dirty = false;
  bool hinted = false;                  // brought by a hint, and not used by a lease yet
  core::FrameId copy = core::kNoFrame;  // its host copy; in a free frame, the next free number
  bool cpu_mapped = false;              // a charged, write-protected copy is in place for the CPU
  bool stale = false;                   // cpu_mapped: the copy is writable and has stores that the device lacks
  uint8_t missed = 0;                   // cpu_mapped: accesses that found no page of the copy
  bool displaced = false;               // its copy for the CPU went for want of memory; no lease has used it since
  bool asked = false;                   // CpuMappings has an entry for accesses that wait
  bool answers_sigbus = false;          // asked: CPU accesses get SIGBUS, until CpuMappings::unrefuse()
  bool apart = false;  // asked: accesses of a few pages get SIGBUS, whose stores had no room; others wait
  bool saved = false;  // at exit: its file has its bytes or is about to, as far as is known
  static constexpr uint8_t kNotSpilled = UINT8_MAX;
  uint8_t spilled_to = kNotSpilled;  // on this device, spilled: see SpilledBlocks
  core::FrameId previous_spilled = core::kNoFrame, next_spilled = core::kNoFrame;  // in the list of that device
};
// Fields of DirtyBlocks.
struct DirtyFrame {
  uint64_t since_ns = 0;  // 0: not listed
  // The block was due, but a WRITE lease (leased) or something else that ends soon was in the way, or
  // its write failed (failed). It is overdue until its write begins.
  enum class Overdue : uint8_t { no, yes, leased, failed };
  Overdue overdue = Overdue::no;
  core::FrameId before = core::kNoFrame, after = core::kNoFrame;
};
// The result of the last try to take the block; see found_pinned().
class FramePins {
 public:
  bool pinned = false;  // a page of it was pinned

  // Notes whether a block that was to leave could be taken: 0, -EBUSY if a page of it is pinned, or
  // another error. Each time in a row that it could not, it is passed over four times as long: a
  // registered buffer stays pinned for long.
  void found(int error, uint64_t now_ns) {
    constexpr unsigned kMostTries = 5;  // 1,024 ticks: 17 s
    pinned = error == -EBUSY;
    until_ = error != 0 ? std::max(1u, tick(now_ns) + (1u << 2 * tries_)) : 0;
    if (error == 0) tries_ = 0;
    if (error != 0 && tries_ < kMostTries) ++tries_;
  }
  // It could not be taken: other blocks are tried first.
  bool passed_over(uint64_t now_ns) const { return until_ != 0 && static_cast<int32_t>(until_ - tick(now_ns)) > 0; }

 private:
  // Of 16.8 ms. A small type keeps Frame in two cache lines.
  static constexpr uint32_t tick(uint64_t now_ns) { return static_cast<uint32_t>(now_ns >> 24); }

  uint8_t tries_ = 0;   // how often in a row it could not be taken
  uint32_t until_ = 0;  // 0, or the tick until which it is passed over
};
struct Frame {
  Region* region = nullptr;  // null: the number is free
  core::BlockIndex block = 0;
  // Where the bytes are while staged, reading, isolating or writing back. Null while resident
  // (Transfer::move, Transfer::copy).
  std::byte* bytes = nullptr;
  uint32_t shadow = 0;       // of its last eviction, 0: never
  int32_t stride = 0;        // of its read-ahead window
  uint8_t pool = kHostPool;  // whose memory it occupies, and whose policy knows it
  bool admitted = false;     // known to the policy
  bool leased = false;       // the policy holds it for its leases
  bool in_place = false;     // isolating, writing back, demoting: a library thread may read its pages in the region
  bool promoted = false;     // isolating: it goes to a device
  bool ahead = false;        // read ahead, and no use was seen yet; see read_ahead(), seen()
  bool evict_when_stable = false;  // a prefetch to the SSD met it in transition: it leaves when that is over
  bool is_copy = false;            // a host copy of a block that is on a device
  bool unwritten = false;          // needs a write, and none can be made; no policy may know it until one can
  bool droppable = false;          // its file refused its changes for good, or twice; dont-need may drop them
  bool lent_to_kernels = false;    // isolating: kernels load from its staging frame (StagingLoans)
  bool proven = false;             // resident, kProtected: no pin from before the protection can store unseen
  bool dropping = false;           // in_place: we drop its pages; the program did not make an absent page
  // in_place: the program dropped a page, which now is zeros and takes stores unseen. Mapping: a
  // fault met a page that was not there.
  bool holed = false;
  bool could_not_leave = false;  // reclaim chose it in vain: its policy gets to know with the next admit()
  FramePins pins;
  DirtyFrame dirty;
  DeviceFrame dev;
};
static_assert(sizeof(Frame) <= 128);

class FrameTable {
 public:
  static constexpr size_t kStep = policy::Chunks<Frame>::kStep;

  Frame& operator[](core::FrameId id) { return all_[id]; }
  const Frame& operator[](core::FrameId id) const { return all_[id]; }
  size_t size() const { return all_.size(); }  // numbers, free or not
  size_t free() const { return free_; }
  size_t used() const { return all_.size() - free_; }

  // Adds kStep free numbers. Throws bad_alloc, and then changes nothing.
  void grow();
  // Takes a free number, which must exist.
  core::FrameId take(Region& r, core::BlockIndex b, std::byte* bytes, uint8_t pool);
  // Frees a number that no policy knows.
  void give(core::FrameId id);

  // The block was read before it was asked for; it has been used.
  void read_ahead(Frame& frame);
  void seen(Frame& frame);
  uint64_t ahead_bytes() const { return ahead_bytes_; }

  // For tests: recounts everything. Returns what is wrong, or an empty string.
  std::string check() const;

 private:
  policy::Chunks<Frame> all_;
  core::FrameId first_free_ = core::kNoFrame;
  size_t free_ = 0;
  uint64_t ahead_bytes_ = 0;
};

// Whether the block is in place and certainly equal to the store: no thread can have stored to it
// since it was, and no device that had pinned its pages before they were protected.
inline bool stood_protected(trap::Pins pins, const core::Block& block, const Frame& frame) {
  return (block.flags & core::kProtected) != 0 && (pins == trap::Pins::protected_ || frame.proven);
}

// Whether the block is on its way to a device. A call that wants it elsewhere must wait for it,
// since it will be on a device, where the call did not find it.
inline bool comes_to_device(const FrameTable& frame_table, const core::Block& block) {
  return block.state == core::State::promoting ||
         (block.state == core::State::isolating && frame_table[block.aux].promoted);
}

}  // namespace vmem::pager
