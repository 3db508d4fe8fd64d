#include "pager/host/fault_retry_queue.h"

#include <algorithm>

namespace vmem::pager {

FaultRetry* FaultRetryQueue::find(const Region& r, BlockIndex b) {
  const auto known =
      std::find_if(queue_.begin(), queue_.end(), [&](const FaultRetry& e) { return e.region == &r && e.block == b; });
  return known == queue_.end() ? nullptr : &*known;
}

FaultRetry* FaultRetryQueue::add(Region& r, BlockIndex b, uint64_t now_ns) {
  FaultRetry* known = find(r, b);
  if (known == nullptr) {
    FaultRetry fresh;
    fresh.region = &r;
    fresh.block = b;
    fresh.refused_ns = now_ns;
    if (!queue_.push_front(fresh)) return nullptr;
    known = &queue_.front();
  }
  known->lived_ns += std::min(now_ns - known->refused_ns, known->pause_ns + kSlice);
  known->refused_ns = now_ns;
  known->pause_ns = std::clamp(2 * known->pause_ns, kShortest, kLongest);
  known->due_ns = now_ns + known->pause_ns;
  known->asleep = true;
  ++known->times;
  return known;
}

uint64_t FaultRetryQueue::next_ns() const {
  uint64_t next = UINT64_MAX;
  for (const FaultRetry& e : queue_) next = std::min(next, e.due_ns);
  return next;
}

bool FaultRetryQueue::want_memory() const {
  return std::any_of(queue_.begin(), queue_.end(), [](const FaultRetry& e) { return e.memory; });
}

FaultRetry* FaultRetryQueue::due(uint64_t now_ns) {
  const auto first =
      std::find_if(queue_.begin(), queue_.end(), [&](const FaultRetry& e) { return e.due_ns <= now_ns; });
  return first == queue_.end() ? nullptr : &*first;
}

void FaultRetryQueue::erase(const Region& r, BlockIndex b) {
  queue_.erase_if([&](const FaultRetry& e) { return e.region == &r && e.block == b; });
}

void FaultRetryQueue::forget(const Region& r) {
  queue_.erase_if([&](const FaultRetry& e) { return e.region == &r; });
}

}  // namespace vmem::pager
