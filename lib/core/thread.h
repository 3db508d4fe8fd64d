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
