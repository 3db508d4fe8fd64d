#include "pager/host/retries.h"

#include <algorithm>

namespace vmem::pager {

Retry* Retries::find(const Region& r, BlockIndex b) {
  const auto known =
      std::find_if(queue_.begin(), queue_.end(), [&](const Retry& e) { return e.region == &r && e.block == b; });
  return known == queue_.end() ? nullptr : &*known;
}

Retry* Retries::add(Region& r, BlockIndex b, uint64_t now_ns) {
  Retry* known = find(r, b);
  if (known == nullptr) {
    Retry fresh;
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

uint64_t Retries::next_ns() const {
  uint64_t next = UINT64_MAX;
  for (const Retry& e : queue_) next = std::min(next, e.due_ns);
  return next;
}

bool Retries::want_memory() const {
  return std::any_of(queue_.begin(), queue_.end(), [](const Retry& e) { return e.memory; });
}

Retry* Retries::due(uint64_t now_ns) {
  const auto first = std::find_if(queue_.begin(), queue_.end(), [&](const Retry& e) { return e.due_ns <= now_ns; });
  return first == queue_.end() ? nullptr : &*first;
}

void Retries::erase(const Region& r, BlockIndex b) {
  queue_.erase_if([&](const Retry& e) { return e.region == &r && e.block == b; });
}

void Retries::forget(const Region& r) {
  queue_.erase_if([&](const Retry& e) { return e.region == &r; });
}

}  // namespace vmem::pager
