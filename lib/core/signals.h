// Keeps the application's signal handlers from running where the library may hold a lock. A handler
// could access a block that is not present, and wait for its own thread.
#pragma once

#include <signal.h>

namespace vmem::core {

// Signals that a thread's own instructions cause.
inline constexpr int kFaultSignals[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP, SIGSYS};

// Whether the library's threads take SIGBUS from now on: a trap serves faults in its handler, and a
// library thread may meet a page that the program has dropped.
void library_threads_take_faults(bool take);

// Blocks every signal on this thread during its scope. Threads started in that scope inherit the
// mask: hold one around the first call into a library that starts threads.
class SignalsBlocked {
 public:
  SignalsBlocked();
  ~SignalsBlocked();
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

// Defers signals during a call of the application, but not those that the thread's own instructions
// cause. A handler that interrupted the call could access a block that is not present, and wait for
// threads that need a lock which its own thread holds. The outermost object on a thread counts.
// Where the thread waits for others, it lets signals in.
class SignalsDeferred {
 public:
  SignalsDeferred();
  ~SignalsDeferred();
  SignalsDeferred(const SignalsDeferred&) = delete;
  SignalsDeferred& operator=(const SignalsDeferred&) = delete;
};
bool signals_deferred();
// True if handlers of deferred signals are due.
bool signals_have_come();
// Runs them. The thread must hold nothing that others may need, and have begun nothing that only it
// can end.
void let_signals_in();

// Lets deferred signals run their handlers during its scope, as they arrive. The thread must meet
// the conditions of let_signals_in().
class SignalsLetIn {
 public:
  SignalsLetIn();
  ~SignalsLetIn();
  SignalsLetIn(const SignalsLetIn&) = delete;
  SignalsLetIn& operator=(const SignalsLetIn&) = delete;

 private:
  unsigned depth_;
  sigset_t application_;
};

// True on a thread that core/thread.h started, except while the application's code runs on it. Such
// a thread blocks every signal.
inline constinit thread_local bool library_thread = false;
inline bool on_library_thread() {
  return library_thread;
}

// On a library thread, unblocks the signals that its own instructions cause, during its scope. The
// application's code runs there, and its access of a block that moves between host memory and a
// device raises one (device/managed/fault_gate.h). If it were blocked, the process would end. Does
// nothing on an application's thread.
class FaultsLetIn {
 public:
  FaultsLetIn();
  ~FaultsLetIn();
  FaultsLetIn(const FaultsLetIn&) = delete;
  FaultsLetIn& operator=(const FaultsLetIn&) = delete;

 private:
  const bool ours_;
  sigset_t before_;
};

}  // namespace vmem::core
