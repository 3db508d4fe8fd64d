// Requests to evict blocks although memory is not short: by vmem_prefetch to the SSD, and for
// blocks that a scan has passed.
//
// - Requests are in the order of arrival. Each has the blocks that were not looked at yet, at least
//   one.
// - All blocks lie in their regions. There are at most kMost requests.
//
// Not thread-safe: the pager's lock protects it. add() may need memory; nothing else does.
#pragma once

#include <cstddef>
#include <string>

#include "core/pooled_list.h"
#include "core/types.h"
#include "pager/block/region.h"
#include "pager/block/transition.h"

namespace vmem::pager {

struct ReclaimRequest {
  BlockSpan span;
  bool behind;  // a scan has passed them; blocks read ahead for another reader stay
};

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

}  // namespace vmem::pager
