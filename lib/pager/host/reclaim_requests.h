// Blocks that are to leave host memory though nobody needs it: vmem_prefetch to the SSD, and what a scan has passed.
//
//   in the order in which they were asked for; of each request the blocks that nobody has looked at yet
//   all lie in their regions, at least one a request, and there are at most kMost requests
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
  bool behind;  // a scan left them: what somebody else has ahead of him in there stays
};

class ReclaimRequests {
 public:
  static constexpr size_t kMost = 1024;

  bool empty() const { return queue_.empty(); }
  bool full() const { return queue_.size() >= kMost; }
  // Must not be full. False: no memory, and nothing has changed.
  [[nodiscard]] bool add(const BlockSpan& span, bool behind) { return queue_.push_back({span, behind}); }

  // There must be one.
  const ReclaimRequest& first() const { return queue_.front(); }
  // The blocks of the first before `next` have been looked at. With none left it is over.
  void go_on(core::BlockIndex next);
  // The region goes.
  void forget(const Region& r);

  // Tests: what is wrong; empty: nothing.
  std::string check() const;

 private:
  PooledList<ReclaimRequest> queue_;
};

}  // namespace vmem::pager
