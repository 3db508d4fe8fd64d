#include "kernel_paging/kernels.h"

#include <sched.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <new>
#include <thread>
#include <utility>

#include "core/clock.h"
#include "core/log.h"
#include "core/process/at_exit.h"
#include "core/process/fork.h"
#include "core/scope_guard.h"
#include "core/signals.h"
#include "core/step.h"
#include "core/thread.h"
#include "pager/block/stall_clock.h"
#include "pager/pager.h"
#include "vmem/detail/paging_view.h"

namespace vmem::api {

using core::error;
using core::Status;

namespace {

// A thread polls for requests continuously right after one, then less and less often.
constexpr uint64_t kEager = 1000000, kAwake = 100000000;  // ns since the last request
constexpr unsigned kShortNap = 20, kLongNap = 500;        // us
constexpr unsigned kTimerSlack = 1000;                    // ns
constexpr auto kLook = std::chrono::milliseconds(1);      // between looks whether the last kernel has ended
constexpr uint64_t kEndPatience = 500000000;  // ns that this wait may take if exit or shutdown stops the range
constexpr unsigned kGiveBackTries = 100;      // tries, 1 ms apart, to end leases while memory is short

vmem_kernel_view view_of(const pager::KernelRange& open, const vmem_range& range) {
  using View = paging::View<paging::HostAtomics>;
  const View view{open.words->table(),
                  open.first,
                  reinterpret_cast<uintptr_t>(range.ptr),
                  range.size,
                  static_cast<uint32_t>(std::countr_zero(open.block_size)),
                  (range.access & VMEM_WRITE) != 0 ? 1u : 0u};
  vmem_kernel_view out = {};
  static_assert(sizeof view <= sizeof out);
  memcpy(&out, &view, sizeof view);
  return out;
}

}  // namespace

Status Kernels::begin(pager::Pager& pager, const vmem_range& range, int device, size_t budget, struct vmem_kernel** out,
                      vmem_kernel_view* view) {
  const auto kernel = std::make_shared<struct vmem_kernel>();
  std::map<struct vmem_kernel*, Handle> known{{kernel.get(), kernel}}, working = known;
  pager::KernelRange open;
  if (Status s = pager.kernel_ranges().open(range, device, budget, &open); !s.ok()) return s;
  *view = view_of(open, range);
  core::ScopeGuard close(
      [&] { pager.kernel_ranges().close(kernel->service != nullptr ? &kernel->service->range() : &open); });
  kernel->service = std::make_unique<PagingService>(std::move(open), range.access);
  core::step("kernels.opening");
  {
    const core::MutexLock lock(mutex_);
    if (closed_) return error(ECANCELED, "the library is being shut down");
    live_.merge(known);
    working_.merge(working);
  }
  core::ScopeGuard forget([&] {
    const core::MutexLock lock(mutex_);
    live_.erase(kernel.get());
    working_.erase(kernel.get());
    changed_.notify_all();
  });
  std::thread thread;
  Status s = core::start_thread(
      "vmem-kernels", [this, kernel] { work(kernel); }, &thread);
  if (!s.ok()) return s;
  thread.detach();
  forget.dismiss();
  close.dismiss();
  *out = kernel.get();
  return {};
}

// Serves the requests once, inside the gate. Returns false if the thread must end.
bool Kernels::serve(const Handle& kernel, bool* done) {
  pager::PagerGate::Use pager;
  bool idle = false, stopped = false;
  *done = false;
  const Status entered = gate_.use(&pager);
  {
    const core::MutexLock lock(mutex_);
    if (!entered.ok() || !pager || kernel->over) return false;
    idle = kernel->idle;
    stopped = kernel->stopped;
  }
  PagingService& service = *kernel->service;
  if (stopped || idle) service.end_asking();
  if (stopped) {
    service.take_back(*pager);
    return false;
  }
  if (idle) return !service.give_leases_back(*pager);
  try {
    *done = service.round(*pager);
  } catch (const std::bad_alloc&) {  // the next round does the rest
    *done = false;
  }
  return true;
}

void Kernels::work(const Handle& kernel) {
  prctl(PR_SET_TIMERSLACK, kTimerSlack);
  uint64_t last = core::now_ns();
  for (bool done = false; serve(kernel, &done);) {
    const uint64_t now = core::now_ns();
    if (done) last = now;
    if (now - last < kEager) {
      sched_yield();
    } else {
      usleep(now - last < kAwake ? kShortNap : kLongNap);
    }
  }
  core::step("kernels.ended");
  const core::MutexLock lock(mutex_);
  working_.erase(kernel.get());
  changed_.notify_all();
}

// Returns whether the kernels of the range have ended. Waits outside the gate and enters it only to
// look, because a shutdown may come first. After stop(), gives up as soon as the whole wait has
// taken kEndPatience: at exit, kernels may never end.
bool Kernels::wait_until_idle(vmem_kernel* kernel) {
  bool idle = false;
  for (const uint64_t begun = core::now_ns(); !idle;) {
    {
      pager::PagerGate::Use pager;
      if (!gate_.use(&pager).ok() || kernel->service == nullptr) break;
      idle = kernel->service->range().words->idle();
    }
    const core::MutexLock lock(mutex_);
    kernel->idle = idle;
    if (kernel->over || (kernel->stopped && core::now_ns() - begun > kEndPatience)) break;
    if (!idle) wait();
  }
  return idle;
}

Status Kernels::end(struct vmem_kernel* which, void* stream) {
  Handle kernel;
  {
    pager::PagerGate::Use pager;
    if (Status s = gate_.use(&pager); !s.ok()) return s;
    {
      const core::MutexLock lock(mutex_);
      const auto it = live_.find(which);
      if (it == live_.end() && core::has_parents_state())
        return error(ECHILD, "%p is not open in this process, but may be in the process that it was forked from",
                     static_cast<void*>(which));
      if (it == live_.end() || it->second->ending)
        return error(EINVAL, "%p is not a range that is open to kernels (never was, or was ended)",
                     static_cast<void*>(which));
      kernel = it->second;
      kernel->ending = true;
    }
    core::ScopeGuard stays([&] {
      const core::MutexLock lock(mutex_);
      kernel->ending = false;
    });
    if (kernel->service != nullptr) {
      // A lost device runs no kernels.
      Status s = kernel->service->range().words->last_kernel(stream);
      if (!s.ok() && !kernel->service->range().words->lost()) return s;
    }
    stays.dismiss();
  }
  const bool idle = wait_until_idle(kernel.get());
  bool stopped = false;
  for (bool works = true; works;) {  // its lease, if any, is for hints: no kernel waits
    {
      pager::PagerGate::Use pager;
      if (gate_.use(&pager).ok() && pager && kernel->service != nullptr) {
        kernel->service->cancel();
        pager->acquire_requests().wake();
      }
    }
    const core::MutexLock lock(mutex_);
    works = working_.count(which) != 0;
    stopped = kernel->stopped;
    if (works && kernel->late) return error(ECANCELED, "exit() was called, and the range is not given back");
    if (works) wait();
  }
  pager::PagerGate::Use pager;
  if (Status s = gate_.use(&pager); !s.ok()) return s;
  if (kernel->service != nullptr) {
    // The range stays open, because kernels use its memory.
    if (!idle && core::exiting()) return error(ECANCELED, "exit() was called, and kernels are still running");
    if (!idle) kernel->service->range().words->abandon();  // stopped: kernels may still use them
    for (unsigned i = 0; pager && idle && stopped && i < kGiveBackTries; ++i) {
      // Kernels may have kept blocks when the thread stopped: end their leases here.
      if (kernel->service->give_leases_back(*pager)) break;
      usleep(1000);
    }
    pager->kernel_ranges().close(&kernel->service->range());
    kernel->service.reset();
  }
  const core::MutexLock lock(mutex_);
  live_.erase(which);
  return {};
}

// Waits for at most kLook, then lets pending signals in: the event that the caller waits for may
// need a signal handler of this thread.
void Kernels::wait() {
  mutex_.wait_until(changed_, std::chrono::steady_clock::now() + kLook);
  if (!core::signals_have_come()) return;
  mutex_.unlock();
  core::let_signals_in();
  mutex_.lock();
}

// No range is opened from here until over(); after exit's stop(), none ever is. Ranges that an
// earlier shutdown ended (`over`) have been told, but their threads may still be in working_.
void Kernels::stop(pager::Pager& pager, uint64_t patience_ns) {
  bool late = false;
  {
    const core::MutexLock lock(mutex_);
    closed_ = true;
    for (const auto& [at, kernel] : working_)
      if (!kernel->over) kernel->stopped = true;
    const auto works = [](const auto& w) { return w.second->stopped && !w.second->over && !w.second->late; };
    pager::StallClock progress;
    progress.look(core::now_ns(), true);
    for (int64_t left = 0, were = -1; (left = std::count_if(working_.begin(), working_.end(), works)) != 0;) {
      if (std::exchange(were, left) != left) progress.made();
      progress.look(core::now_ns(), false);
      if (progress.over(0, patience_ns)) {
        for (const auto& [at, kernel] : working_) kernel->late = late = true;
        break;
      }
      for (const auto& [at, kernel] : working_)
        if (!kernel->over) kernel->service->cancel();
      mutex_.unlock();
      pager.acquire_requests().wake();
      mutex_.lock();
      wait();
    }
  }
  if (late) {
    core::log(
        core::Level::error,
        "at exit ranges that are open to kernels were not given back for %u s: later stores of kernels there are lost",
        static_cast<unsigned>(patience_ns / 1000000000));
  }
  core::step("kernels.stopped");
}

void Kernels::over() {
  for (;;) {
    Handle kernel;
    {
      const core::MutexLock lock(mutex_);
      const auto next = std::find_if(live_.begin(), live_.end(), [](const auto& l) { return !l.second->over; });
      if (next == live_.end()) {
        closed_ = false;
        return;
      }
      kernel = next->second;
      kernel->over = true;
    }
    kernel->service->end_asking();
    kernel->service->range().words->abandon();
    kernel->service.reset();
  }
}

void Kernels::drain() {
  const core::MutexLock lock(mutex_);
  while (std::any_of(working_.begin(), working_.end(), [](const auto& w) { return w.second->over; })) wait();
}

}  // namespace vmem::api
