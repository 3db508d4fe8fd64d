// Decides which blocks leave host memory, and when: for waiters, for the watermarks, for prefetches
// to the SSD, and behind scans. policy::EvictionPolicy names the victims, and Writeback takes them
// out. ReclaimThreads makes the calls.
//
// - A leased block, or a region that is being freed, is not reclaimed.
// - A victim that could not be taken is admitted to its policy again.
//
// The pager's lock protects both classes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "pager/account/context.h"
#include "pager/block/pooled_list.h"
#include "pager/host/background_writes.h"
#include "pager/host/writeback.h"

namespace vmem::pager {

struct HostTier;

struct ReclaimRequest {
  BlockSpan span;
  bool behind;  // a scan has passed them; blocks read ahead for another reader stay
};

// Requests to evict blocks although memory is not short: by vmem_prefetch to the SSD, and for
// blocks that a scan has passed.
//
// - Requests are in the order of arrival. Each has the blocks that were not looked at yet, at least
//   one.
// - All blocks lie in their regions. There are at most kMost requests.
//
// add() may need memory; nothing else does.
class ReclaimRequests {
 public:
  static constexpr size_t kMost = 1024;

  bool empty() const { return queue_.empty(); }
  bool full() const { return queue_.size() >= kMost; }
  // The queue must not be full. Returns false, with nothing changed, if there is no memory.
  [[nodiscard]] bool add(const BlockSpan& span, bool behind) { return queue_.push_back({span, behind}); }

  // The queue must not be empty.
  const ReclaimRequest& first() const { return queue_.front(); }
  // The first request goes on at block `next`. Removes the request if no blocks are left.
  void go_on(core::BlockIndex next);
  // Removes the requests of a region that is being freed.
  void forget(const Region& r);

  // For tests. Returns the first error, or an empty string.
  std::string check() const;

 private:
  PooledList<ReclaimRequest> queue_;
};

class Reclaim {
 public:
  struct Short {
    bool host = false;                    // host memory
    bool stuck = false;                   // blocks wait, and nothing is in flight
    std::optional<uint8_t> staging = {};  // staging frames of this pool
  };

  Reclaim(PagerContext& ctx, HostTier& host);

  // Evicts a batch of victims, or waits a little if none can be taken. Returns false if only a
  // write can make room, and no write is possible for a while.
  bool shrink(Lock& lock, const Short& what, uint8_t* next_staging) VMEM_LOCKED;
  // Evicts a few blocks of the oldest request; there is one. Leased blocks are passed over. Blocks
  // in transition leave when that is over.
  void serve_request(Lock& lock) VMEM_LOCKED;
  // Writes are possible: admits a few of the blocks that were set aside to their policies. Returns
  // false if it has found none yet.
  bool admit_aside(uint64_t now_ns) VMEM_LOCKED;
  // The block's transition is over and the block is in host memory. A prefetch to the SSD met the
  // block in that transition: requests the eviction again.
  void evict_after_transition(Region& r, core::BlockIndex b) VMEM_LOCKED;

 private:
  void set_aside(core::FrameId id) VMEM_LOCKED;

  PagerContext& ctx_;
  HostTier& host_;
  // Some blocks are set aside: no policy knows them until they can be written. any_aside_: there
  // may be some. aside_since_: some were set aside since the search for them began anew.
  // aside_next_: where the search goes on.
  bool any_aside_ VMEM_GUARDED_BY(core::big_lock) = false;
  bool aside_since_ VMEM_GUARDED_BY(core::big_lock) = false;
  core::FrameId aside_next_ VMEM_GUARDED_BY(core::big_lock) = 0;
  // The first time at which a file that refused a write is asked again: its blocks stay aside until
  // then.
  uint64_t aside_ns_ VMEM_GUARDED_BY(core::big_lock) = UINT64_MAX;
};

}  // namespace vmem::pager
