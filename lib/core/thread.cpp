#include "core/thread.h"

#include <sched.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <memory>
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

constexpr int kDeadline = 6;  // SCHED_DEADLINE, which older headers lack

}  // namespace

Status start_thread(const char* name, std::function<void()> body, std::thread* out) {
  const SignalsBlocked blocked;
  try {
    *out = std::thread([name = std::string(name), body = std::move(body)] {
      library_thread = true;
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

Status set_thread_cpus(const std::string& text) {
  if (text.empty()) {
    choose_cpus(nullptr);
    return {};
  }
  auto mask = std::make_unique<CpuMask>();
  if (Status s = parse_cpus(text, mask.get()); !s.ok()) return s;
  int refused = 0;
  run_aside([&] { refused = run_on(*mask); });
  if (refused != 0)
    return system_error(refused, "cpus: this process may use none of \"%s\" (its cpuset: /proc/self/status)",
                        text.c_str());
  choose_cpus(std::move(mask));
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

ApplicationCode::ApplicationCode() : before_(std::exchange(library_thread, false)) {}

ApplicationCode::~ApplicationCode() {
  library_thread = before_;
}

}  // namespace vmem::core
