#include "pager/host/memory_pressure.h"

#include "core/clock.h"
#include "core/log.h"

namespace vmem::pager {

namespace {

constexpr uint64_t kAfterRefusal = 1000000000;    // ns until the cap of a refusal is lifted
constexpr uint64_t kAfterPressure = 10000000000;  // ns until the cap of pressure is lifted
constexpr uint64_t kReleasedAtOnce = 16 << 20;    // bytes in one hold of the lock

}  // namespace

// Caps frames at `bytes` for `ns`. Blocks above the cap leave.
void MemoryPressure::hold_back(uint64_t bytes, uint64_t ns, bool pressed) {
  const uint64_t until = now_ns() + ns;
  budget_.set_cap(pressed_ && !pressed ? std::min(bytes, budget_.limit()) : bytes);
  cap_until_ns_ = pressed_ ? std::max(until, cap_until_ns_) : until;
  pressed_ |= pressed;
  budget_.trim();
  map_.resize_policies();
  reclaimers_.notify_all();
}

void MemoryPressure::hold_back_after_refusal(const Status& why) {
  hold_back(budget_.charged(), kAfterRefusal, false);
  VMEM_LOG_ONCE(core::Level::warning, "going on with %s of host_budget %s: %.*s",
                core::human_bytes(budget_.limit()).c_str(), core::human_bytes(budget_.wanted()).c_str(),
                static_cast<int>(why.text().size()), why.text().data());
}

void MemoryPressure::press(uint64_t bytes) {
  const uint64_t used = budget_.charged();
  hold_back(std::max(reserve_.least(), used - std::min(used, bytes)), kAfterPressure, true);
}

void MemoryPressure::lift_cap(uint64_t now_ns) {
  if (!budget_.capped() || now_ns < cap_until_ns_) return;
  budget_.lift_cap();
  pressed_ = false;
  map_.resize_policies();
}

void MemoryPressure::set_ceiling(uint64_t bytes) {
  budget_.set_ceiling(std::max(bytes != 0 ? bytes : UINT64_MAX, reserve_.least()));
  if (!pressed_) budget_.lift_cap();  // a refusal may have come from the old limit
  budget_.trim();
  map_.resize_policies();
  reclaimers_.notify_all();
}

void MemoryPressure::watch_idle() {
  if (watching_ || frames_.idle() == 0) return;
  watching_ = true;
  frames_.watch();
  watch_until_ns_ = now_ns() + config_.keep_ms * uint64_t{1000000};
  reclaimers_.notify_one();
}

void MemoryPressure::release_idle(uint64_t now_ns) {
  if (!watching_ || now_ns < watch_until_ns_) return;
  if (frames_.unused() != 0) return frames_.release_unused(kReleasedAtOnce);
  watching_ = false;
  watch_idle();
}

}  // namespace vmem::pager
