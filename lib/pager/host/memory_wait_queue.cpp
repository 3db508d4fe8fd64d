#include "pager/host/memory_wait_queue.h"

#include <algorithm>

namespace vmem::pager {

namespace {

void clear(Region& r, BlockIndex b) {
  r.table.clear(b, core::kWaitsForMemory);
}

}  // namespace

PooledList<MemoryWaiter>::iterator MemoryWaitQueue::behind(Urgency urgency) {
  if (urgency != Urgency::fault) return queue_.end();
  return std::find_if(queue_.begin(), queue_.end(), [](const MemoryWaiter& s) { return s.urgency != Urgency::fault; });
}

bool MemoryWaitQueue::add(const MemoryWaiter& what) {
  const core::Block& block = what.region->table[what.block];
  if (marked(block)) {
    if (what.urgency != Urgency::fault) return true;
    queue_.erase_if([&](const MemoryWaiter& s) { return s.region == what.region && s.block == what.block; });
    clear(*what.region, what.block);
  }
  if (!queue_.insert(behind(what.urgency), what)) return false;
  what.region->table.mark(what.block, core::kWaitsForMemory);
  return true;
}

void MemoryWaitQueue::pop() {
  clear(*queue_.front().region, queue_.front().block);
  queue_.pop_front();
}

void MemoryWaitQueue::wait_again(uint64_t now_ns, uint64_t mark) {
  MemoryWaiter& first = queue_.front();
  first.since_ns = now_ns;
  first.mark = mark;
  queue_.move_front(behind(first.urgency));
}

void MemoryWaitQueue::take() {
  queue_.pop_front();
  ++taken_;
}

void MemoryWaitQueue::unmark(Region& r, BlockIndex b) {
  --taken_;
  clear(r, b);
}

void MemoryWaitQueue::give_up_acquire(Region& r, BlockIndex b) {
  const size_t before = queue_.size();
  queue_.erase_if(
      [&](const MemoryWaiter& s) { return s.region == &r && s.block == b && s.urgency == Urgency::acquire; });
  if (queue_.size() != before) clear(r, b);
}

void MemoryWaitQueue::forget(const Region& r) {
  queue_.erase_if([&](const MemoryWaiter& s) { return s.region == &r; });
}

bool MemoryWaitQueue::accounts_for(const Region& r, BlockIndex b) const {
  return taken_ != 0 ||
         std::any_of(begin(), end(), [&](const MemoryWaiter& s) { return s.region == &r && s.block == b; });
}

std::string MemoryWaitQueue::check() const {
  bool acquires = false;
  for (auto s = begin(); s != end(); ++s) {
    if (acquires && s->urgency == Urgency::fault) return "an acquire is served before a fault";
    acquires |= s->urgency != Urgency::fault;
    if (!marked(s->region->table[s->block])) return "a block waits for memory, and is not marked";
    if (std::any_of(begin(), s, [&](const MemoryWaiter& o) { return o.region == s->region && o.block == s->block; }))
      return "a block waits for memory twice";
  }
  return "";
}

}  // namespace vmem::pager
