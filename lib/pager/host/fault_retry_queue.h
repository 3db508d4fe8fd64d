// Blocks whose accesses could not be answered, because the trap refused that, or because the kernel
// had no memory to read them. Their threads sleep for a pause that grows, and repeat the access.
//
// - A block is queued at most once. Its threads sleep, were woken and not refused since, or get
//   SIGBUS.
// - A pause is twice as long as the one before, up to kLongest.
//
// Not thread-safe: the pager's lock protects it. add() may need memory; nothing else does.
#pragma once

#include <cstdint>

#include "core/pooled_list.h"
#include "pager/block/region.h"

namespace vmem::pager {

struct FaultRetry {
  Region* region = nullptr;
  core::BlockIndex block = 0;
  uint64_t due_ns = 0, pause_ns = 0;  // the end of the pause, and its length
  uint64_t refused_ns = 0;            // the last time it was refused
  uint64_t lived_ns = 0;              // time of refusal, but none in which the machine stood still
  uint64_t mark = 0;                  // of the wait, as in MemoryWaiter
  unsigned times = 0;                 // refusals since it was last given up
  bool memory = false;                // refused for want of memory: given up when nothing makes progress
  bool accessed = false;              // by a thread of the program; an acquire gives up its own wait
  bool asleep = false;                // threads wait for the end of the pause
  bool bus = false;                   // threads get SIGBUS until the end of the pause
};

class FaultRetryQueue {
 public:
  static constexpr uint64_t kShortest = 1000000, kLongest = 256 * kShortest, kSlice = 100000000;  // ns
  static constexpr unsigned kTimes = 10;  // refusals before it is given up: time alone proves nothing

  [[nodiscard]] bool reserve(size_t entries) noexcept { return queue_.reserve(entries); }
  bool empty() const { return queue_.empty(); }
  FaultRetry* find(const Region& r, core::BlockIndex b);
  // The block was refused now: its threads are to sleep. Returns null if there is no memory for the
  // entry.
  FaultRetry* add(Region& r, core::BlockIndex b, uint64_t now_ns);
  // Returns true if the block has been refused for so long that it is to be given up.
  static bool over(const FaultRetry& retry, uint64_t limit_ns) {
    return retry.times > kTimes && retry.lived_ns >= limit_ns;
  }
  // Returns true if threads sleep for the block: others that meet it join them.
  bool asleep(const Region& r, core::BlockIndex b) {
    const FaultRetry* const known = empty() ? nullptr : find(r, b);
    return known != nullptr && known->asleep;
  }
  // The same for an access, which the entry remembers.
  bool waits(const Region& r, core::BlockIndex b) {
    FaultRetry* const known = empty() ? nullptr : find(r, b);
    if (known == nullptr || !known->asleep) return false;
    return known->accessed = true;
  }
  // Returns true if a queued block was refused for want of memory.
  bool want_memory() const;
  // Returns when the next pause ends; UINT64_MAX: there is none.
  uint64_t next_ns() const;
  // Returns an entry whose pause has ended, or null.
  FaultRetry* due(uint64_t now_ns);
  void erase(const Region& r, core::BlockIndex b);
  // Removes the entries of a region that is being freed.
  void forget(const Region& r);

 private:
  PooledList<FaultRetry> queue_;
};

}  // namespace vmem::pager
