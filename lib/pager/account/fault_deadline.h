// How long waits have lasted, and what may still end them: measures the time in which nothing went
// on, and allows for a failed write that is tried again. A waiting thread must ask more often than
// every StallClock::kSlice.
//
// Not thread-safe: the pager's lock protects it. Needs no memory.
#pragma once

#include <cstdint>

#include "core/clock.h"
#include "pager/account/writeback_throttle.h"
#include "pager/block/block_map.h"
#include "pager/block/config.h"
#include "pager/block/stall_clock.h"

namespace vmem::pager {

class FaultDeadline final : public WaitClock {
 public:
  FaultDeadline(BlockMap& map, const WritebackThrottle& writes, const Tunables& tunables)
      : map_(map), writes_(writes), tunables_(tunables) {}

  uint64_t look(uint64_t now_ns) VMEM_LOCKED override {
    return map_.progress().look(now_ns, map_.transitions().in_flight());
  }
  // Not before a failed write has been tried once more.
  bool hopeless(uint64_t mark) VMEM_LOCKED override {
    const uint64_t now = now_ns();
    look(now);
    if (map_.transitions().in_flight()) return false;
    return map_.progress().over(mark, writes_.pause(now) != 0 || writes_.files_pause(now)
                                          ? limit_ns() + WritebackThrottle::kLongestPause
                                          : limit_ns());
  }
  // A wait is given up when nothing has gone on for so long.
  uint64_t limit_ns() const { return tunables_.fault_timeout_ms * uint64_t{1000000}; }

 private:
  BlockMap& map_;
  const WritebackThrottle& writes_;
  const Tunables& tunables_;
};

}  // namespace vmem::pager
