#include "core/thread.h"

#include <cerrno>
#include <cstring>
#include <new>
#include <system_error>
#include <utility>

#include "core/break.h"

namespace vmem::core {

namespace {

constinit thread_local bool ours = false;

}  // namespace

SignalsBlocked::SignalsBlocked() {
  sigset_t all;
  sigfillset(&all);
  if (broken("signal_mask")) sigemptyset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before_);
}

SignalsBlocked::~SignalsBlocked() {
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

Status start_thread(const char* name, std::function<void()> body, std::thread* out) {
  const SignalsBlocked blocked;
  try {
    *out = std::thread([name = std::string(name), body = std::move(body)] {
      ours = true;
      pthread_setname_np(pthread_self(), name.c_str());
      body();
    });
  } catch (const std::system_error& failure) {
    return system_error(failure.code().value(), "cannot start thread %s", name);
  } catch (const std::bad_alloc&) {
    return error(ENOMEM, "no memory to start thread %s", name);
  }
  return {};
}

ApplicationCode::ApplicationCode() : before_(std::exchange(ours, false)) {}

ApplicationCode::~ApplicationCode() {
  ours = before_;
}

bool on_library_thread() {
  return ours;
}

}  // namespace vmem::core
