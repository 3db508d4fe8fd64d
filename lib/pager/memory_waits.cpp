#include "pager/memory_waits.h"

#include <cerrno>

#include "core/log.h"
#include "core/step.h"
#include "pager/clock.h"

namespace vmem::pager {

// Since since_ns, if given: a wait that was interrupted by a try that failed is one wait. False: there is no memory to
// remember it by, and nothing has changed.
bool MemoryWaits::starve(Region& r, BlockIndex b, Urgency urgency, uint64_t since_ns, uint64_t mark) {
  if (urgency != Urgency::fault && StarvedQueue::marked(r.table[b])) return true;
  const uint64_t now = now_ns();
  const uint64_t lived = clock_.look(now);
  pressure_.call_evictors();
  return queue_.add({&r, b, urgency, since_ns != 0 ? since_ns : now, since_ns != 0 ? mark : lived});
}

// A touch waits for memory. False: there is none to remember it by. The toucher looks again then, and is reported
// again.
bool MemoryWaits::starve_fault(Region& r, BlockIndex b, uint64_t since_ns, uint64_t mark) {
  if (starve(r, b, Urgency::fault, since_ns, mark)) return true;
  r.table[b].flags &= static_cast<uint16_t>(~(core::kWanted | core::kWantedWrite));
  trap_.wake(r.address(b), r.block_size).ignore();
  return false;
}

// A block that has waited long for more memory than this one needs would wait for ever, were each bit that comes free
// given to smaller ones.
bool MemoryWaits::overtakes(const Region& r) const {
  if (queue_.empty() || queue_.front().urgency != Urgency::fault) return false;
  const Starved& first = queue_.front();
  return first.region->block_size > r.block_size && map_.progress().waited(first.mark) > clock_.limit_ns() / 4;
}

// Faults that wait for memory while nothing goes on get SIGBUS after the time-out; the bytes stay where they are. True:
// one did, and who waits behind it may be served.
bool MemoryWaits::check_starved(Lock& lock, uint64_t now) {
  clock_.look(now);
  // While a move is under way the disk is merely slow: what it ends with may be the memory that is wanted. The same of
  // a write that is to be tried again.
  if (map_.moves().in_flight() || writes_.pause(now) != 0) return false;
  while (!queue_.empty()) {
    const Starved s = queue_.front();
    if (s.urgency != Urgency::fault || !map_.progress().over(s.mark, clock_.limit_ns())) return false;
    Region& r = *s.region;
    Block& block = r.table[s.block];
    if (block.state == State::held) {
      // Its bytes are here and nowhere else: they stay, and so does the toucher.
      VMEM_LOG_OFTEN(core::Level::error,
                     "no memory within host_budget %s for %u ms to put a block in place, %s; accesses of it wait",
                     core::human_bytes(budget_.limit()).c_str(), config_.fault_timeout_ms,
                     map_.where(r, s.block).c_str());
      queue_.wait_again(now, clock_.look(now));
      return false;
    }
    const auto brought = [&] { return block.state != State::untouched && block.state != State::stored; };
    if (brought()) {
      queue_.pop();
      continue;
    }
    // Without memory to know it by when there is room again, it waits on.
    if (!failed_.reserve_dropped()) return false;
    queue_.take();
    const Status why = core::error(
        ENOMEM, "no memory within host_budget %s for %u ms and nothing can be evicted%s%.*s, %s",
        core::human_bytes(budget_.limit()).c_str(), config_.fault_timeout_ms, writes_.error().ok() ? "" : ": ",
        static_cast<int>(writes_.error().text().size()), writes_.error().text().data(), map_.where(r, s.block).c_str());
    VMEM_LOG_OFTEN(core::Level::error, "%.*s: an access gets SIGBUS; the contents are intact",
                   static_cast<int>(why.text().size()), why.text().data());
    // Said before the signal. The block is in no queue, but marked as if it were: who wants it meanwhile waits.
    ++r.in_flight;
    lock.unlock();
    core::settle_log();
    core::step("starved.said");
    lock.lock();
    --r.in_flight;
    map_.notify();
    queue_.unmark(r, s.block);
    if (r.dying) return true;
    if (brought()) return true;
    if (!failed_.drop(r, s.block, why)) {
      starve_fault(r, s.block, s.since_ns, s.mark);
      return true;
    }
    map_.notify();
    return true;
  }
  return false;
}

// Locked. Somebody waits for memory, or will soon.
bool MemoryWaits::must_evict() const {
  uint64_t first = 0;  // what the first that waits needs
  if (!queue_.empty()) {
    const Starved& waits = queue_.front();
    first = waits.region->block_size + reserve_.left_free(waits.urgency, waits.region->block_size);
  }
  return reserve_.short_of(first, writes_.leaving());
}

}  // namespace vmem::pager
