#include "pager/host/memory_waits.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <string>

#include "core/clock.h"
#include "core/log.h"
#include "core/step.h"

namespace vmem::pager {

// Since since_ns, if given: a wait that was interrupted by a try that failed is one wait. False: there is no memory to
// remember it by, and nothing has changed.
bool MemoryWaits::starve(Region& r, BlockIndex b, Urgency urgency, uint64_t since_ns, uint64_t mark, uint32_t thread) {
  if (urgency != Urgency::fault && MemoryWaitQueue::marked(r.table[b])) return true;
  const uint64_t now = now_ns();
  const uint64_t lived = deadline_.look(now);
  pressure_.wake_all_reclaim();
  return queue_.add({&r, b, urgency, since_ns != 0 ? since_ns : now, since_ns != 0 ? mark : lived, thread});
}

// An access waits for memory. False: there is none to remember it by. The faulting thread looks again then, and is
// reported again.
bool MemoryWaits::starve_fault(Region& r, BlockIndex b, uint64_t since_ns, uint64_t mark, uint32_t thread) {
  if (starve(r, b, Urgency::fault, since_ns, mark, thread)) return true;
  r.table[b].flags &= static_cast<uint16_t>(~(core::kFaultPending | core::kStorePending));
  trap_.wake(r.address(b), r.block_size).ignore();
  return false;
}

// A block that has waited long for more memory than this one needs would wait for ever, were each bit that comes free
// given to smaller ones.
bool MemoryWaits::overtakes(const Region& r) const {
  if (queue_.empty() || queue_.front().urgency != Urgency::fault) return false;
  const MemoryWaiter& first = queue_.front();
  return first.region->block_size > r.block_size && map_.progress().waited(first.mark) > deadline_.limit_ns() / 4;
}

// Of blocks that were to leave, and could not.
uint64_t MemoryWaits::pinned_bytes() const {
  uint64_t bytes = 0;
  for (core::FrameId id = 0; id < map_.frame_table().size(); ++id) {
    const Frame& frame = map_.frame_table()[id];
    if (frame.region != nullptr && frame.pinned) bytes += frame.region->block_size;
  }
  return bytes;
}

namespace {

// Bytes that a thread wants of the system call that it is in: of those that read or write one buffer; else 0.
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

constexpr uint64_t kPinsMayEnd = 1000000000;  // ns: what is read or written by others meanwhile is done, as a rule

}  // namespace

// Locked on entry and on return, and not meanwhile. The first that waits is in a system call over more than the budget,
// most of which is pinned: by that call, which lets go of nothing before it has the rest.
bool MemoryWaits::waits_for_itself(Lock& lock, uint64_t now) {
  const MemoryWaiter s = queue_.front();
  if (s.thread == 0 || now < next_look_ns_ || !map_.progress().over(s.mark, kPinsMayEnd)) return false;
  next_look_ns_ = now + StallClock::kSlice;
  if (pinned_bytes() < frames_.room() / 2) return false;
  lock.unlock();
  const uint64_t wanted = bytes_of_call(s.thread);
  lock.lock();
  if (wanted <= frames_.room() || queue_.empty()) return false;
  const MemoryWaiter& first = queue_.front();
  return first.region == s.region && first.block == s.block && first.thread == s.thread;
}

Status MemoryWaits::given_up(const MemoryWaiter& s) {
  const uint64_t pinned = pinned_bytes();
  const Status cause = writes_.error().ok() ? map_.refusal() : writes_.error();
  return core::error(ENOMEM, "no memory within host_budget %s for %u ms and nothing can be evicted%s%.*s%s%s%s, %s",
                     core::human_bytes(budget_.limit()).c_str(),
                     static_cast<unsigned>(map_.progress().waited(s.mark) / 1000000), cause.ok() ? "" : ": ",
                     static_cast<int>(cause.text().size()), cause.text().data(), pinned != 0 ? ": " : "",
                     pinned != 0 ? core::human_bytes(pinned).c_str() : "",
                     pinned != 0 ? " of it is pinned, by direct I/O that is under way or by registered buffers; make "
                                   "such calls smaller than host_budget, or raise it"
                                 : "",
                     map_.where(*s.region, s.block).c_str());
}

// Faults that wait for memory while nothing goes on get SIGBUS after the time-out; the bytes stay where they are. True:
// one did, and who waits behind it may be served.
bool MemoryWaits::check_starved(Lock& lock, uint64_t now) {
  deadline_.look(now);
  // While a transition is under way the disk is merely slow: what it ends with may be the memory that is wanted. The
  // same of a write that is to be tried again.
  if (map_.transitions().in_flight() || writes_.pause(now) != 0 || writes_.files_pause(now)) return false;
  while (!queue_.empty()) {
    const MemoryWaiter s = queue_.front();
    if (s.urgency != Urgency::fault) return false;
    if (!map_.progress().over(s.mark, deadline_.limit_ns()) && !waits_for_itself(lock, now)) return false;
    Region& r = *s.region;
    Block& block = r.table[s.block];
    if (block.state == State::staged) {
      // Its bytes are here and nowhere else: they stay, and so does the faulting thread.
      VMEM_LOG_OFTEN(core::Level::error,
                     "no memory within host_budget %s for %u ms to put a block in place, %s; accesses of it wait",
                     core::human_bytes(budget_.limit()).c_str(), config_.fault_timeout_ms,
                     map_.where(r, s.block).c_str());
      queue_.wait_again(now, deadline_.look(now));
      return false;
    }
    const auto brought = [&] { return block.state != State::unpopulated && block.state != State::stored; };
    if (brought()) {
      queue_.pop();
      continue;
    }
    // Without memory to know it by when there is room again, it waits on.
    if (!failed_.reserve_dropped()) return false;
    queue_.take();
    const Status why = given_up(s);
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
    const MemoryWaiter& waits = queue_.front();
    first = waits.region->block_size + reserve_.left_free(waits.urgency, waits.region->block_size);
  }
  return reserve_.short_of(first, writes_.leaving());
}

}  // namespace vmem::pager
