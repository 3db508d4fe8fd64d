#include "pager/host/memory_waits.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <string>

#include "core/clock.h"
#include "core/log.h"
#include "core/step.h"
#include "pager/host/host_tier.h"

namespace vmem::pager {

PooledList<MemoryWaiter>::iterator MemoryWaitQueue::behind(Urgency urgency) {
  if (urgency != Urgency::fault) return queue_.end();
  return std::find_if(queue_.begin(), queue_.end(), [](const MemoryWaiter& s) { return s.urgency != Urgency::fault; });
}

bool MemoryWaitQueue::add(const MemoryWaiter& what) {
  const core::Block& block = what.region->table[what.block];
  if (marked(block)) {
    if (what.urgency != Urgency::fault) return true;
    queue_.erase_if([&](const MemoryWaiter& s) { return s.region == what.region && s.block == what.block; });
    what.region->table.clear(what.block, core::kWaitsForMemory);
  }
  if (!queue_.insert(behind(what.urgency), what)) return false;
  what.region->table.mark(what.block, core::kWaitsForMemory);
  return true;
}

void MemoryWaitQueue::pop() {
  queue_.front().region->table.clear(queue_.front().block, core::kWaitsForMemory);
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
  r.table.clear(b, core::kWaitsForMemory);
}

void MemoryWaitQueue::give_up_acquire(Region& r, BlockIndex b) {
  const size_t before = queue_.size();
  queue_.erase_if(
      [&](const MemoryWaiter& s) { return s.region == &r && s.block == b && s.urgency == Urgency::acquire; });
  if (queue_.size() != before) r.table.clear(b, core::kWaitsForMemory);
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

MemoryWaits::MemoryWaits(PagerContext& ctx, HostTier& host) : ctx_(ctx), host_(host) {}

bool MemoryWaits::starve(Region& r, BlockIndex b, Urgency urgency, uint64_t since_ns, uint64_t mark, uint32_t thread) {
  if (urgency != Urgency::fault && MemoryWaitQueue::marked(r.table[b])) return true;
  const uint64_t now = now_ns();
  const uint64_t lived = ctx_.deadline.look(now);
  host_.pressure.wake_all_reclaim();
  return queue_.add({&r, b, urgency, since_ns != 0 ? since_ns : now, since_ns != 0 ? mark : lived, thread});
}

bool MemoryWaits::starve_fault(Region& r, BlockIndex b, uint64_t since_ns, uint64_t mark, uint32_t thread) {
  if (starve(r, b, Urgency::fault, since_ns, mark, thread)) return true;
  r.table.answer_faults(b);
  ctx_.trap.wake(r.address(b), r.block_size).ignore();
  return false;
}

// If smaller blocks could overtake, a larger one might wait for ever.
bool MemoryWaits::overtakes(const Region& r) const {
  if (queue_.empty() || queue_.front().urgency != Urgency::fault) return false;
  const MemoryWaiter& first = queue_.front();
  return first.region->block_size > r.block_size &&
         ctx_.map.progress().waited(first.mark) > ctx_.deadline.limit_ns() / 4;
}

// Returns the bytes of blocks that could not leave because a page of them is pinned.
uint64_t MemoryWaits::pinned_bytes() const {
  uint64_t bytes = 0;
  for (core::FrameId id = 0; id < ctx_.map.frame_table().size(); ++id) {
    const Frame& frame = ctx_.map.frame_table()[id];
    if (frame.region != nullptr && frame.pins.pinned) bytes += frame.region->block_size;
  }
  return bytes;
}

namespace {

// Returns the byte count of the read or write call that the thread is in, or 0 for other calls.
uint64_t bytes_of_call(uint32_t thread) {
  const std::string path = "/proc/self/task/" + std::to_string(thread) + "/syscall";
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  std::array<char, 256> line{};
  const ssize_t got = read(fd, line.data(), line.size() - 1);
  close(fd);
  long call = -1;
  unsigned long long count = 0;
  if (got <= 0 || sscanf(line.data(), "%ld %*s %*s 0x%llx", &call, &count) != 2) return 0;
  return call == SYS_read || call == SYS_write || call == SYS_pread64 || call == SYS_pwrite64 ? count : 0;
}

constexpr uint64_t kPinsMayEnd = 1000000000;  // ns in which reads and writes of other threads usually end

}  // namespace

// Returns true if the first waiter is in a system call over more bytes than the budget has, while
// most of the budget is pinned: that call holds the pins, and ends none before it has the rest.
// Drops and retakes the lock.
bool MemoryWaits::waits_for_itself(Lock& lock, uint64_t now) {
  const MemoryWaiter s = queue_.front();
  if (s.thread == 0 || now < next_look_ns_ || !ctx_.map.progress().over(s.mark, kPinsMayEnd)) return false;
  next_look_ns_ = now + StallClock::kSlice;
  if (pinned_bytes() < ctx_.frames.room() / 2) return false;
  lock.unlock();
  const uint64_t wanted = bytes_of_call(s.thread);
  lock.lock();
  if (wanted <= ctx_.frames.room() || queue_.empty()) return false;
  const MemoryWaiter& first = queue_.front();
  return first.region == s.region && first.block == s.block && first.thread == s.thread;
}

Status MemoryWaits::given_up(const MemoryWaiter& s) {
  const uint64_t pinned = pinned_bytes();
  const uint64_t leased = ctx_.reserve.pinned();
  const char* const advice = pinned >= ctx_.frames.room() / 2 ? "make such calls smaller than host_budget, or raise it"
                             : leased >= ctx_.frames.room() / 2 ? "release leases, or raise host_budget"
                                                                : "raise host_budget";
  const auto if_pinned = [&](const char* text) { return pinned != 0 ? text : ""; };
  const Status cause = ctx_.writeback_throttle.error().ok() ? ctx_.map.refusal() : ctx_.writeback_throttle.error();
  return core::error(ENOMEM,
                     "no memory within host_budget %s for %u ms and nothing can be evicted%s%.*s%s%s%s%s%s%s, %s",
                     core::human_bytes(ctx_.budget.limit()).c_str(),
                     static_cast<unsigned>(ctx_.map.progress().waited(s.mark) / 1000000), cause.ok() ? "" : ": ",
                     static_cast<int>(cause.text().size()), cause.text().data(), if_pinned(": "),
                     if_pinned(core::human_bytes(pinned).c_str()),
                     if_pinned(" of it is pinned by direct I/O that is under way or by registered buffers, "),
                     if_pinned(core::human_bytes(leased).c_str()), if_pinned(" by leases; "), if_pinned(advice),
                     ctx_.map.describe_locked(*s.region, s.block).c_str());
}

bool MemoryWaits::check_starved(Lock& lock, uint64_t now) {
  ctx_.deadline.look(now);
  // While a transition is in flight, the disk is merely slow: its end may free the memory. The same
  // holds for a write that will be retried.
  if (ctx_.map.transitions().in_flight() || ctx_.writeback_throttle.pause(now) != 0 ||
      ctx_.writeback_throttle.files_pause(now))
    return false;
  while (!queue_.empty()) {
    const MemoryWaiter s = queue_.front();
    if (s.urgency != Urgency::fault) return false;
    if (!ctx_.map.progress().over(s.mark, ctx_.deadline.limit_ns()) && !waits_for_itself(lock, now)) return false;
    Region& r = *s.region;
    const Block& block = r.table[s.block];
    if (block.state == State::staged) {
      // No other copy of the bytes exists: they stay, and so does the faulting thread.
      VMEM_LOG_OFTEN(core::Level::error,
                     "no memory within host_budget %s for %u ms to put a block in place, %s; accesses of it wait",
                     core::human_bytes(ctx_.budget.limit()).c_str(), ctx_.tunables.fault_timeout_ms,
                     ctx_.map.describe_locked(r, s.block).c_str());
      queue_.wait_again(now, ctx_.deadline.look(now));
      return false;
    }
    const auto brought = [&] { return block.state != State::unpopulated && block.state != State::stored; };
    if (brought()) {
      queue_.pop();
      continue;
    }
    // Without memory to remember the block, nothing would revive it later: the fault waits on.
    if (!host_.failed.reserve_dropped()) return false;
    queue_.take();
    const Status why = given_up(s);
    VMEM_LOG_OFTEN(core::Level::error, "%.*s: an access gets SIGBUS; the contents are intact",
                   static_cast<int>(why.text().size()), why.text().data());
    // Log before the signal. The block is in no queue but keeps its mark, so that later requests
    // wait.
    ++r.counts.in_flight;
    lock.unlock();
    core::settle_log();
    core::step("starved.said");
    lock.lock();
    --r.counts.in_flight;
    ctx_.map.notify();
    queue_.unmark(r, s.block);
    if (r.dying) return true;
    if (brought()) return true;
    if (!host_.failed.drop(r, s.block, why)) {
      starve_fault(r, s.block, s.since_ns, s.mark);
      return true;
    }
    ctx_.map.notify();
    return true;
  }
  return false;
}

bool MemoryWaits::must_evict() const {
  uint64_t first = 0;  // bytes that the first waiter needs
  if (!queue_.empty()) {
    const MemoryWaiter& waits = queue_.front();
    first = waits.region->block_size + ctx_.reserve.left_free(waits.urgency, waits.region->block_size);
  }
  return ctx_.reserve.short_of(first, ctx_.writeback_throttle.leaving());
}

}  // namespace vmem::pager
