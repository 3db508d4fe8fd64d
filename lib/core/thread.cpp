#include "core/thread.h"

#include <sched.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <new>
#include <system_error>
#include <utility>

#include "core/break.h"
#include "core/mutex.h"
#include "core/scheduling.h"
#include "core/signals.h"
#include "core/stack.h"

namespace vmem::core {

namespace {

constinit thread_local bool ours = false;

constexpr int kDeadline = 6;  // SCHED_DEADLINE, which older headers lack

}  // namespace

Status start_thread(const char* name, std::function<void()> body, std::thread* out) {
  const SignalsBlocked blocked;
  try {
    *out = std::thread([name = std::string(name), body = std::move(body)] {
      ours = true;
      schedule_as_ours();
      pthread_setname_np(pthread_self(), name.c_str());
      // The process may give its threads as little as PTHREAD_STACK_MIN.
      if (!with_stack([&body] { body(); })) body();
    });
  } catch (const std::system_error& failure) {
    if (sched_getscheduler(0) == kDeadline)
      return error(EAGAIN,
                   "cannot start thread %s: the kernel does not let a thread with SCHED_DEADLINE create threads; make "
                   "this call from another thread, or set SCHED_FLAG_RESET_ON_FORK",
                   name);
    return system_error(failure.code().value(), "cannot start thread %s", name);
  } catch (const std::bad_alloc&) {
    return error(ENOMEM, "no memory to start thread %s", name);
  }
  return {};
}

bool run_aside(const std::function<void()>& what) noexcept {
  constexpr std::chrono::milliseconds kLook{10};  // between two looks for signals
  struct Aside {
    Mutex mutex;
    std::condition_variable changed;
    bool over VMEM_GUARDED_BY(mutex) = false;
  } aside;
  std::thread thread;
  const auto body = [&what, &aside] {
    what();
    const MutexLock lock(aside.mutex);
    aside.over = true;
    aside.changed.notify_all();
  };
  if (!start_thread("vmem-aside", body, &thread).ok()) return false;
  for (bool over = false; !over;) {
    {
      const MutexLock lock(aside.mutex);
      if (!aside.over) aside.mutex.wait_until(aside.changed, std::chrono::steady_clock::now() + kLook);
      over = aside.over;
    }
    if (!over && signals_have_come()) let_signals_in();
  }
  thread.join();
  return true;
}

FaultsLetIn::FaultsLetIn() : ours_(ours) {
  if (!ours_ || broken("faults_let_in")) return;
  sigset_t faults;
  sigemptyset(&faults);
  for (const int s : kFaultSignals) sigaddset(&faults, s);
  pthread_sigmask(SIG_UNBLOCK, &faults, &before_);
}

FaultsLetIn::~FaultsLetIn() {
  if (ours_ && !broken("faults_let_in")) pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

ApplicationCode::ApplicationCode() : before_(std::exchange(ours, false)) {}

ApplicationCode::~ApplicationCode() {
  ours = before_;
}

bool on_library_thread() {
  return ours;
}

}  // namespace vmem::core
