// The only way to start a thread in this library. Library threads serve faults, or hold what others
// need to serve them. A signal handler of the application on one of them could access a block that
// is not present, and wait for itself. So every signal is blocked on them, from before their first
// instruction. core/scheduling.h sets how they are scheduled.
#pragma once

#include <signal.h>

#include <functional>
#include <thread>

#include "core/status.h"

namespace vmem::core {

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

// name: at most 15 bytes. Returns 0, or -EAGAIN or -ENOMEM with a message; *out is untouched then.
Status start_thread(const char* name, std::function<void()> body, std::thread* out);
// Runs `what` on a library thread while this thread, in an application's call, lets signals in. For
// work that this thread has begun and others may wait for. Returns true when it is done, or false
// if no thread could be started; nothing was run.
bool run_aside(const std::function<void()>& what) noexcept;
// True on a thread that start_thread() made, except while the application's code runs on it.
bool on_library_thread();

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

// Marks a scope in which the application's code runs on this thread, which holds nothing of the
// library. It may do all that is allowed on an application's thread.
class ApplicationCode {
 public:
  ApplicationCode();
  ~ApplicationCode();
  ApplicationCode(const ApplicationCode&) = delete;
  ApplicationCode& operator=(const ApplicationCode&) = delete;

 private:
  FaultsLetIn faults_;
  bool before_;
};

}  // namespace vmem::core
