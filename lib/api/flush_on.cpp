#include "api/flush_on.h"

#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <new>
#include <thread>

#include "api/runtime.h"
#include "core/log.h"
#include "core/mutex.h"
#include "core/process/cancellation.h"
#include "core/thread.h"

namespace vmem::api {

using core::error;
using core::Status;

namespace {

// Signals whose default action ends the process, and that do not mean that its memory is damaged.
constexpr int kAccepted[] = {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGALRM, SIGXCPU, SIGPWR};

constinit std::atomic<int> came{0};     // the first signal
sem_t bell;                             // the thread waits for it; not a descriptor, which the program could close
constinit std::atomic<pid_t> owner{0};  // 0: no thread waits
constinit core::Mutex setup;

void act_by_default(int signal) {
  struct sigaction action = {};
  action.sa_handler = SIG_DFL;
  sigaction(signal, &action, nullptr);
  raise(signal);
}

// The kernel has restored the default action (SA_RESETHAND), so that a second signal does not wait
// for a slow disk.
void on_signal(int signal) {
  const int kept = errno;
  if (getpid() != owner.load()) {
    act_by_default(signal);  // the signal is blocked until this returns
  } else {
    int none = 0;
    came.compare_exchange_strong(none, signal);
    if (sem_post(&bell) != 0) act_by_default(signal);
  }
  errno = kept;
}

void wait_for_signal() {
  while (sem_wait(&bell) != 0) {
  }
  const int signal = came.load();
  {
    const core::ApplicationCode nothing_held;  // as at exit, on a thread of the application
    const core::NoCancellation whole;
    Runtime::get().finish();
    core::deliver_log_at_exit(false);
  }
  sigset_t one;
  sigemptyset(&one);
  sigaddset(&one, signal);
  pthread_sigmask(SIG_UNBLOCK, &one, nullptr);
  act_by_default(signal);
  _exit(128 + signal);  // the kernel takes no default action for process 1 of a container
}

// A thread of the parent may have held `setup`.
void after_fork_in_child() {
  new (&setup) core::Mutex;
  owner.store(0);
}

// Call with `setup` held.
Status start() {
  if (owner.load() != 0) return {};
  std::thread thread;
  sem_init(&bell, 0, 0);
  came.store(0);
  if (Status s = core::start_thread("vmem-flush", wait_for_signal, &thread); !s.ok()) return s;
  thread.detach();
  owner.store(getpid());
  return {};
}

}  // namespace

Status flush_on(std::span<const int> signals) {
  static constinit std::atomic<bool> prepared{false};
  if (!prepared.exchange(true)) pthread_atfork(nullptr, nullptr, after_fork_in_child);
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
    if (sigaction(signal, nullptr, &now) == 0 && now.sa_handler == SIG_IGN) continue;  // stay ignored, as nohup wants
    if (sigaction(signal, &action, nullptr) != 0) return core::system_error(errno, "signal %d", signal);
  }
  return {};
}

}  // namespace vmem::api
