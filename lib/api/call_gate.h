// Controls who uses the pager: any number of calls at once, or the one thread that starts, stops or
// replaces it.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/mutex.h"

namespace vmem::api {

// Calls that arrive while a thread waits to be alone wait behind it: it gets its turn however many
// threads call in a loop. A thread that is inside must not enter again.
class Gate {
 public:
  void enter();
  // For exit(), whose thread may be inside already: waits only while a thread is alone.
  void enter_at_exit();
  void leave();

  // One thread at a time may be alone, in two steps: after close() new calls wait outside, and
  // those inside continue; drain() returns when none is inside. open() ends both.
  void close();
  void drain();
  void open();

 private:
  static constexpr uint32_t kClosed = 1u << 31, kAlone = 1u << 30;
  void enter_unless(uint32_t barred);

  std::atomic<uint32_t> state_{0};  // calls inside, and the bits above
};

// Closes a gate and opens it again.
class Closed {
 public:
  explicit Closed(Gate& gate) : gate_(gate) { gate_.close(); }
  ~Closed() { gate_.open(); }
  Closed(const Closed&) = delete;
  Closed& operator=(const Closed&) = delete;
  void drain() { gate_.drain(); }

 private:
  Gate& gate_;
};

// A mutex that serves threads in the order of their requests: a loop of short calls cannot keep a
// thread out.
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
