#include "api/flush_on.h"

#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <thread>

#include "api/runtime.h"
#include "core/cancellation.h"
#include "core/fork.h"
#include "core/log.h"
#include "core/mutex.h"
#include "core/thread.h"

namespace vmem::api {

using core::error;
using core::Status;

namespace {

// Their default action ends the process, and nothing is wrong with its memory when they come.
constexpr int kAccepted[] = {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGALRM, SIGXCPU, SIGPWR};

constinit std::atomic<int> came{0};   // the first signal
constinit std::atomic<int> bell{-1};  // an eventfd that the thread reads
constinit std::atomic<pid_t> owner{0};
constinit core::Mutex setup;

void act_by_default(int signal) {
  struct sigaction action = {};
  action.sa_handler = SIG_DFL;
  sigaction(signal, &action, nullptr);
  raise(signal);
}

// The kernel has put the default action back (SA_RESETHAND), so that a second signal does not wait for a slow disk.
void on_signal(int signal) {
  const int kept = errno;
  if (getpid() != owner.load()) {
    act_by_default(signal);  // blocked until this returns
  } else {
    int none = 0;
    came.compare_exchange_strong(none, signal);
    const uint64_t one = 1;
    if (write(bell.load(), &one, sizeof one) < 0) act_by_default(signal);
  }
  errno = kept;
}

void wait_for_signal() {
  uint64_t rings = 0;
  while (read(bell.load(), &rings, sizeof rings) < 0 && errno == EINTR) {
  }
  const int signal = came.load();
  {
    const core::ApplicationCode nothing_held;  // as at exit on a thread of the application
    const core::NoCancellation whole;
    Runtime::get().finish();
    core::deliver_log_at_exit(false);
  }
  sigset_t one;
  sigemptyset(&one);
  sigaddset(&one, signal);
  pthread_sigmask(SIG_UNBLOCK, &one, nullptr);
  act_by_default(signal);
}

// Under `setup`.
Status start() {
  if (bell.load() >= 0 && owner.load() == getpid()) return {};
  const int fd = core::keep_from_children(eventfd(0, EFD_CLOEXEC));
  if (fd < 0) return core::system_error(errno, "no eventfd for the thread that waits for signals");
  std::thread thread;
  bell.store(fd);
  owner.store(getpid());
  if (Status s = core::start_thread("vmem-flush", wait_for_signal, &thread); !s.ok()) {
    bell.store(-1);
    core::close_and_forget(fd);
    return s;
  }
  thread.detach();
  return {};
}

}  // namespace

Status flush_on(std::span<const int> signals) {
  const core::MutexLock lock(setup);
  for (const int signal : signals) {
    struct sigaction now = {};
    if (std::find(std::begin(kAccepted), std::end(kAccepted), signal) == std::end(kAccepted)) {
      return error(EINVAL,
                   "signal %d is not accepted; give some of SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, "
                   "SIGALRM, SIGXCPU, SIGPWR",
                   signal);
    }
    if (sigaction(signal, nullptr, &now) != 0) return core::system_error(errno, "signal %d", signal);
    const bool free = (now.sa_flags & SA_SIGINFO) == 0 &&
                      (now.sa_handler == SIG_DFL || now.sa_handler == SIG_IGN || now.sa_handler == on_signal);
    if (!free) {
      return error(EBUSY, "signal %d has a handler of the program's; call vmem_flush where that ends the process",
                   signal);
    }
  }
  if (Status s = start(); !s.ok()) return s;
  for (const int signal : signals) {
    struct sigaction now = {}, action = {};
    action.sa_handler = on_signal;
    action.sa_flags = static_cast<int>(SA_RESTART | SA_ONSTACK | SA_RESETHAND);
    sigemptyset(&action.sa_mask);
    if (sigaction(signal, nullptr, &now) == 0 && now.sa_handler == SIG_IGN) continue;  // as nohup wants it
    if (sigaction(signal, &action, nullptr) != 0) return core::system_error(errno, "signal %d", signal);
  }
  return {};
}

}  // namespace vmem::api
