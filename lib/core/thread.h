// The one way to start a thread in this library. Its threads serve faults, or hold what others need to serve them: a
// signal handler of the application that ran on one of them could access a block that is not present, and would then
// wait for itself. So every signal is blocked on them, from before their first instruction. How they are scheduled says
// core/scheduling.h.
#pragma once

#include <signal.h>

#include <functional>
#include <thread>

#include "core/status.h"

namespace vmem::core {

// Blocks every signal on this thread for as long as it lives. Threads that others start meanwhile inherit that: hold
// one around the first call into a library that starts threads of its own.
class SignalsBlocked {
 public:
  SignalsBlocked();
  ~SignalsBlocked();
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

// A handler that interrupted a thread of the application in the middle of a call could access a block that is not
// present, and wait for threads that need a lock which its own thread holds. So signals wait while one of these lives
// (the outermost on its thread), all but those that an instruction of the thread itself causes; where the thread waits
// for others, it lets them in.
class SignalsDeferred {
 public:
  SignalsDeferred();
  ~SignalsDeferred();
  SignalsDeferred(const SignalsDeferred&) = delete;
  SignalsDeferred& operator=(const SignalsDeferred&) = delete;
};
bool signals_deferred();
// Whether handlers are to run that were made to wait.
bool signals_have_come();
// Runs them. The thread must hold nothing that others could need, and have begun nothing that only it can end.
void let_signals_in();

// For as long as it lives the handlers run that a call made to wait, as they come. The same is asked of the thread.
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

// name: at most 15 bytes. Fails with -EAGAIN or -ENOMEM, with a message; *out is untouched then.
Status start_thread(const char* name, std::function<void()> body, std::thread* out);
// Does it on a thread of ours while this one, in a call of the application's, lets signals in: for what this thread has
// begun and others may wait for. True: it is over. False: there is no thread to be had, and nothing was done.
bool run_aside(const std::function<void()>& what) noexcept;
// True on a thread that start_thread() made, but not where the application's code runs on it.
bool on_library_thread();

// For as long as it lives this thread of ours takes the signals that its own instructions cause: the application's code
// runs there, and an access of a block that moves between host memory and a device is one
// (device/managed/fault_gate.h). A blocked one would end the process. On a thread of the application's it changes
// nothing.
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

// For as long as it lives the application's code runs on this thread, which holds nothing of ours: what may be done on
// a thread of the application's may be done here.
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
