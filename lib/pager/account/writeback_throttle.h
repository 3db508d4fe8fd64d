// The way out of memory as a whole, whichever blocks are on it: how much memory will come free,
// when a write may be tried again after a failure, and the failure that no call has reported.
//
// - The memory that will come free is that of the blocks whose transitions leave. Each is counted
//   once, until its transition is over.
// - Writes are kept back for at most kLongestPause.
//
// Not thread-safe: the pager's lock protects it. Only the text of a failure needs memory.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "core/status.h"
#include "pager/block/transition.h"

namespace vmem::pager {

class WritebackThrottle {
 public:
  static constexpr uint64_t kShortestPause = 10000000, kLongestPause = kShortestPause << 6;  // ns
  static constexpr uint64_t kPinnedPause = 5000000;                                          // ns
  static constexpr uint64_t kFull = 1000000000;                                              // ns
  static constexpr uint64_t kSayAgain = 60000000000;                                         // ns

  // The transition will free so many bytes of frames (kHostPool) or of staging frames. It is
  // counted once.
  void count_leaving(PendingFree& move, uint64_t bytes, uint8_t pool);
  // They are free, or the block stays in memory. Does nothing if the transition is not counted.
  void settled(PendingFree& move);
  uint64_t leaving(uint8_t pool = kHostPool) const { return leaving_[pool]; }

  // How long until write-back may be tried, in ns; 0: now.
  uint64_t pause(uint64_t now_ns) const { return now_ns < retry_ns_ ? retry_ns_ - now_ns : 0; }
  // A block without a copy in the store found no room there. For a while, blocks that can
  // overwrite their copies come first: each further try of a block without one would make them
  // wait for pause().
  void no_room(uint64_t now_ns) { full_until_ns_ = now_ns + kFull; }
  bool full(uint64_t now_ns) const { return now_ns < full_until_ns_; }
  // A block's memory is pinned: pauses for a moment, in case all of memory is.
  void pinned(uint64_t now_ns) { retry_ns_ = std::max(retry_ns_, now_ns + kPinnedPause); }
  // A write failed. The next try waits longer after each failure in a row. Blocks leave together:
  // those that fail before the next try may begin are one try. Keeps the failure for
  // take_error(), unless one is kept already or a caller waits for this write and reports it.
  // Returns whether to log the failure: not if it repeats the one that was logged last.
  bool failed(const core::Status& why, bool reported_by_caller, uint64_t now_ns);
  void succeeded() { failures_in_row_ = 0; }
  // A write to a region's own file failed: the next write of that file waits, other writes do not.
  // Returns whether to log it.
  bool file_failed(Region& r, const core::Status& why, bool reported_by_caller, uint64_t now_ns);
  static void file_succeeded(Region& r) {
    r.source.refusals = 0;
    r.source.refused_until_ns = 0;
  }
  // Whether a file that refused a write is yet to be tried again: until then no wait is hopeless.
  bool files_pause(uint64_t now_ns) const { return now_ns < files_until_ns_; }
  // Whether the last write failed, so that pause() may be long. If not, a pinned page is its cause.
  bool failing() const { return failures_in_row_ != 0; }
  // The store has room, or may have: writes are tried at once. Returns false if none was kept back.
  bool has_room();

  // The first failure that no call has reported. The caller of take_error() reports it.
  const core::Status& error() const { return error_; }
  core::Status take_error();

  // For tests: recounts the transitions. Returns what is wrong, or an empty string.
  std::string check(std::span<const std::unique_ptr<Transition>> transitions, uint64_t now_ns) const;

 private:
  std::array<uint64_t, kDevicePools> leaving_{};  // bytes of frames and staging frames, by Frame::pool
  core::Status error_;
  uint64_t retry_ns_ = 0;         // no write-back before this; 0: has_room() was called
  uint64_t next_try_ns_ = 0;      // failures before this belong to the last try that failed
  uint64_t full_until_ns_ = 0;    // until then the store counts as full
  uint64_t files_until_ns_ = 0;   // when the last file that refused a write is tried again
  unsigned failures_in_row_ = 0;  // tries
  int said_ = 0;                  // the failure that was logged last, and when
  uint64_t said_ns_ = 0;
};

}  // namespace vmem::pager
