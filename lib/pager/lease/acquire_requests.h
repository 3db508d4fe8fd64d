// Asynchronous acquires: the checks on the asking thread, and what keeps their regions until the
// acquire returns.
//
// - Region::asked counts the region's ranges of asks that were not withdrawn.
#pragma once

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <span>
#include <vector>

#include "core/big_lock.h"
#include "core/status.h"
#include "vmem/vmem.h"

namespace vmem::pager {

struct BlockSpan;
struct PagerContext;

// The caller that asks for it does not wait in it.
//
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

class AcquireRequests {
 public:
  explicit AcquireRequests(PagerContext& ctx);

  // Checks that work of the device may be ordered with the stream. The host has no streams.
  core::Status check_stream(int location, void* stream) VMEM_UNLOCKED;
  // Call on the thread that names the stream: the meaning of "the default stream" may depend on it.
  core::Status ask(std::span<const vmem_range> ranges, int location, void* stream, AcquireRequest* ask) VMEM_UNLOCKED;
  // Undoes ask() with the same ranges. Their regions may be freed from here on. Shutdown may have
  // freed them before.
  void withdraw(std::span<const vmem_range> ranges, AcquireRequest* ask) VMEM_UNLOCKED;
  // Wakes the acquires that wait: they check whether they were cancelled.
  void wake() VMEM_UNLOCKED;

 private:
  PagerContext& ctx_;
};

}  // namespace vmem::pager
