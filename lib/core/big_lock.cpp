#include "core/big_lock.h"

#include <sched.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "core/block_table.h"
#include "core/log.h"
#include "core/step.h"

namespace vmem::core {

namespace {
std::atomic<bool> strict{false};
}  // namespace

void BigLock::give_way() {
  constexpr unsigned kKept = 64, kYields = 8, kNaps = 16;
  const auto waited_for = [&] { return mutex_.waiting_.load(std::memory_order_relaxed) != 0; };
  const bool watched = step_hook.load(std::memory_order_relaxed) != nullptr;
  const bool waits = waited_for();
  if (!waits && !watched && ++kept_ < kKept) return;
  kept_ = 0;
  unlock();
  step("lock.given");
  // A mutex goes to whoever comes first, and who has to be woken comes last.
  for (unsigned i = 0; i < kYields && waited_for(); ++i) sched_yield();
  for (unsigned i = 0; i < kNaps && (waited_for() || (i == 0 && !waits)); ++i) {
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  lock();
}

void be_strict_about_big_locks(bool on) {
  strict.store(on, std::memory_order_relaxed);
}

void called_under_big_lock(const char* call) {
  if (strict.load(std::memory_order_relaxed)) fatal("%s is called under the pager's lock", call);
  VMEM_LOG_ONCE(Level::error, "%s is called under the pager's lock: an error of libvmem, please report it", call);
}

}  // namespace vmem::core
