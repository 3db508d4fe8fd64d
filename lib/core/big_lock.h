// The pager's lock. Every fault of the process may have to wait for it.
//
// - No device call, no log sink and no blocking call runs under it. A log line is only queued.
// - Each thread counts the big locks it holds. must_be_outside() checks that count at each way out
//   (core/outside_lock.h).
// - Allowed under it are the trap's calls on one block that do not wait (wake, unprotect, fill_zero
//   of a page, fail, unfail), and mapping and releasing frame memory.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "core/mutex.h"
#include "core/outside_lock.h"

namespace vmem::core {

// The capability "a big lock is held", for thread-safety analysis (core/mutex.h). All instances
// share one name, since no thread uses two. Protected fields say VMEM_GUARDED_BY(core::big_lock).
class VMEM_LOCKS(capability("lock")) BigLockHeld {};
inline constexpr BigLockHeld big_lock;
#define VMEM_LOCKED VMEM_REQUIRES(::vmem::core::big_lock)    // the caller of this function holds it
#define VMEM_UNLOCKED VMEM_EXCLUDES(::vmem::core::big_lock)  // the caller does not

class BigMutex {
  friend class BigLock;
  std::mutex mutex_;
  std::atomic<unsigned> waiting_{0};  // threads in lock(); not those waking from a condition variable
};

// A std::unique_lock, which condition variables accept. A thread that sleeps in one keeps its
// count; it runs nothing else while it sleeps.
class VMEM_LOCKS(scoped_lockable) BigLock : public std::unique_lock<std::mutex> {
 public:
  explicit BigLock(BigMutex& mutex) VMEM_ACQUIRE(big_lock) : unique_lock(mutex.mutex_, std::defer_lock), mutex_(mutex) {
    lock();
  }
  ~BigLock() VMEM_RELEASE() {
    if (owns_lock()) --big_locks_held;
  }
  BigLock(const BigLock&) = delete;
  BigLock& operator=(const BigLock&) = delete;
  void lock() VMEM_ACQUIRE(big_lock) VMEM_LOCKS(no_thread_safety_analysis) {
    int* held = &big_locks_held;
    // The loader may call malloc to create this variable on first use: force that before locking.
    asm volatile("" : "+r"(held));
    if (!unique_lock::try_lock()) {
      mutex_.waiting_.fetch_add(1, std::memory_order_relaxed);
      unique_lock::lock();
      mutex_.waiting_.fetch_sub(1, std::memory_order_relaxed);
    }
    ++*held;
  }
  void unlock() VMEM_RELEASE(big_lock) VMEM_LOCKS(no_thread_safety_analysis) {
    --big_locks_held;
    unique_lock::unlock();
  }
  // Takes the lock unless it is held already. For code at the end of a scope, which the compiler's
  // analysis cannot follow.
  void hold() VMEM_LOCKS(assert_capability(big_lock)) VMEM_LOCKS(no_thread_safety_analysis) {
    if (!owns_lock()) lock();
  }
  // Called in the middle of long work: lets waiting threads take the lock, then takes it again.
  // Anything this thread does not own may have changed. Nearly free while no thread waits. It
  // releases the lock now and then anyway, for waiters that it cannot see.
  void give_way() VMEM_LOCKED;
  // Sleeps without the lock until notified, or spuriously: check the condition again. In an
  // application's call, signals that arrive are handled within 50 ms, without the lock. Other
  // threads must be able to complete what the calling thread has begun.
  void sleep(std::condition_variable& changed) VMEM_LOCKED;
  // Same, for at most `most`; in an application's call for at most 50 ms.
  std::cv_status sleep_for(std::condition_variable& changed, std::chrono::nanoseconds most) VMEM_LOCKED;

 private:
  using unique_lock::release;
  using unique_lock::swap;
  using unique_lock::try_lock;

  BigMutex& mutex_;
  unsigned kept_ = 0;  // consecutive give_way() calls that kept the lock
};

// A condition variable that counts its notifications. A thread that scans for work drops the lock
// now and then, and may pass the place where new work appears. A changed count tells it to scan
// again.
class EventCount {
 public:
  void notify_one() VMEM_LOCKED {
    ++count_;
    changed_.notify_one();
  }
  void notify_all() VMEM_LOCKED {
    ++count_;
    changed_.notify_all();
  }
  uint64_t count() const VMEM_LOCKED { return count_; }
  void wait(BigLock& lock) VMEM_LOCKED { changed_.wait(lock); }
  void wait_for(BigLock& lock, std::chrono::nanoseconds most) VMEM_LOCKED { changed_.wait_for(lock, most); }

 private:
  std::condition_variable changed_;
  uint64_t count_ VMEM_GUARDED_BY(big_lock) = 0;
};

}  // namespace vmem::core
