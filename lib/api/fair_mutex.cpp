#include "api/fair_mutex.h"

#include "core/signals.h"

namespace vmem::api {

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
