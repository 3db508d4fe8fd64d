#include "api/leases.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <new>

#include "api/last_error.h"
#include "core/process/fork.h"
#include "core/scope_guard.h"
#include "core/signals.h"
#include "core/step.h"
#include "core/thread.h"
#include "pager/pager.h"

vmem_lease::~vmem_lease() {
  vmem::core::close_and_forget(fd);
}

namespace vmem::api {

using core::error;
using core::Status;

namespace {

constinit thread_local bool in_ready = false;  // this thread is in the on_ready of a lease

}  // namespace

Status Leases::find(LeaseHandle* which, Handle* out) {
  const auto it = live_.find(which);
  if (it == live_.end() && core::has_parents_state())
    return error(ECHILD, "%p is not a lease of this process, but may be one of the process that it was forked from",
                 static_cast<void*>(which));
  if (it == live_.end() || it->second->ending)
    return error(EINVAL, "%p is not a lease (never was, or was ended)", static_cast<void*>(which));
  *out = it->second;
  return {};
}

void Leases::settle(LeaseHandle& lease, int code, std::string_view words) {
  lease.code = code;
  const size_t length = words.copy(lease.words, sizeof lease.words - 1);
  lease.words[length] = '\0';
  lease.state = code == 0 ? vmem_lease::State::ready : vmem_lease::State::failed;
  if (lease.fd >= 0) eventfd_write(lease.fd, 1);
  changed_.notify_all();
}

// Lists the handle while the caller is inside the gate, so that no shutdown comes in between.
Status Leases::take(pager::Pager& pager, Handle lease, LeaseHandle** out) {
  std::map<LeaseHandle*, Handle> known{{lease.get(), lease}};
  if (Status s = pager.acquire(lease->ranges, lease->location, lease->stream); !s.ok()) return s;
  const core::MutexLock lock(mutex_);
  lease->state = vmem_lease::State::ready;
  live_.merge(known);
  *out = lease.get();
  return {};
}

Status Leases::start(pager::Pager& pager, Handle lease, LeaseHandle** out) {
  std::map<LeaseHandle*, Handle> known{{lease.get(), lease}}, working = known;
  if (Status s = pager.acquire_requests().ask(lease->ranges, lease->location, lease->stream, &lease->ask); !s.ok())
    return s;
  core::ScopeGuard withdraw([&] { pager.acquire_requests().withdraw(lease->ranges, &lease->ask); });
  {
    const core::MutexLock lock(mutex_);
    if (working_.size() >= kMost)
      return error(EAGAIN, "%zu leases are being taken, which is the limit; wait for one of them", working_.size());
    lease->at_work = true;
    working_.merge(working);
    live_.merge(known);
  }
  core::ScopeGuard forget([&] {
    const core::MutexLock lock(mutex_);
    working_.erase(lease.get());
    live_.erase(lease.get());
    changed_.notify_all();
  });
  std::thread thread;
  Status s = core::start_thread(
      "vmem-lease", [this, lease] { work(lease); }, &thread);
  if (!s.ok()) return s;
  thread.detach();
  forget.dismiss();
  withdraw.dismiss();
  *out = lease.get();
  return {};
}

void Leases::work(const Handle& lease) {
  {
    pager::PagerGate::Use pager;
    Status how;
    int failed = 0;
    try {
      how = gate_.use(&pager);
      bool over = !pager;
      if (how.ok()) {
        const core::MutexLock lock(mutex_);
        over |= lease->over;
      }
      core::step("lease.starting");
      if (over && how.ok()) how = error(ECANCELED, "the lease was cancelled by vmem_shutdown before it was ready");
      if (how.ok()) how = pager->acquire(lease->ranges, lease->location, lease->stream, &lease->ask);
    } catch (const std::bad_alloc&) {
      failed = -ENOMEM;
    } catch (...) {
      failed = -EIO;
    }
    const core::MutexLock lock(mutex_);
    const bool cancelled = lease->ask.cancelled.load(std::memory_order_relaxed);
    if (failed != 0) {
      settle(*lease, failed, "no memory for bookkeeping");
    } else {
      settle(*lease, how.ok() || !cancelled ? how.code() : -ECANCELED, how.text());
    }
  }
  core::step("lease.settled");
  if (lease->on_ready != nullptr) {
    {
      const core::MutexLock lock(mutex_);
      if (lease->over && lease->code == 0) settle(*lease, -ECANCELED, "vmem_shutdown freed the regions of the lease");
    }
    if (lease->code != 0) report(lease->code, lease->words);  // the result is final
    const core::ApplicationCode theirs;
    in_ready = true;
    lease->on_ready(lease.get(), lease->code, lease->user);
    in_ready = false;
  }
  const core::MutexLock lock(mutex_);
  lease->at_work = false;
  working_.erase(lease.get());
  changed_.notify_all();
}

Status Leases::poll(LeaseHandle* which) {
  const core::MutexLock lock(mutex_);
  Handle lease;
  if (Status s = find(which, &lease); !s.ok()) return s;
  if (lease->state == vmem_lease::State::pending) return error(EAGAIN, "the lease is not ready yet");
  if (lease->state == vmem_lease::State::failed) return Status(lease->code, lease->words);
  if (lease->over) return error(ECANCELED, "vmem_shutdown freed the regions of the lease");
  return {};
}

Status Leases::descriptor(LeaseHandle* which, int* fd) {
  const core::MutexLock lock(mutex_);
  Handle lease;
  if (Status s = find(which, &lease); !s.ok()) return s;
  if (lease->fd < 0) {
    lease->fd = core::keep_from_children(
        eventfd(lease->state == vmem_lease::State::pending ? 0 : 1, EFD_CLOEXEC | EFD_NONBLOCK));
    if (lease->fd < 0) return core::system_error(errno, "no descriptor for a lease");
  }
  *fd = lease->fd;
  return {};
}

Status Leases::end(LeaseHandle* which, void* stream) {
  Handle lease;
  bool pending;
  {
    pager::PagerGate::Use pager;
    if (Status s = gate_.use(&pager); !s.ok()) return s;
    {
      const core::MutexLock lock(mutex_);
      if (Status s = find(which, &lease); !s.ok()) return s;
      lease->ending = true;
      pending = lease->state == vmem_lease::State::pending;
    }
    if (pending) lease->ask.cancelled.store(true, std::memory_order_relaxed);
    if (pending && pager) pager->acquire_requests().wake();
  }
  core::ScopeGuard stays([&] {
    const core::MutexLock lock(mutex_);
    lease->ending = false;
  });
  {
    // Outside the gate: a shutdown may end the wait. One on_ready does not wait for another.
    const core::MutexLock lock(mutex_);
    while (in_ready ? lease->state == vmem_lease::State::pending : lease->at_work) wait();
  }
  pager::PagerGate::Use pager;
  if (Status s = gate_.use(&pager); !s.ok()) return s;
  bool held;
  {
    const core::MutexLock lock(mutex_);
    held = lease->state == vmem_lease::State::ready && !lease->over;
  }
  if (held && pager) {
    if (stream != lease->stream) {
      // On a lost device all work ends at once, whatever the stream.
      if (Status s = pager->acquire_requests().check_stream(lease->location, stream); !s.ok() && s.code() != -EIO)
        return s;
    }
    if (Status s = pager->release(lease->ranges, lease->stream, stream, true); !s.ok()) return s;
  }
  stays.dismiss();
  const core::MutexLock lock(mutex_);
  live_.erase(which);
  return {};
}

// The lease may wait for a signal handler of this thread.
void Leases::wait() {
  mutex_.wait_until(changed_, std::chrono::steady_clock::now() + std::chrono::milliseconds(50));
  if (!core::signals_have_come()) return;
  mutex_.unlock();
  core::let_signals_in();
  mutex_.lock();
}

void Leases::cancel() {
  const core::MutexLock lock(mutex_);
  for (const auto& [at, lease] : working_) lease->ask.cancelled.store(true, std::memory_order_relaxed);
}

void Leases::over() {
  const core::MutexLock lock(mutex_);
  for (const auto* leases : {&live_, &working_}) {
    for (const auto& [at, lease] : *leases) lease->over = true;
  }
}

void Leases::drain() {
  if (in_ready) return;
  const core::MutexLock lock(mutex_);
  while (works_for_over()) wait();
}

bool Leases::works_for_over() const {
  return std::any_of(working_.begin(), working_.end(), [](const auto& w) { return w.second->over; });
}

}  // namespace vmem::api
