// The only way to start a thread in this library. Library threads serve faults, or hold what others
// need to serve them. A signal handler of the application on one of them could access a block that
// is not present, and wait for itself. So every signal is blocked on them, from before their first
// instruction. core/scheduling.h sets how they are scheduled.
#pragma once

#include <functional>
#include <string>
#include <thread>

#include "core/signals.h"
#include "core/status.h"

namespace vmem::core {

// name: at most 15 bytes. Returns 0, or -EAGAIN or -ENOMEM with a message; *out is untouched then.
Status start_thread(const char* name, std::function<void()> body, std::thread* out);
// Sets the CPUs of threads started from now on. "": those that the main thread had when the library
// was loaded. Returns -EINVAL if the text is no list, or if this process may use none of the CPUs.
Status set_thread_cpus(const std::string& text);
// Runs `what` on a library thread while this thread, in an application's call, lets signals in. For
// work that this thread has begun and others may wait for. Returns true when it is done, or false
// if no thread could be started; nothing was run.
bool run_aside(const std::function<void()>& what) noexcept;

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
