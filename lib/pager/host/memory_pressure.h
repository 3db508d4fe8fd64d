// How much of the host budget the machine lets the library have, how long memory that nobody uses is kept, and the
// reclaim threads' bell.
//
// Without the module a frame is ordinary memory, and nothing is ever held back. With it each frame is asked for, and a
// refusal is no failure: the budget is capped at what there is, so that the reclaim threads make room within it, and
// after a while it is tried again.
//
//   a refusal takes nothing back of what pressure asked for: while pressed(), the cap only falls
//
// Not thread-safe: the pager's lock protects it.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>

#include "pager/account/shared.h"

namespace vmem::pager {

class MemoryPressure : private Shared {
 public:
  explicit MemoryPressure(const Shared& shared) : Shared(shared) {
    const Lock lock(map_.mutex());
    map_.dirty().set_bell(&reclaimers_);
  }

  // The machine wants so many bytes back; refused some.
  void press(uint64_t bytes) VMEM_LOCKED;
  void hold_back_after_refusal(const core::Status& why) VMEM_LOCKED;
  bool pressed() const VMEM_LOCKED { return pressed_; }
  // The time of either is over.
  void lift_cap(uint64_t now_ns) VMEM_LOCKED;
  // What an administrator allows; 0: all.
  void set_ceiling(uint64_t bytes) VMEM_LOCKED;

  // Memory may have come free: what of it nobody takes for a while (Config::keep_ms) goes back to the system.
  void watch_idle() VMEM_LOCKED;
  // When something is to be done about that, or the cap is to be lifted; UINT64_MAX: never.
  uint64_t next_ns() const VMEM_LOCKED {
    return std::min(watching_ ? watch_until_ns_ : UINT64_MAX, budget_.capped() ? cap_until_ns_ : UINT64_MAX);
  }
  // The while is over: some of what nobody has taken goes.
  void release_idle(uint64_t now_ns) VMEM_LOCKED;

  // Somebody needs memory: reclaim threads have work. They sleep until then.
  void wake_reclaim() VMEM_LOCKED { reclaimers_.notify_one(); }
  void wake_all_reclaim() VMEM_LOCKED { reclaimers_.notify_all(); }
  void wait(Lock& lock) VMEM_LOCKED { reclaimers_.wait(lock); }
  void wait_for(Lock& lock, std::chrono::nanoseconds most) VMEM_LOCKED { reclaimers_.wait_for(lock, most); }

 private:
  void hold_back(uint64_t bytes, uint64_t ns, bool pressed) VMEM_LOCKED;

  std::condition_variable reclaimers_;
  uint64_t cap_until_ns_ VMEM_GUARDED_BY(core::big_lock) = 0;
  uint64_t watch_until_ns_ VMEM_GUARDED_BY(core::big_lock) = 0;
  bool watching_ VMEM_GUARDED_BY(core::big_lock) = false;  // there is idle memory, and a reclaim thread looks after it
  bool pressed_ VMEM_GUARDED_BY(core::big_lock) = false;   // the cap is what pressure left, and not only a refusal's
};

}  // namespace vmem::pager
