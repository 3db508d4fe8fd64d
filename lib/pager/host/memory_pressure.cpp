#include "pager/host/memory_pressure.h"

#include "core/clock.h"
#include "core/log.h"
#include "pager/host/host_tier.h"

namespace vmem::pager {

namespace {

constexpr uint64_t kAfterRefusal = 1000000000;    // ns until the cap of a refusal is lifted
constexpr uint64_t kAfterPressure = 10000000000;  // ns until the cap of pressure is lifted
constexpr uint64_t kReleasedAtOnce = 16 << 20;    // bytes in one hold of the lock

}  // namespace

MemoryPressure::MemoryPressure(PagerContext& ctx) : ctx_(ctx) {
  const Lock lock(ctx.map.mutex());
  ctx.map.dirty().set_bell(&reclaimers_);
}

// Caps frames at `bytes` for `ns`. Blocks above the cap leave.
void MemoryPressure::hold_back(uint64_t bytes, uint64_t ns, bool pressed) {
  const uint64_t until = now_ns() + ns;
  ctx_.budget.set_cap(pressed_ && !pressed ? std::min(bytes, ctx_.budget.limit()) : bytes);
  cap_until_ns_ = pressed_ ? std::max(until, cap_until_ns_) : until;
  pressed_ |= pressed;
  ctx_.budget.trim();
  ctx_.map.resize_policies();
  reclaimers_.notify_all();
}

void MemoryPressure::hold_back_after_refusal(const Status& why) {
  hold_back(ctx_.budget.charged(), kAfterRefusal, false);
  VMEM_LOG_ONCE(core::Level::warning, "going on with %s of host_budget %s: %.*s",
                core::human_bytes(ctx_.budget.limit()).c_str(), core::human_bytes(ctx_.budget.wanted()).c_str(),
                static_cast<int>(why.text().size()), why.text().data());
}

void MemoryPressure::press(uint64_t bytes) {
  const uint64_t used = ctx_.budget.charged();
  hold_back(std::max(ctx_.reserve.least(), used - std::min(used, bytes)), kAfterPressure, true);
}

void MemoryPressure::lift_cap(uint64_t now_ns) {
  if (!ctx_.budget.capped() || now_ns < cap_until_ns_) return;
  ctx_.budget.lift_cap();
  pressed_ = false;
  ctx_.map.resize_policies();
}

void MemoryPressure::set_ceiling(uint64_t bytes) {
  ctx_.budget.set_ceiling(std::max(bytes != 0 ? bytes : UINT64_MAX, ctx_.reserve.least()));
  if (!pressed_) ctx_.budget.lift_cap();  // a refusal may have come from the old limit
  ctx_.budget.trim();
  ctx_.map.resize_policies();
  reclaimers_.notify_all();
}

void MemoryPressure::watch_idle() {
  if (watching_ || ctx_.frames.idle() == 0) return;
  watching_ = true;
  ctx_.frames.watch();
  watch_until_ns_ = now_ns() + ctx_.config.keep_ms * uint64_t{1000000};
  reclaimers_.notify_one();
}

void MemoryPressure::release_idle(uint64_t now_ns) {
  if (!watching_ || now_ns < watch_until_ns_) return;
  if (ctx_.frames.unused() != 0) return ctx_.frames.release_unused(kReleasedAtOnce);
  watching_ = false;
  watch_idle();
}

}  // namespace vmem::pager
