// What to read before it is asked for. Pure, one object per region, called under the pager's lock.
//
// Up to eight streams are followed at once. A stream is a run of touches with one stride, forwards or backwards. It
// starts with a small window, doubles it each time the reader gets to the marker, and halves it when what was read is
// evicted unused. Touches that fit no stream start none of size: neighbours have to be seen several times, and more
// often in a region where windows were wasted before.
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

class ReadAhead {
 public:
  // blocks: in the region. max_blocks: largest window (setting readahead / block size); 0 turns it off.
  ReadAhead(uint64_t blocks, uint32_t max_blocks);
  void set_access(Access access);
  void set_max(uint32_t max_blocks);
  // A touch that trapped. marker: it was a marker left by an earlier window, so the blocks before it are presumed used.
  // Returns the window to start now, if any; never contains `block` itself.
  std::optional<Window> on_fault(core::BlockIndex block, bool marker);
  // Blocks that were read ahead and evicted without a touch seen after them: shrink.
  void on_waste(core::BlockIndex block);
  // The pager had no memory or depth for blocks of a window: the last ones of the window given most recently.
  void on_dropped(uint32_t blocks);

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
  };
  static std::optional<uint64_t> steps(const Stream& s, int64_t from, int64_t to);
  Stream* following(core::BlockIndex block, bool marker);
  int64_t find_stride(core::BlockIndex block) const;
  Stream& start(core::BlockIndex block, int64_t stride);
  void forget(Stream& s);
  std::optional<Window> extend(Stream& s, core::BlockIndex block, bool marker);
  std::optional<Window> ask(Stream& s, uint64_t unread);

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
  std::array<Stream, 8> streams_{};
  std::array<core::BlockIndex, kHistory> history_{};  // touches that fitted no stream, newest at history_used_ - 1
  uint64_t history_used_ = 0;
};

}  // namespace vmem::policy
