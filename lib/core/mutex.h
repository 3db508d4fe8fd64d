// Locks that clang's -Wthread-safety checks. Fields name the lock that protects them, and functions
// name the lock they need. `make check` then finds accesses without the lock, locks taken twice and
// locks not released. Other compilers see empty macros.
//
// Clang analyses a lambda as a separate function. If one would read a protected field, as the
// condition of a wait does, write a loop instead.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#ifdef __clang__
#define VMEM_LOCKS(x) __attribute__((x))
#else
#define VMEM_LOCKS(x)
#endif
#define VMEM_GUARDED_BY(x) VMEM_LOCKS(guarded_by(x))                     // a field that this lock protects
#define VMEM_REQUIRES(...) VMEM_LOCKS(requires_capability(__VA_ARGS__))  // the caller of this function holds it
// The caller does not; the function takes it.
#define VMEM_EXCLUDES(...) VMEM_LOCKS(locks_excluded(__VA_ARGS__))
#define VMEM_ACQUIRE(...) VMEM_LOCKS(acquire_capability(__VA_ARGS__))
#define VMEM_TRY_ACQUIRE(...) VMEM_LOCKS(try_acquire_capability(__VA_ARGS__))
#define VMEM_RELEASE(...) VMEM_LOCKS(release_capability(__VA_ARGS__))

namespace vmem::core {

class VMEM_LOCKS(capability("mutex")) Mutex {
 public:
  constexpr Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;
  void lock() VMEM_ACQUIRE() { mutex_.lock(); }
  bool try_lock() VMEM_TRY_ACQUIRE(true) { return mutex_.try_lock(); }
  void unlock() VMEM_RELEASE() { mutex_.unlock(); }
  // Sleeps without the lock until notified, or spuriously: check the condition again.
  void wait(std::condition_variable& changed) VMEM_REQUIRES(this) {
    std::unique_lock lock(mutex_, std::adopt_lock);
    changed.wait(lock);
    lock.release();
  }
  // Returns false on timeout.
  bool wait_until(std::condition_variable& changed, std::chrono::steady_clock::time_point end) VMEM_REQUIRES(this) {
    std::unique_lock lock(mutex_, std::adopt_lock);
    const bool in_time = changed.wait_until(lock, end) == std::cv_status::no_timeout;
    lock.release();
    return in_time;
  }

 private:
  std::mutex mutex_;
};

// Holds a Mutex during its scope, except between unlock() and lock().
class VMEM_LOCKS(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) VMEM_ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  ~MutexLock() VMEM_RELEASE() {
    if (held_) mutex_.unlock();
  }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;
  void lock() VMEM_ACQUIRE() {
    mutex_.lock();
    held_ = true;
  }
  void unlock() VMEM_RELEASE() {
    held_ = false;
    mutex_.unlock();
  }

 private:
  Mutex& mutex_;
  bool held_ = true;
};

}  // namespace vmem::core
