// What to read before it is asked for. Pure, one object per region, called under the pager's lock.
//
// Up to sixteen streams are followed at once. A stream is a run of touches with one stride, forwards or backwards. It
// starts with a small window, doubles it each time the reader gets to the marker, and halves it when what was read is
// evicted unused. Touches that fit no stream start none of size: neighbours have to be seen several times, and more
// often in a region where windows were wasted before.
//
// Several readers of a part each share the memory there is for unread blocks, and none reads what another has begun
// with: it ends there, most likely.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "core/types.h"

namespace vmem::policy {

enum class Access : uint8_t { normal, sequential, random };  // the region's advice

// Blocks first, first + stride, .. (count of them). Reading stops at the region's ends. The block `marker` of them is
// left trapped when it arrives: its touch tells that the stream goes on, before the window runs out.
struct Window {
  core::BlockIndex first = 0;
  int64_t stride = 1;
  uint32_t count = 0;
  core::BlockIndex marker = 0;
};

// Blocks first, first + stride, .. (count of them).
struct Run {
  core::BlockIndex first = 0;
  int64_t stride = 1;
  uint64_t count = 0;
};

// What there is for streams to use.
struct Room {
  uint64_t blocks = UINT64_MAX;  // that may be in memory unread, of all streams
  uint64_t clock = 0;            // ascending; for give_up()
};

class ReadAhead {
 public:
  static constexpr size_t kStreams = 16;
  // blocks: in the region. max_blocks: largest window (setting readahead / block size); 0 turns it off.
  ReadAhead(uint64_t blocks, uint32_t max_blocks);
  void set_access(Access access);
  void set_max(uint32_t max_blocks);
  // A touch that trapped. marker: it was a marker left by an earlier window, so the blocks before it are presumed used.
  // Returns the window to start now, if any; never contains `block` itself.
  std::optional<Window> on_fault(core::BlockIndex block, bool marker, Room room = {});
  // Of the stream that the last on_fault() went on with: the blocks that its reader is past since it was last asked,
  // and a few before them.
  Run passed() const { return passed_; }
  // .. those of them that are more than `keep` back, once that are as many again; each block once.
  Run leave_behind(uint64_t keep);
  // Asked for by a stream that the last on_fault() forgot for another one's sake: nobody comes for it, most likely.
  Run given_up() const { return given_up_; }
  // Forgets a stream that was last used before `clock`, and returns what it asked for. Empty when there is none.
  Run give_up(uint64_t clock);
  // Whether the last on_fault() belongs to a stream, which asks for what comes next in its own time.
  bool streams() const { return current_ != nullptr; }
  // Blocks that were read with the one of the last on_fault(), the first of the run: nobody will see them accessed.
  void presume(const Run& run);
  // Blocks that were read ahead and evicted without a touch seen after them: shrink.
  void on_waste(core::BlockIndex block);
  // The pager had no memory or depth for blocks of a window: the last ones of the window given most recently.
  void on_dropped(uint32_t blocks);
  // The same of `run`, the last blocks of any window: its stream asks for them again.
  void on_cut(const Run& run);

 private:
  struct Stream {
    bool live = false;
    core::BlockIndex last = 0;  // last trapping touch
    int64_t stride = 1;         // never 0
    int64_t ahead = 0;          // first block not yet asked for; may lie outside the region
    uint32_t window = 0;        // blocks, size of the last window
    uint32_t wasted = 0;        // blocks since the window last changed
    bool extended = false;      // its first window was used
    uint64_t used = 0;          // for replacement: tick of the last use
    uint64_t clock = 0;         // of the last use
    int64_t begun = 0;          // its first block
    int64_t passed = 0;         // the reader is past the blocks before this one, and that was told
    int64_t behind = 0;         // blocks before this one were left behind
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
  uint32_t caution_ = 0;  // further touches that must fit before a stream is believed; waste raises it, use lowers it
  uint32_t stray_waste_ = 0;
  uint32_t limit_;           // blocks a window may have now: halved by waste, grows back slowly
  uint32_t wasted_ = 0;      // blocks of all streams since limit_ last shrank
  uint32_t extensions_ = 0;  // at the limit, since it last grew
  std::array<Stream, kStreams> streams_{};
  Room room_;                  // of the call under way
  Stream* current_ = nullptr;  // of the last on_fault()
  Run passed_, given_up_;
  std::array<core::BlockIndex, kHistory> history_{};  // touches that fitted no stream, newest at history_used_ - 1
  uint64_t history_used_ = 0;
};

}  // namespace vmem::policy
