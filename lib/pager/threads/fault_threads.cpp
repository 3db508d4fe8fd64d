#include "pager/threads/fault_threads.h"

#include <algorithm>
#include <chrono>

#include "core/clock.h"
#include "core/fault_server.h"
#include "core/thread.h"

namespace vmem::pager {

FaultThreads::FaultThreads(PagerContext& ctx, FaultHandler& faults) : ctx_(ctx), faults_(faults) {}

Status FaultThreads::start() {
  if (ctx_.trap.serve_by(fault_here, this)) return {};
  const int fd = ctx_.trap.event_descriptor();
  watching_ = fd >= 0 && ctx_.engine.watch(fd, events_ready, this);
  if (!watching_) {
    if (Status s = core::start_thread(
            "vmem-fault", [this] { loop(); }, &reads_);
        !s.ok())
      return s;
  }
  {
    Lock lock(ctx_.map.mutex());
    if (faults_.deadline_ms() == 0) return {};
  }
  return core::start_thread(
      "vmem-renew", [this] { renew_loop(); }, &renews_);
}

void FaultThreads::stop_renewing() {
  stop_renewing_ = true;
  faults_.deadline_changed().notify_all();
}

void FaultThreads::stop() {
  if (renews_.joinable()) renews_.join();
  if (watching_) ctx_.engine.unwatch();
  ctx_.trap.serve_by(nullptr, nullptr);
  stop_.store(true);
  if (!reads_.joinable()) return;
  ctx_.trap.interrupt();
  reads_.join();
}

void FaultThreads::loop() {
  const core::ServesFaults serves;
  while (!stop_.load(std::memory_order_relaxed) && faults_.serve_events(-1)) {
  }
}

// Runs on an I/O thread: reads that faults cause are submitted without waking another thread.
void FaultThreads::events_ready(void* self) {
  while (static_cast<FaultThreads*>(self)->faults_.serve_events(0)) {
  }
}

bool FaultThreads::fault_here(const trap::Fault& fault, void* self) {
  return static_cast<FaultThreads*>(self)->faults_.serve_here(fault);
}

// A trap may give up an access that is not answered in time (the module: fault_timeout_ms in its
// sysfs), so that no thread waits for a runtime that is gone. This runtime is alive; its disk is
// slow, or its queue for memory is long.
void FaultThreads::renew_loop() {
  Lock lock(ctx_.map.mutex());
  while (!stop_renewing_) {
    const unsigned ms = faults_.deadline_ms();
    const uint64_t until = now_ns() + std::max(ms, 30u) / 3 * uint64_t{1000000};
    for (uint64_t now = now_ns(); !stop_renewing_ && now < until && ms == faults_.deadline_ms(); now = now_ns())
      faults_.deadline_changed().wait_for(lock, std::chrono::nanoseconds(until - now));
    faults_.renew_waits();
  }
}

}  // namespace vmem::pager
