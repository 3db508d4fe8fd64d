// How much is kept free, frames that the machine refuses or wants back, and the knobs of its administrator.
#include <algorithm>

#include "core/log.h"
#include "core/step.h"
#include "pager/clock.h"
#include "pager/pager.h"

namespace vmem::pager {

using core::State;
using core::Status;
using core::Urgency;

namespace {

constexpr uint16_t kForgetReadAhead = static_cast<uint16_t>(~(core::kReadAhead | core::kMarker | core::kPrefetched));

}  // namespace

void Pager::on_pressure(uint64_t bytes) {
  Lock lock(mutex_);
  pressure_.press(bytes);
}

void Pager::on_knobs() {
  trap::Knobs knobs;
  const bool there = trap_->knobs(&knobs).ok();
  Lock lock(mutex_);
  machine_.knobs = knobs;
  reserve_.set_watermarks(knobs.watermark_low, knobs.watermark_high);
  config_.readahead_bytes =
      there ? std::min(machine_.wanted_readahead, knobs.readahead_bytes) : machine_.wanted_readahead;
  config_.fault_timeout_ms =
      there ? std::min(machine_.wanted_timeout_ms, knobs.fault_timeout_ms) : machine_.wanted_timeout_ms;
  for (auto& [base, r] : regions_) r->readahead.set_max(static_cast<uint32_t>(config_.readahead_bytes / r->block_size));
  renew_.notify_all();
  if (!there) return;
  uint64_t limit = UINT64_MAX;
  for (const uint64_t l : {knobs.frame_limit, knobs.context_limit}) limit = l != 0 ? std::min(limit, l) : limit;
  pressure_.set_ceiling(limit);
}

}  // namespace vmem::pager
