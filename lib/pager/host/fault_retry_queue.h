// Blocks whose accesses could not be answered, because the trap refused what answers them, or the kernel had no memory
// to read them: their threads sleep for a pause that grows, and make the access again.
//
//   a block is in here once at most: its threads sleep, or have been woken and not been refused since, or get SIGBUS
//   a pause is twice as long as the one before, and no longer than kLongest
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
  uint64_t due_ns = 0, pause_ns = 0;  // it ends then, and was so long
  uint64_t refused_ns = 0;            // the last time
  uint64_t lived_ns = 0;              // for which it has been refused; a machine that stands still lives through none
  uint64_t mark = 0;                  // of the wait, as MemoryWaiter has it
  unsigned times = 0;                 // refused, since it was last given up
  bool memory = false;                // .. for want of memory: given up when nothing goes on
  bool accessed = false;              // by a thread of the application; an acquire gives up by itself
  bool asleep = false;                // threads wait for the end of the pause
  bool bus = false;                   // they get SIGBUS until then
};

class FaultRetryQueue {
 public:
  static constexpr uint64_t kShortest = 1000000, kLongest = 256 * kShortest, kSlice = 100000000;  // ns
  static constexpr unsigned kTimes = 10;  // at least, until it is given up: a clock alone tells nothing

  [[nodiscard]] bool reserve(size_t entries) noexcept { return queue_.reserve(entries); }
  bool empty() const { return queue_.empty(); }
  FaultRetry* find(const Region& r, core::BlockIndex b);
  // Refused now: its threads are to sleep. nullptr: there is no memory to know it by.
  FaultRetry* add(Region& r, core::BlockIndex b, uint64_t now_ns);
  // It has been refused for so long that it is to be given up.
  static bool over(const FaultRetry& retry, uint64_t limit_ns) {
    return retry.times > kTimes && retry.lived_ns >= limit_ns;
  }
  // Threads that meet the block go to sleep with those that do already.
  bool asleep(const Region& r, core::BlockIndex b) {
    const FaultRetry* const known = empty() ? nullptr : find(r, b);
    return known != nullptr && known->asleep;
  }
  // .. and so does an access.
  bool waits(const Region& r, core::BlockIndex b) {
    FaultRetry* const known = empty() ? nullptr : find(r, b);
    if (known == nullptr || !known->asleep) return false;
    return known->accessed = true;
  }
  // One of them is there for want of memory.
  bool want_memory() const;
  // When the next pause ends; UINT64_MAX: there is none.
  uint64_t next_ns() const;
  // One whose pause has ended; nullptr: none has.
  FaultRetry* due(uint64_t now_ns);
  void erase(const Region& r, core::BlockIndex b);
  // The region goes.
  void forget(const Region& r);

 private:
  PooledList<FaultRetry> queue_;
};

}  // namespace vmem::pager
