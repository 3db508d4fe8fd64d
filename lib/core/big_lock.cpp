#include "core/big_lock.h"

#include <sched.h>

#include <algorithm>
#include <thread>

#include "core/fatal.h"
#include "core/fault_server.h"
#include "core/log.h"
#include "core/signals.h"
#include "core/step.h"

namespace vmem::core {

namespace {
std::atomic<bool> strict{false};
constexpr std::chrono::milliseconds kSignalsWait{50};
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
  // A released mutex goes to the first thread that tries. A sleeping waiter has to wake up and
  // tries last.
  for (unsigned i = 0; i < kYields && waited_for(); ++i) sched_yield();
  for (unsigned i = 0; i < kNaps && (waited_for() || (i == 0 && !waits)); ++i) {
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  lock();
}

void BigLock::sleep(std::condition_variable& changed) {
  if (!signals_deferred()) return changed.wait(*this);
  sleep_for(changed, kSignalsWait);
}

std::cv_status BigLock::sleep_for(std::condition_variable& changed, std::chrono::nanoseconds most) {
  if (!signals_deferred()) return changed.wait_for(*this, most);
  const std::cv_status status = changed.wait_for(*this, std::min<std::chrono::nanoseconds>(most, kSignalsWait));
  if (signals_have_come()) {
    unlock();
    let_signals_in();
    lock();
  }
  return status;
}

void be_strict_about_big_locks(bool on) {
  strict.store(on, std::memory_order_relaxed);
}

void called_under_big_lock(const char* call) {
  if (strict.load(std::memory_order_relaxed)) fatal("%s is called under the pager's lock", call);
  VMEM_LOG_ONCE(Level::error, "%s is called under the pager's lock: an error of libvmem, please report it", call);
}

void would_wait_for_itself(const char* what) {
  if (strict.load(std::memory_order_relaxed)) fatal("%s by the thread that serves faults", what);
  VMEM_LOG_ONCE(Level::error, "%s by the thread that serves faults: an error of libvmem, please report it", what);
}

}  // namespace vmem::core
