// What is known of the blocks that are in memory or on a device, by a number that each has while it is there
// (core::Block::aux); and how many bytes of them were read ahead and nobody was seen to use.
//
//   a number is free, or names one block; ahead_bytes() = the blocks of those that are `ahead`
//
// Not thread-safe: the pager's lock protects it. grow() needs memory; nothing else does, and references stay good.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/chunks.h"
#include "core/types.h"
#include "device/device.h"
#include "pager/block/region.h"

namespace vmem::pager {

// Frame::pool: one of staging frames for each size of blocks, one for each device.
inline constexpr uint8_t kHostPool = 0, kStagingPools = 1, kDevicePools = kStagingPools + device::kUnitSizes;
constexpr bool in_staging(uint8_t pool) {
  return pool >= kStagingPools && pool < kDevicePools;
}

// Frame::pool of a block that is in a staging frame.
inline uint8_t staging_pool(const Region& r) {
  return static_cast<uint8_t>(kStagingPools + device::unit_class(r.block_size));
}

struct Frame {
  Region* region = nullptr;  // null: the number is free
  core::BlockIndex block = 0;
  std::byte* bytes =
      nullptr;          // staged, reading, isolating, writing back: where the bytes are; resident: null (move, copy)
  uint32_t shadow = 0;  // of its last eviction, 0 = never
  int32_t stride = 0;   // of its read-ahead window
  uint8_t pool = kHostPool;  // whose memory it occupies, and which policy knows it
  bool admitted = false;     // known to the policy
  bool leased = false;       // .. which holds it for its leases
  bool in_place = false;     // isolating, writing back, demoting: one of our threads may read its pages in the region
  bool promoted = false;     // isolating: it goes to a device
  bool issued = false;       // promoting: its copy is issued, `ticket` is its end
  bool changed = false;      // on a device: what is there may differ from what came
  // .. but kernels that ask say in the end whether they stored: if they did not, all is as it was. A block that was
  // dirty before stays so. Until then nobody relies on its copy.
  bool undecided = false, was_dirty = false;
  bool hinted = false;                  // promoting, on a device: a hint brought it, no lease has used it yet
  bool ahead = false;                   // read ahead, and nobody was seen to use it: see read_ahead(), seen()
  bool leaves = false;                  // prefetch to the SSD met it in transition: it leaves when that is over
  bool is_copy = false;                 // the same bytes as a block that is on a device
  core::FrameId copy = core::kNoFrame;  // on a device: its copy in a staging frame. Free: the next that is
  bool cpu_mapped = false;    // on a device: a copy is in place for the CPU, write-protected and charged (CpuMapper)
  bool device_stale = false;  // .. not protected any more: it has what the device has not
  uint8_t missed = 0;         // .. accesses that found no page of it since
  bool displaced = false;  // on a device: what was shown of it went for want of memory, and no lease has used it since
  bool asked = false;      // on a device: among `accesses`
  bool refused = false;    // .. accesses of the CPU get SIGBUS until its WRITE leases have ended
  bool apart = false;      // .. those of a few pages do, where stores had no room, and others wait for a moment
  static constexpr uint8_t kNotSpilled = UINT8_MAX;
  uint8_t spilled_to = kNotSpilled;  // on a device, which is not the one that it was on for somebody: see SpilledBlocks
  core::FrameId previous_spilled = core::kNoFrame, next_spilled = core::kNoFrame;  // .. there
  bool saved = false;  // on a device, at exit: its file has it, or gets it, as far as the books know
  device::Ticket ticket;
  bool unwritten = false;        // found to need a write while none could be made; no policy may know it until one can
  bool droppable = false;        // its file refused its changes for good, or twice: dont-need may drop them
  bool lent_to_kernels = false;  // isolating: kernels load from its staging frame (StagingLoans)
  bool proven = false;           // resident, kProtected: no pin from before that can store to its pages unseen
  bool pinned = false;           // it was to leave, and somebody pinned a page of it
  uint8_t pinned_tries = 0;      // .. so often in a row: others are tried first for a while, see found_pinned()
  bool dropping = false;         // .. and are being dropped: an absent page is ours, not the program's doing
  bool holed = false;            // .. and the program dropped a page meanwhile, which is zeros and takes stores unseen;
                                 // mapping: somebody met a page that was not there
  uint64_t pinned_until_ns = 0;  // .. until then
  uint64_t dirty_since_ns = 0;   // DirtyBlocks; 0: not listed
  // Of DirtyBlocks: the block was due and could not be written, for a WRITE lease or for something else that is over
  // soon. It is overdue until its write begins.
  enum class Overdue : uint8_t { no, yes, leased };
  Overdue overdue = Overdue::no;
  core::FrameId dirty_before = core::kNoFrame, dirty_after = core::kNoFrame;
};

class FrameTable {
 public:
  static constexpr size_t kStep = core::Chunks<Frame>::kStep;

  Frame& operator[](core::FrameId id) { return all_[id]; }
  const Frame& operator[](core::FrameId id) const { return all_[id]; }
  size_t size() const { return all_.size(); }  // numbers, free or not
  size_t free() const { return free_; }
  size_t used() const { return all_.size() - free_; }

  // kStep numbers more. Throws bad_alloc, and nothing has changed.
  void grow();
  // One must be free.
  core::FrameId take(Region& r, core::BlockIndex b, std::byte* bytes, uint8_t pool);
  // The policy knows it no more.
  void give(core::FrameId id);

  // It was read before anybody asked for it; somebody used it.
  void read_ahead(Frame& frame);
  void seen(Frame& frame);
  uint64_t ahead_bytes() const { return ahead_bytes_; }

  // Tests: recounts all. What is wrong; empty: nothing.
  std::string check() const;

 private:
  core::Chunks<Frame> all_;
  core::FrameId first_free_ = core::kNoFrame;
  size_t free_ = 0;
  uint64_t ahead_bytes_ = 0;
};

// The block was to leave, and a page of it is pinned, or not. Each time that it is found pinned in a row it is passed
// over four times as long: a buffer that is registered stays so for long.
inline void found_pinned(Frame& frame, bool pinned, uint64_t now_ns) {
  constexpr uint64_t kShortest = 16000000;  // ns
  constexpr unsigned kMostTries = 5;        // 16 s
  frame.pinned = pinned;
  frame.pinned_until_ns = pinned ? now_ns + (kShortest << 2 * frame.pinned_tries) : 0;
  if (!pinned) frame.pinned_tries = 0;
  if (pinned && frame.pinned_tries < kMostTries) ++frame.pinned_tries;
}

// In place, and nobody can have stored to it since it was equal to the store: neither a thread, nor a device that had
// pinned its pages before they were protected.
inline bool stood_protected(trap::Pins pins, const core::Block& block, const Frame& frame) {
  return (block.flags & core::kProtected) != 0 && (pins == trap::Pins::protected_ || frame.proven);
}

// Whoever asks the block elsewhere has to wait for it: it will be on a device, where the request did not find it.
inline bool comes_to_device(const FrameTable& frame_table, const core::Block& block) {
  return block.state == core::State::promoting ||
         (block.state == core::State::isolating && frame_table[block.aux].promoted);
}

}  // namespace vmem::pager
