// How much of the host budget the machine lets the library use, how long unused memory is kept, and
// the condition variable of the reclaim threads.
//
// Without the module a frame is ordinary memory, and no frame is refused. With the module each
// frame is requested. A refusal is no failure: the budget is capped at the memory in use, reclaim
// threads make room within the cap, and after a while the cap is lifted.
//
// - A refusal never raises the cap that pressure set: while pressed(), the cap only falls.
//
// Not thread-safe: the pager's lock protects it.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>

#include "pager/account/context.h"

namespace vmem::pager {

class MemoryPressure {
 public:
  explicit MemoryPressure(PagerContext& ctx);

  // press(): the machine wants `bytes` back. hold_back_after_refusal(): the machine refused memory.
  void press(uint64_t bytes) VMEM_LOCKED;
  void hold_back_after_refusal(const core::Status& why) VMEM_LOCKED;
  bool pressed() const VMEM_LOCKED { return pressed_; }
  // Lifts the cap if its time is over.
  void lift_cap(uint64_t now_ns) VMEM_LOCKED;
  // Sets the administrator's limit; 0: none.
  void set_ceiling(uint64_t bytes) VMEM_LOCKED;

  // Memory may have come free: from now on, memory unused for Config::keep_ms goes back to the
  // system.
  void watch_idle() VMEM_LOCKED;
  // Returns when idle memory is to be released or the cap lifted; UINT64_MAX: never.
  uint64_t next_ns() const VMEM_LOCKED {
    return std::min(watching_ ? watch_until_ns_ : UINT64_MAX, ctx_.budget.capped() ? cap_until_ns_ : UINT64_MAX);
  }
  // If keep_ms is over, releases a part of the memory that stayed unused.
  void release_idle(uint64_t now_ns) VMEM_LOCKED;

  // Reclaim threads sleep in wait() and wait_for(). Wake them when they have work.
  void wake_reclaim() VMEM_LOCKED { reclaimers_.notify_one(); }
  void wake_all_reclaim() VMEM_LOCKED { reclaimers_.notify_all(); }
  void wait(Lock& lock) VMEM_LOCKED { reclaimers_.wait(lock); }
  void wait_for(Lock& lock, std::chrono::nanoseconds most) VMEM_LOCKED { reclaimers_.wait_for(lock, most); }

 private:
  void hold_back(uint64_t bytes, uint64_t ns, bool pressed) VMEM_LOCKED;

  PagerContext& ctx_;
  std::condition_variable reclaimers_;
  uint64_t cap_until_ns_ VMEM_GUARDED_BY(core::big_lock) = 0;
  uint64_t watch_until_ns_ VMEM_GUARDED_BY(core::big_lock) = 0;
  bool watching_ VMEM_GUARDED_BY(core::big_lock) = false;  // idle memory is being watched
  bool pressed_ VMEM_GUARDED_BY(core::big_lock) = false;   // pressure set the cap, not a refusal alone
};

}  // namespace vmem::pager
