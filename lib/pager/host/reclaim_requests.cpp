#include "pager/host/reclaim_requests.h"

#include "core/status.h"

namespace vmem::pager {

void ReclaimRequests::go_on(core::BlockIndex next) {
  BlockSpan& span = queue_.front().span;
  span.first = next;
  if (next > span.last || next >= span.region->blocks) queue_.pop_front();
}

void ReclaimRequests::forget(const Region& r) {
  queue_.erase_if([&](const ReclaimRequest& e) { return e.span.region == &r; });
}

std::string ReclaimRequests::check() const {
  if (queue_.size() > kMost) return core::strprintf("%zu requests to evict are known", queue_.size());
  for (const ReclaimRequest& e : queue_) {
    if (e.span.first > e.span.last || e.span.last >= e.span.region->blocks) {
      return core::strprintf(
          "a request to evict is of blocks %llu to %llu, of %llu", static_cast<unsigned long long>(e.span.first),
          static_cast<unsigned long long>(e.span.last), static_cast<unsigned long long>(e.span.region->blocks));
    }
  }
  return "";
}

}  // namespace vmem::pager
