// What to read before it is asked for. Pure, one object per region, called under the pager's lock.
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
  // The pager had no memory or depth for blocks of a window.
  void on_dropped(uint32_t blocks);

 private:
  struct Stream {
    bool live = false;
    core::BlockIndex last = 0;   // last trapping touch
    int64_t stride = 0;          // 0 until two touches agree
    uint32_t confirmed = 0;      // touches that fitted
    core::BlockIndex ahead = 0;  // first block not yet asked for
    uint32_t window = 0;         // blocks, current size
    uint64_t used = 0;           // for replacement: tick of the last use
  };
  uint64_t blocks_;
  uint32_t max_;
  Access access_ = Access::normal;
  uint64_t tick_ = 0;
  std::array<Stream, 8> streams_{};
};

}  // namespace vmem::policy
