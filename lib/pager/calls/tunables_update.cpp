#include "pager/calls/tunables_update.h"

#include <algorithm>
#include <cerrno>
#include <vector>

#include "pager/calls/calls.h"

namespace vmem::pager {

TunablesUpdate::TunablesUpdate(PagerContext& ctx, Calls& calls)
    : ctx_(ctx),
      host_(calls.host),
      leases_(calls.leases),
      tier_(calls.tier),
      wanted_readahead_(ctx.tunables.readahead_bytes),
      wanted_timeout_ms_(ctx.tunables.fault_timeout_ms) {}

void TunablesUpdate::set_checksum(bool on) {
  host_.reader.set_verify(on);
}

Status TunablesUpdate::set_host_budget(uint64_t bytes) {
  DeferredWork after;
  Lock lock(ctx_.map.mutex());
  // The present regions must still be served.
  uint64_t fixed = 0, needed = 0;
  do {
    fixed = ctx_.frames.least_overhead();
    needed = fixed + std::max(ctx_.reserve.pinned() + ctx_.reserve.of(bytes), 4 * ctx_.reserve.largest_block());
  } while (bytes < needed && tier_.staging_allocator.give_back(lock));
  if (bytes < needed) {
    return error(EBUSY,
                 "host_budget cannot become %s, at least %s is needed: %s of tables, buffers and staging frames, %s of "
                 "live leases, %s for faults (the largest blocks have %s)",
                 core::human_bytes(bytes).c_str(), core::human_bytes(needed).c_str(), core::human_bytes(fixed).c_str(),
                 core::human_bytes(ctx_.reserve.pinned()).c_str(),
                 core::human_bytes(needed - fixed - ctx_.reserve.pinned()).c_str(),
                 core::human_bytes(ctx_.reserve.largest_block()).c_str());
  }
  ctx_.budget.set(bytes);
  ctx_.tunables.host_budget = bytes;
  ctx_.reserve.follow_budget();
  for (const auto& [base, r] : ctx_.map.regions()) {
    if (r->bounces) ctx_.frames.limit_bounce(r->block_size, bounce_limit(*r, ctx_));
  }
  ctx_.map.progress().made();
  ctx_.budget.trim();
  ctx_.map.resize_policies();
  host_.pressure.wake_all_reclaim();
  ctx_.upcalls.memory_freed(after);
  lock.unlock();
  host_.page_in.run(after);
  return {};
}

Status TunablesUpdate::set_device_budget(uint64_t bytes) {
  std::vector<bool> known(ctx_.device_set.size());
  {
    Lock lock(ctx_.map.mutex());
    const size_t largest =
        ctx_.devices != nullptr ? std::max(ctx_.staging.largest_block(), ctx_.devices->unit()) : device::kUnit;
    if (Status s = holds_a_block(bytes, largest); !s.ok()) return s;
    for (size_t d = 0; d < known.size(); ++d) known[d] = ctx_.device_set[d].budget.begun();
  }
  for (size_t d = 0; d < known.size(); ++d) {
    if (!known[d]) continue;
    device::Memory memory;
    if (Status s = ctx_.devices->memory(static_cast<int>(d), &memory); !s.ok()) {
      if (!ctx_.devices->health(static_cast<int>(d)).ok()) continue;  // a lost device: the others go on
      return s;
    }
    if (bytes > memory.free + memory.used) {
      return error(ENOMEM, "device_budget %s is above what device %zu has free, %s", core::human_bytes(bytes).c_str(),
                   d, core::human_bytes(memory.free + memory.used).c_str());
    }
  }
  DeferredWork after;
  Lock lock(ctx_.map.mutex());
  leases_.releases.reap(lock);
  for (size_t d = 0; d < ctx_.device_set.size(); ++d) {
    // Leases that are ending do not count: eviction waits for them.
    if (const uint64_t live = ctx_.device_set[d].budget.live(); live > bytes) {
      return error(EBUSY, "device_budget cannot become %s: live leases hold %s of device %zu",
                   core::human_bytes(bytes).c_str(), core::human_bytes(live).c_str(), d);
    }
  }
  ctx_.tunables.device_budget = bytes;
  for (DeviceState& g : ctx_.device_set) {
    if (g.budget.begun()) g.budget.set(bytes);
  }
  ctx_.map.resize_policies();
  tier_.promoter.pump(after);
  ctx_.device_set.work().notify_all();
  lock.unlock();
  host_.page_in.run(after);
  return {};
}

void TunablesUpdate::follow_module() {
  trap::Knobs knobs;
  const bool there = ctx_.trap.knobs(&knobs).ok();
  Lock lock(ctx_.map.mutex());
  ctx_.reserve.set_watermarks(knobs.watermark_low, knobs.watermark_high);
  ctx_.tunables.readahead_bytes = there ? std::min(wanted_readahead_, knobs.readahead_bytes) : wanted_readahead_;
  ctx_.tunables.fault_timeout_ms = there ? std::min(wanted_timeout_ms_, knobs.fault_timeout_ms) : wanted_timeout_ms_;
  for (auto& [base, r] : ctx_.map.regions())
    r->use.readahead.set_max(static_cast<uint32_t>(ctx_.tunables.readahead_bytes / r->block_size));
  host_.faults.set_deadline(knobs.fault_timeout_ms);
  if (!there) return;
  uint64_t limit = UINT64_MAX;
  for (const uint64_t l : {knobs.frame_limit, knobs.context_limit}) limit = l != 0 ? std::min(limit, l) : limit;
  host_.pressure.set_ceiling(limit);
}

void TunablesUpdate::set_readahead(uint64_t bytes) {
  {
    Lock lock(ctx_.map.mutex());
    wanted_readahead_ = bytes;
  }
  follow_module();
}

void TunablesUpdate::set_fault_timeout(unsigned ms) {
  {
    Lock lock(ctx_.map.mutex());
    wanted_timeout_ms_ = ms;
  }
  follow_module();
}

void TunablesUpdate::set_space_budget(uint64_t bytes) {
  ctx_.space.set_budget(bytes);
  Lock lock(ctx_.map.mutex());
  ctx_.writeback_throttle.has_room();  // maybe: threads that wait for memory need not wait for the back-off
  host_.pressure.wake_all_reclaim();
}

void TunablesUpdate::set_staging_share(unsigned percent) {
  Lock lock(ctx_.map.mutex());
  tier_.staging_allocator.set_share(percent);
}

void TunablesUpdate::set_writeback(uint64_t interval_ns, uint64_t dirty_limit) {
  Lock lock(ctx_.map.mutex());
  ctx_.tunables.writeback_interval_ns = interval_ns;
  ctx_.tunables.dirty_limit = dirty_limit;
  ctx_.map.dirty().settings_changed();
}

void TunablesUpdate::set_peer_spill(unsigned percent) {
  Lock lock(ctx_.map.mutex());
  ctx_.map.spilled().set_share(percent);
  ctx_.device_set.work().notify_all();
}

void TunablesUpdate::set_device_reserve(uint64_t bytes) {
  Lock lock(ctx_.map.mutex());
  ctx_.tunables.device_reserve = bytes;
}

}  // namespace vmem::pager
