// A mutex that serves threads in the order of their requests: a loop of short calls cannot keep a
// thread out.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/mutex.h"

namespace vmem::api {

class VMEM_LOCKS(capability("mutex")) FairMutex {
 public:
  void lock() VMEM_ACQUIRE();
  bool try_lock() VMEM_TRY_ACQUIRE(true);
  void unlock() VMEM_RELEASE();

 private:
  std::atomic<uint32_t> next_{0}, serving_{0};
};

// Holds a FairMutex while it lives.
class VMEM_LOCKS(scoped_lockable) FairLock {
 public:
  explicit FairLock(FairMutex& mutex) VMEM_ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  FairLock(FairMutex& mutex, std::adopt_lock_t) VMEM_REQUIRES(mutex) : mutex_(mutex) {}  // this thread holds it
  ~FairLock() VMEM_RELEASE() { mutex_.unlock(); }
  FairLock(const FairLock&) = delete;
  FairLock& operator=(const FairLock&) = delete;

 private:
  FairMutex& mutex_;
};

}  // namespace vmem::api
