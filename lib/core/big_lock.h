// The lock that every fault of the process may have to wait for. Under it no device is called, no sink of the log, and
// nothing that blocks. A thread that holds one is marked, so that whatever must not be reached under it can say so:
// must_be_outside() stands at each way out.
//
// Allowed under it are calls of the trap about one block that wait for nobody: wake, unprotect, fill_zero of a page,
// fail, unfail; and those that map and release memory of frames. A line of the log is only put in a queue.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "core/mutex.h"

namespace vmem::core {

// Big locks that this thread holds.
inline constinit thread_local int big_locks_held = 0;

// That a big lock is held, as the compiler knows it (core/mutex.h). One name for whichever there is: no thread has to
// do with two. What is protected is VMEM_GUARDED_BY(core::big_lock).
class VMEM_LOCKS(capability("lock")) BigLockHeld {};
inline constexpr BigLockHeld big_lock;
#define VMEM_LOCKED VMEM_REQUIRES(::vmem::core::big_lock)    // a function: its caller holds it
#define VMEM_UNLOCKED VMEM_EXCLUDES(::vmem::core::big_lock)  // .. its caller does not

// Only a BigLock can take it.
class BigMutex {
  friend class BigLock;
  std::mutex mutex_;
  std::atomic<unsigned> waiting_{0};  // threads; of those that come out of a condition variable it knows nothing
};

// As std::unique_lock, which it is for a condition variable. While the thread sleeps in one the mark stays: it does
// nothing else meanwhile.
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
    asm volatile("" : "+r"(held));  // where the loader makes it at the first use it calls malloc: not under the lock
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
  // For what runs at the end of a scope, which the compiler does not see through: taken, if it is not held already.
  void hold() VMEM_LOCKS(assert_capability(big_lock)) VMEM_LOCKS(no_thread_safety_analysis) {
    if (!owns_lock()) lock();
  }
  // In the midst of long work: lets those have the lock who wait for it, and takes it again. What is not this thread's
  // own may have changed then. Costs next to nothing while nobody waits; now and then it opens the lock all the same,
  // for those that it cannot see.
  void give_way() VMEM_LOCKED;
  // Sleeps without the lock until somebody notifies, or for no reason: look again at what was waited for. In a call of
  // the application's, signals that come meanwhile are handled, without the lock and at most 50 ms later: what the
  // thread has begun others must be able to end.
  void sleep(std::condition_variable& changed) VMEM_LOCKED;
  // The same, and for that long at most; 50 ms is the longest in a call.
  std::cv_status sleep_for(std::condition_variable& changed, std::chrono::nanoseconds most) VMEM_LOCKED;

 private:
  using unique_lock::release;
  using unique_lock::swap;
  using unique_lock::try_lock;

  BigMutex& mutex_;
  unsigned kept_ = 0;  // times that it gave way to nobody, in a row
};

// A condition variable that counts what it was told. Who looks for work gives the lock away now and then, and may have
// passed the place where work came to be meanwhile: the count says that it has to look again. All under the lock.
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

// Whoever calls something outside under a big lock ends the process with a message (on), or is named in the log, once
// (off, as in production). Tests and simulated devices switch it on.
void be_strict_about_big_locks(bool on);
void called_under_big_lock(const char* call);

inline void must_be_outside(const char* call) {
  if (big_locks_held != 0) [[unlikely]]
    called_under_big_lock(call);
}

}  // namespace vmem::core
