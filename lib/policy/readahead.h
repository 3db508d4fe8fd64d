// Chooses blocks to read before the program accesses them. Pure, one object per region, called
// under the pager's lock.
//
// - It follows up to sixteen streams at once. A stream is a run of touches with one stride,
//   forwards or backwards. It starts with a small window, doubles it each time the reader gets to
//   the marker, and halves it when blocks that were read are evicted unused.
// - Touches that fit no stream start no large one: neighbours must be seen several times, and more
//   often in a region where windows were wasted before.
// - Several readers, each of a part, share the memory for unread blocks. A stream does not read
//   blocks with which another one began: it most likely ends there.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "core/types.h"

namespace vmem::policy {

enum class Access : uint8_t { normal, sequential, random };  // the region's advice

// Blocks first, first + stride, ... (`count` of them). Reading stops at the region's ends. The
// block `marker` stays trapped when it arrives: its touch shows, before the window runs out, that
// the stream continues.
struct Window {
  core::BlockIndex first = 0;
  int64_t stride = 1;
  uint32_t count = 0;
  core::BlockIndex marker = 0;
};

// Blocks first, first + stride, ... (`count` of them).
struct Run {
  core::BlockIndex first = 0;
  int64_t stride = 1;
  uint64_t count = 0;
};

// The memory that streams may use.
struct Room {
  uint64_t blocks = UINT64_MAX;  // blocks that all streams may have in memory unread
  uint64_t clock = 0;            // ascending time, for give_up()
};

class ReadAhead {
 public:
  static constexpr size_t kStreams = 16;
  // blocks: in the region. max_blocks: largest window (setting readahead / block size); 0 turns it
  // off.
  ReadAhead(uint64_t blocks, uint32_t max_blocks);
  void set_access(Access access);
  void set_max(uint32_t max_blocks);
  // A touch trapped. marker: an earlier window left it as its marker, so the blocks before it are
  // presumed used. Returns the window to start now, if any; it never contains `block`.
  std::optional<Window> on_fault(core::BlockIndex block, bool marker, Room room = {});
  // Blocks that the reader of the last on_fault()'s stream has passed since the fault before, and a
  // few before those.
  Run passed() const { return passed_; }
  // Returns passed blocks that are more than `keep` behind the reader, once there are at least
  // `keep` of them; each block once.
  Run leave_behind(uint64_t keep);
  // Blocks requested by a stream that the last on_fault() forgot in favour of another. Most likely
  // no reader comes for them.
  Run given_up() const { return given_up_; }
  // Forgets a stream that was last used before `clock`, and returns the blocks that it had
  // requested. Empty if there is none.
  Run give_up(uint64_t clock);
  // Returns whether the last on_fault() belongs to a stream, which requests the next blocks in its
  // own time.
  bool streams() const { return current_ != nullptr; }
  // Blocks that were read with the block of the last on_fault(), which is the first of the run.
  // Accesses of the others will not trap.
  void presume(const Run& run);
  // A block was read ahead and evicted with no touch seen after it: shrink.
  void on_waste(core::BlockIndex block);
  // The pager had no memory or queue depth for the last `blocks` of the most recent window.
  void on_dropped(uint32_t blocks);
  // The same for `run`, the last blocks of any window: its stream requests them again.
  void on_cut(const Run& run);

 private:
  struct Stream {
    bool live = false;
    core::BlockIndex last = 0;  // last trapping touch
    int64_t stride = 1;         // never 0
    int64_t ahead = 0;          // first block not requested yet; may lie outside the region
    uint32_t window = 0;        // blocks, size of the last window
    uint32_t wasted = 0;        // blocks since the window last changed
    bool extended = false;      // its first window was used
    uint64_t used = 0;          // for replacement: tick of the last use
    uint64_t clock = 0;         // of the last use
    int64_t begun = 0;          // its first block
    int64_t passed = 0;         // passed() has reported the blocks before this one
    int64_t behind = 0;         // leave_behind() has returned the blocks before this one
  };
  static std::optional<uint64_t> steps(const Stream& s, int64_t from, int64_t to);
  Stream* following(core::BlockIndex block, bool marker);
  int64_t find_stride(core::BlockIndex block) const;
  Stream& start(core::BlockIndex block, int64_t stride);
  void forget(Stream& s);
  std::optional<Window> extend(Stream& s, core::BlockIndex block, bool marker);
  std::optional<Window> ask(Stream& s, uint64_t unread);
  uint64_t share() const;
  void pass(Stream& s, int64_t at);
  static Run unread(const Stream& s);

  static constexpr size_t kHistory = 32;
  uint64_t blocks_;
  uint32_t max_;
  Access access_ = Access::normal;
  uint64_t tick_ = 0;
  uint32_t caution_ = 0;  // extra touches needed before a stream is believed; waste raises it, use lowers it
  uint32_t stray_waste_ = 0;
  uint32_t limit_;           // blocks that a window may have now: halved by waste, grows back slowly
  uint32_t wasted_ = 0;      // blocks of all streams since limit_ last shrank
  uint32_t extensions_ = 0;  // windows extended at the limit since it last grew
  std::array<Stream, kStreams> streams_{};
  Room room_;                  // of the current call
  Stream* current_ = nullptr;  // of the last on_fault()
  Run passed_, given_up_;
  std::array<core::BlockIndex, kHistory> history_{};  // touches that fitted no stream, newest at history_used_ - 1
  uint64_t history_used_ = 0;
};

}  // namespace vmem::policy
