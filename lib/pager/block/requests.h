// Requests for blocks that are served later, and their queues. Plain data under the pager's lock.
#pragma once

#include <cstdint>
#include <iterator>
#include <list>

#include "core/types.h"
#include "device/device.h"
#include "pager/block/pooled_list.h"
#include "pager/block/region.h"

namespace vmem::pager {

struct BlockSpan {  // a checked range
  Region* region;
  core::BlockIndex first, last;  // inclusive
};
struct PromotionRequest {  // blocks that are to come to a device, in order
  Region* region;
  core::BlockIndex next, last;
  int device;
  core::Urgency urgency;
  const void* owner;             // an acquire that waits; null: none
  core::BlockIndex read_to = 0;  // blocks before it were read, or could not be, while there was no room
};
// Takes the blocks of the span out of older hints to a device, since a newer request wants them
// elsewhere.
inline void forget_hints(PooledList<PromotionRequest>& promotion_requests, const BlockSpan& span) {
  for (auto i = promotion_requests.begin(); i != promotion_requests.end();) {
    PromotionRequest& w = *i++;
    if (w.owner != nullptr || w.region != span.region || w.next > span.last || span.first > w.last) continue;
    PromotionRequest rest = w;
    rest.next = span.last + 1;
    w.last = span.first - 1;  // below w.next if nothing is left before the span
    const bool before = w.next < span.first;
    if (rest.next <= rest.last && before) {
      if (!promotion_requests.insert(i, rest)) continue;  // without memory the hint is dropped
    } else if (rest.next <= rest.last) {
      w = rest;
    } else if (!before) {
      promotion_requests.erase(std::prev(i));
    }
  }
}
struct StreamHint {  // a vmem_prefetch that takes effect when its stream reaches it
  uint64_t id = 0;
  Region* region = nullptr;  // null: freed since
  core::BlockIndex first = 0, last = 0;
  int location = 0;
  device::Ticket ticket;
};
struct DemotionRequest {  // a vmem_prefetch from a device to host memory or the SSD
  Region* region;
  core::BlockIndex first, next, last;
  bool to_ssd;
};
struct DeviceQueues {  // of the device tier
  static constexpr size_t kMaxSpeculative = 1024;

  PooledList<PromotionRequest> promotion_requests;  // acquires first
  PooledList<DemotionRequest> demotion_requests;
  std::list<StreamHint> stream_hints;  // at most kMaxSpeculative; those polled longest ago first
  uint64_t last_hint = 0;
};

}  // namespace vmem::pager
