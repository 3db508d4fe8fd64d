// What is true of the way out of memory as a whole, whichever blocks are on it: how much memory will come free by it,
// when a write may be tried again after one that failed, and the failure that nobody has been told of.
//
//   what will come free = the blocks of the transitions that leave; each is counted once, and none whose transition is
//   over nobody is kept from writing for longer than kLongestPause
//
// Not thread-safe: the pager's lock protects it. Needs no memory, but for the words of a failure.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "core/status.h"
#include "pager/block/frame_table.h"

namespace vmem::pager {

struct Transition;

// A transition's part of what will come free: nothing until WritebackThrottle counts it, and when it does so no more.
class PendingFree {
 public:
  bool counted() const { return bytes_ != 0; }

 private:
  friend class WritebackThrottle;
  uint64_t bytes_ = 0;
  uint8_t pool_ = kHostPool;
};

class WritebackThrottle {
 public:
  static constexpr uint64_t kShortestPause = 10000000, kLongestPause = kShortestPause << 6;  // ns
  static constexpr uint64_t kPinnedPause = 5000000;                                          // ns
  static constexpr uint64_t kFull = 1000000000;                                              // ns
  static constexpr uint64_t kSayAgain = 60000000000;                                         // ns

  // So many bytes of frames (kHostPool), or of staging frames, will come free by this move. It is counted once.
  void leaves(PendingFree& move, uint64_t bytes, uint8_t pool);
  // They have, or the block stays in memory. Of what is not counted: nothing.
  void settled(PendingFree& move);
  uint64_t leaving(uint8_t pool = kHostPool) const { return leaving_[pool]; }

  // How long until write-back may be tried, in ns; 0: now.
  uint64_t pause(uint64_t now_ns) const { return now_ns < retry_ns_ ? retry_ns_ - now_ns : 0; }
  // A block that has no copy in the store found no room there. For a while others, which can be written over theirs,
  // come first: each try of one like it would put the pause above before them.
  void no_room(uint64_t now_ns) { full_until_ns_ = now_ns + kFull; }
  bool full(uint64_t now_ns) const { return now_ns < full_until_ns_; }
  // Somebody has pinned a block's memory: not at once again, were all of memory like this.
  void pinned(uint64_t now_ns) { retry_ns_ = std::max(retry_ns_, now_ns + kPinnedPause); }
  // The next try waits, the longer the more have failed in a row. Blocks leave together: those that fail before the
  // next try may begin are one try. Kept for take_error() unless somebody waits for this write, and hears of it, or
  // there is one already. True: it is to be said; one that repeats what was said last is not.
  bool failed(const core::Status& why, bool somebody_hears, uint64_t now_ns);
  void succeeded() { failures_in_row_ = 0; }
  // A write to a region's own file failed: its next one waits, for others nothing changes. True: it is to be said.
  bool file_failed(Region& r, const core::Status& why, bool somebody_hears, uint64_t now_ns);
  static void file_succeeded(Region& r) {
    r.refusals = 0;
    r.refused_until_ns = 0;
  }
  // A file that refused a write is asked again before this is over: until then no wait is hopeless.
  bool files_pause(uint64_t now_ns) const { return now_ns < files_until_ns_; }
  // The last write failed: who may not write now may not for long. Else it was somebody's pin.
  bool failing() const { return failures_in_row_ != 0; }
  // The store has room, or may have: who waits to write tries at once. False: nobody was kept from it.
  bool has_room();

  // The first failure that nobody has been told of. Who takes it tells it.
  const core::Status& error() const { return error_; }
  core::Status take_error();

  // Tests: recounts the pager's moves. What is wrong; empty: nothing.
  std::string check(std::span<const std::unique_ptr<Transition>> transitions, uint64_t now_ns) const;

 private:
  std::array<uint64_t, kDevicePools> leaving_{};  // bytes: of frames, of staging frames, by Frame::pool
  core::Status error_;
  uint64_t retry_ns_ = 0;         // no write-back before this; 0: whoever waited for it was told that there is room
  uint64_t next_try_ns_ = 0;      // what failed before this belongs to the last try that failed
  uint64_t full_until_ns_ = 0;    // the store had no room, and nobody has made any
  uint64_t files_until_ns_ = 0;   // the last file that refused a write is asked again then
  unsigned failures_in_row_ = 0;  // tries
  int said_ = 0;                  // this failure was said last, then
  uint64_t said_ns_ = 0;
};

}  // namespace vmem::pager
