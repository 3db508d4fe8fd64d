// An acquire that somebody asked for and does not wait in.
#pragma once

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <span>
#include <vector>

#include "core/status.h"

namespace vmem::pager {

struct KernelRange;  // pager/tier/kernel_range.h
struct BlockSpan;

// From AcquireRequests::ask() until the acquire with it returns, or AcquireRequests::withdraw(), its regions cannot be
// freed but by shutdown. Any thread may look at `cancelled`; the rest is the asker's, and then the acquire's.
struct AcquireRequest {
  std::atomic<bool> cancelled{false};
  std::vector<uint64_t> regions;  // ids, of each range
  // How long for releases whose streams have not got there. Then -EAGAIN: they have the room; -EALREADY: the blocks.
  uint64_t patience_ns = UINT64_MAX;
  // The thread that acquires makes room and begins copies itself, where it can: whoever cancels waits for that long.
  // The driver maps for one thread at a time, and two that want it take turns at three times the cost.
  bool moves_blocks = false;
  // What is leased for writing counts as changed, unless KernelRanges::not_changed() says before the end that it was
  // not.
  bool tells_stores = false;

  // Where an acquire waits.
  static core::Status check(const AcquireRequest* ask) {
    if (ask == nullptr || !ask->cancelled.load(std::memory_order_relaxed)) return {};
    return core::error(ECANCELED, "the lease was cancelled before it was ready");
  }
};

// Under the pager's lock. The ranges are in the regions that they were in when they were asked for. null: nobody asked.
core::Status check_asked(std::span<const BlockSpan> spans, const AcquireRequest* ask);

}  // namespace vmem::pager
