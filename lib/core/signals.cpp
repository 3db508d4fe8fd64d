#include "core/signals.h"

#include <atomic>
#include <utility>

#include "core/break.h"

namespace vmem::core {

namespace {

constinit std::atomic<bool> takes_faults{false};
constinit thread_local unsigned deferring = 0;
thread_local sigset_t application_mask;  // the application's, while deferring

sigset_t asynchronous() {
  sigset_t set;
  sigfillset(&set);
  for (const int s : kFaultSignals) sigdelset(&set, s);
  return set;
}

}  // namespace

void library_threads_take_faults(bool take) {
  takes_faults.store(take, std::memory_order_relaxed);
}

SignalsBlocked::SignalsBlocked() {
  sigset_t all;
  sigfillset(&all);
  if (takes_faults.load(std::memory_order_relaxed)) sigdelset(&all, SIGBUS);
  if (broken("signal_mask")) sigemptyset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before_);
}

SignalsBlocked::~SignalsBlocked() {
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

SignalsDeferred::SignalsDeferred() {
  if (broken("signals_deferred") || deferring++ != 0) return;
  const sigset_t wait = asynchronous();
  pthread_sigmask(SIG_BLOCK, &wait, &application_mask);
}

SignalsDeferred::~SignalsDeferred() {
  if (broken("signals_deferred") || --deferring != 0) return;
  pthread_sigmask(SIG_SETMASK, &application_mask, nullptr);
}

bool signals_deferred() {
  return deferring != 0;
}

bool signals_have_come() {
  sigset_t pending;
  if (deferring == 0 || sigpending(&pending) != 0) return false;
  for (int s = 1; s <= SIGRTMAX; ++s) {
    if (sigismember(&pending, s) == 1 && sigismember(&application_mask, s) == 0) return true;
  }
  return false;
}

// A handler may make calls that defer signals anew, as exit() does.
SignalsLetIn::SignalsLetIn() : depth_(std::exchange(deferring, 0)), application_(application_mask) {
  if (depth_ != 0) pthread_sigmask(SIG_SETMASK, &application_, nullptr);
}

SignalsLetIn::~SignalsLetIn() {
  if (depth_ == 0) return;
  const sigset_t wait = asynchronous();
  pthread_sigmask(SIG_BLOCK, &wait, nullptr);
  application_mask = application_;
  deferring = depth_;
}

void let_signals_in() {
  const SignalsLetIn in;
}

FaultsLetIn::FaultsLetIn() : ours_(library_thread) {
  if (!ours_ || broken("faults_let_in")) return;
  sigset_t faults;
  sigemptyset(&faults);
  for (const int s : kFaultSignals) sigaddset(&faults, s);
  pthread_sigmask(SIG_UNBLOCK, &faults, &before_);
}

FaultsLetIn::~FaultsLetIn() {
  if (ours_ && !broken("faults_let_in")) pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

}  // namespace vmem::core
