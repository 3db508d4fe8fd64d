#include "pager/pager_gate.h"

#include <cerrno>

#include "core/process/fork.h"
#include "core/signals.h"
#include "pager/pager.h"

namespace vmem::pager {

void Gate::enter_unless(uint32_t barred) {
  uint32_t seen = state_.load(std::memory_order_relaxed);
  for (;;) {
    if ((seen & barred) != 0) {
      const core::SignalsLetIn in;
      state_.wait(seen, std::memory_order_relaxed);
      seen = state_.load(std::memory_order_relaxed);
    } else if (state_.compare_exchange_weak(seen, seen + 1, std::memory_order_acquire, std::memory_order_relaxed)) {
      return;
    }
  }
}

void Gate::enter() {
  enter_unless(kClosed | kAlone);
}

void Gate::enter_at_exit() {
  enter_unless(kAlone);
}

void Gate::leave() {
  if ((state_.fetch_sub(1, std::memory_order_release) & kClosed) != 0) state_.notify_all();
}

void Gate::close() {
  state_.fetch_or(kClosed, std::memory_order_relaxed);
}

void Gate::drain() {
  for (;;) {
    uint32_t seen = kClosed;
    if (state_.compare_exchange_strong(seen, kClosed | kAlone, std::memory_order_acquire, std::memory_order_relaxed)) {
      return;
    }
    const core::SignalsLetIn in;
    state_.wait(seen, std::memory_order_relaxed);
  }
}

void Gate::open() {
  state_.fetch_and(~(kClosed | kAlone), std::memory_order_release);
  state_.notify_all();
}

PagerGate::PagerGate() = default;
PagerGate::~PagerGate() = default;

void PagerGate::Use::take(PagerGate& entered) {
  if (entered.pager == nullptr) return entered.leave();
  gate_ = &entered;
  pager_ = entered.pager.get();
}

Status PagerGate::use(Use* out) {
  if (Status s = check_fork(); !s.ok()) return s;
  enter();
  out->take(*this);
  return {};
}

void PagerGate::use_at_exit(Use* out) {
  enter_at_exit();
  out->take(*this);
}

// Threads that the child does not have may hold locks, so nothing is touched there. A child of
// fork() replaces its parent's runtime with one of its own, and then counts as a child no more.
Status check_fork() {
  if (!core::in_child()) return {};
  return error(ECHILD,
               "this process was forked by a raw system call, or inside a call of libvmem; use fork() outside calls, "
               "or call exec first");
}

}  // namespace vmem::pager
