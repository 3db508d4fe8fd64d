// An asynchronous acquire: the caller that asks for it does not wait in it.
#pragma once

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <span>
#include <vector>

#include "core/status.h"

namespace vmem::pager {

struct KernelRange;  // pager/tier/kernel_ranges.h
struct BlockSpan;

// From AcquireRequests::ask() until the acquire returns, or AcquireRequests::withdraw(), only
// shutdown can free its regions. Any thread may read `cancelled`. All else belongs to the asking
// thread, and then to the acquire.
struct AcquireRequest {
  std::atomic<bool> cancelled{false};
  std::vector<uint64_t> regions;  // the region id of each range
  // How long to wait for releases that their streams have not reached. Then the acquire returns
  // -EAGAIN if they have the room, or -EALREADY if they have the blocks.
  uint64_t patience_ns = UINT64_MAX;
  // The acquiring thread makes room and begins copies itself, where it can. A thread that cancels
  // waits for that. The driver maps for one thread at a time; two threads that take turns cost far
  // more.
  bool moves_blocks = false;
  // Blocks leased for writing count as changed, unless KernelRanges::not_changed() says before the
  // end that they were not.
  bool tells_stores = false;

  // Called where an acquire waits. Returns -ECANCELED if it was cancelled.
  static core::Status check(const AcquireRequest* ask) {
    if (ask == nullptr || !ask->cancelled.load(std::memory_order_relaxed)) return {};
    return core::error(ECANCELED, "the lease was cancelled before it was ready");
  }
};

// Call under the pager's lock. Returns -EINVAL if a range is not in the region that it was in when
// it was asked for, or -ECANCELED. ask: null for an acquire that was not asked for.
core::Status check_asked(std::span<const BlockSpan> spans, const AcquireRequest* ask);

}  // namespace vmem::pager
