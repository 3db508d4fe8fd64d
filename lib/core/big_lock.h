// The lock that every fault of the process may have to wait for. Under it no device is called, no sink of the log, and
// nothing that blocks. A thread that holds one is marked, so that whatever must not be reached under it can say so:
// must_be_outside() stands at each way out.
//
// Allowed under it are calls of the trap about one block that wait for nobody: wake, unprotect, fill_zero of a page,
// fail, unfail, unmap_file; and those that map and release memory of frames. A line of the log is only put in a queue.
#pragma once

#include <mutex>

namespace vmem::core {

// Big locks that this thread holds.
inline constinit thread_local int big_locks_held = 0;

// Only a BigLock can take it.
class BigMutex {
  friend class BigLock;
  std::mutex mutex_;
};

// As std::unique_lock, which it is for a condition variable. While the thread sleeps in one the mark stays: it does
// nothing else meanwhile.
class BigLock : public std::unique_lock<std::mutex> {
 public:
  explicit BigLock(BigMutex& mutex) : unique_lock(mutex.mutex_) { ++big_locks_held; }
  ~BigLock() {
    if (owns_lock()) --big_locks_held;
  }
  BigLock(const BigLock&) = delete;
  BigLock& operator=(const BigLock&) = delete;
  void lock() {
    unique_lock::lock();
    ++big_locks_held;
  }
  void unlock() {
    --big_locks_held;
    unique_lock::unlock();
  }

 private:
  using unique_lock::release;
  using unique_lock::swap;
  using unique_lock::try_lock;
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
