#include "pager/host/readahead_queue.h"

#include <algorithm>
#include <utility>

#include "pager/block/transition.h"

namespace vmem::pager {

void ReadaheadQueue::forget(const Region& r, const policy::Run& run) {
  if (run.count == 0) return;
  const int64_t end = static_cast<int64_t>(run.first) + static_cast<int64_t>(run.count) * run.stride;
  for (Speculative& s : queue_) {
    if (s.region != &r || s.urgency != core::Urgency::readahead || s.stride != run.stride) continue;
    const int64_t left = end - static_cast<int64_t>(s.next), n = left / s.stride;
    if (left % s.stride != 0 || n <= 0 || static_cast<uint64_t>(n) > run.count) continue;
    s.advance(std::min(static_cast<uint64_t>(n), s.count));
  }
}

void ReadaheadQueue::forget(const Region& r) {
  queue_.erase_if([&](const Speculative& s) { return s.region == &r; });
}

void ReadaheadQueue::started(Transition& m) {
  m.read.speculative = true;
  if (!std::exchange(m.read.reads_ahead, true)) in_flight_ += m.region->block_size;
}

void ReadaheadQueue::ended(Transition& m) {
  if (std::exchange(m.read.reads_ahead, false)) in_flight_ -= m.region->block_size;
}

std::string ReadaheadQueue::check(std::span<const std::unique_ptr<Transition>> transitions) const {
  if (queue_.size() > kMost) return "too many windows wait to be read ahead";
  uint64_t counted = 0;
  for (const auto& m : transitions) {
    if (!m->read.reads_ahead) continue;
    if (m->begun_ns == 0) return "a move is over, and its block is said to be read ahead";
    counted += m->region->block_size;
  }
  if (counted == in_flight_) return "";
  return core::strprintf("%llu bytes are said to be read ahead, moves have %llu",
                         static_cast<unsigned long long>(in_flight_), static_cast<unsigned long long>(counted));
}

}  // namespace vmem::pager
