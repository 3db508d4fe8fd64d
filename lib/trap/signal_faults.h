// Faults that are served on the threads that make them. With UFFD_FEATURE_SIGBUS the kernel sends
// such a thread SIGBUS in place of a message, and the handler of this class serves the fault and
// lets the access run again. That saves two changes of thread.
//
// - One object at a time in a process, as signal handlers are.
// - A fault parks its thread until wake() names its page. Until then the thread is in the list, and
//   its signals are blocked. Every 50 ms it looks whether one is due: then the access runs again, the
//   signal's handler runs first, and the thread parks again.
// - A SIGBUS that is no fault of the trap goes to the handler that was there before.
// - The handler needs no memory. Its locks are held only by threads that make no access of a region.
#pragma once

#include <signal.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/mutex.h"
#include "core/status.h"
#include "trap/trap.h"

namespace vmem::trap {

class SignalFaults {
 public:
  SignalFaults() = default;
  ~SignalFaults();  // no thread is parked
  SignalFaults(const SignalFaults&) = delete;
  SignalFaults& operator=(const SignalFaults&) = delete;

  // Installs the handler. -EBUSY: another object has it. The arguments outlive this object.
  core::Status start(int userfaultfd, int pagemap);
  // Calls server(fault, user) for each fault from now on, on the thread that made it. Without it,
  // take() reports faults. nullptr: returns when no thread is inside the last one.
  void serve_by(Trap::Serve server, void* user);
  // Lets threads that are parked at a page of the range make their access again.
  void wake(uintptr_t start, size_t size);
  // Returns faults that were not reported before.
  size_t take(std::span<Event> out);
  // Readable while take() may have some.
  int news() const { return news_; }

 private:
  struct Parked;
  static void on_signal(int number, siginfo_t* info, void* context);
  static void pass_on(int number, siginfo_t* info, void* context);
  bool serve(const Fault& fault, const sigset_t& interrupted);
  bool serve_here(Trap::Serve server, const Fault& fault) const;
  bool waits(const Fault& fault) const;
  void park(Parked& mine, const sigset_t& interrupted);
  void list(Parked&one), unlist(Parked&one);

  int news_ = -1, fd_ = -1, pagemap_ = -1;
  std::atomic<Trap::Serve> server_{nullptr};
  void* user_ = nullptr;
  std::atomic<unsigned> serving_{0};  // threads that may be inside the server
  core::Mutex mutex_;                 // leaf
  Parked* first_ VMEM_GUARDED_BY(mutex_) = nullptr;
};

}  // namespace vmem::trap
