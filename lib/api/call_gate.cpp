#include "api/call_gate.h"

#include "core/signals.h"

namespace vmem::api {

void Gate::enter_unless(uint32_t barred) {
  uint32_t seen = state_.load(std::memory_order_relaxed);
  for (;;) {
    if ((seen & barred) != 0) {
      const core::SignalsLetIn in;
      state_.wait(seen, std::memory_order_relaxed);
      seen = state_.load(std::memory_order_relaxed);
    } else if (state_.compare_exchange_weak(seen, seen + 1, std::memory_order_acquire, std::memory_order_relaxed)) {
      return;
    }
  }
}

void Gate::enter() {
  enter_unless(kClosed | kAlone);
}

void Gate::enter_at_exit() {
  enter_unless(kAlone);
}

void Gate::leave() {
  if ((state_.fetch_sub(1, std::memory_order_release) & kClosed) != 0) state_.notify_all();
}

void Gate::close() {
  state_.fetch_or(kClosed, std::memory_order_relaxed);
}

void Gate::drain() {
  for (;;) {
    uint32_t seen = kClosed;
    if (state_.compare_exchange_strong(seen, kClosed | kAlone, std::memory_order_acquire, std::memory_order_relaxed)) {
      return;
    }
    const core::SignalsLetIn in;
    state_.wait(seen, std::memory_order_relaxed);
  }
}

void Gate::open() {
  state_.fetch_and(~(kClosed | kAlone), std::memory_order_release);
  state_.notify_all();
}

void FairMutex::lock() {
  const uint32_t mine = next_.fetch_add(1, std::memory_order_relaxed);
  for (;;) {
    const uint32_t now = serving_.load(std::memory_order_acquire);
    if (now == mine) return;
    const core::SignalsLetIn in;
    serving_.wait(now, std::memory_order_relaxed);
  }
}

bool FairMutex::try_lock() {
  uint32_t free = serving_.load(std::memory_order_acquire);
  return next_.compare_exchange_strong(free, free + 1, std::memory_order_relaxed);
}

void FairMutex::unlock() {
  serving_.fetch_add(1, std::memory_order_release);
  serving_.notify_all();
}

}  // namespace vmem::api
