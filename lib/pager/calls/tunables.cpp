#include "pager/calls/tunables.h"

#include <algorithm>
#include <cerrno>
#include <vector>

#include "pager/host/bounce_limits.h"

namespace vmem::pager {

Status Tunables::set_host_budget(uint64_t bytes) {
  DeferredWork after;
  Lock lock(map_.mutex());
  // The present regions must still be served.
  uint64_t fixed = 0, needed = 0;
  do {
    fixed = frames_.least_overhead();
    needed = fixed + std::max(reserve_.pinned() + reserve_.of(bytes), 4 * reserve_.largest_block());
  } while (bytes < needed && supply_.give_back(lock));
  if (bytes < needed) {
    return error(EBUSY,
                 "host_budget cannot become %s, at least %s is needed: %s of tables, buffers and staging frames, %s of "
                 "live leases, %s for faults (the largest blocks have %s)",
                 core::human_bytes(bytes).c_str(), core::human_bytes(needed).c_str(), core::human_bytes(fixed).c_str(),
                 core::human_bytes(reserve_.pinned()).c_str(),
                 core::human_bytes(needed - fixed - reserve_.pinned()).c_str(),
                 core::human_bytes(reserve_.largest_block()).c_str());
  }
  budget_.set(bytes);
  in_force_.host_budget = bytes;
  reserve_.follow_budget();
  for (const auto& [base, r] : map_.regions()) {
    if (r->bounces) frames_.limit_bounce(r->block_size, bounce_limit(*r, config_, budget_));
  }
  map_.progress().made();
  budget_.trim();
  map_.resize_policies();
  pressure_.wake_all_reclaim();
  freed_.memory_freed(after);
  lock.unlock();
  page_in_.run(after);
  return {};
}

Status Tunables::set_device_budget(uint64_t bytes) {
  std::vector<bool> known(device_set_.size());
  {
    Lock lock(map_.mutex());
    const size_t largest = devices_ != nullptr ? std::max(staging_.largest_block(), devices_->unit()) : device::kUnit;
    if (Status s = holds_a_block(bytes, largest); !s.ok()) return s;
    for (size_t d = 0; d < known.size(); ++d) known[d] = device_set_[d].budget.begun();
  }
  for (size_t d = 0; d < known.size(); ++d) {
    if (!known[d]) continue;
    device::Memory memory;
    if (Status s = devices_->memory(static_cast<int>(d), &memory); !s.ok()) {
      if (!devices_->health(static_cast<int>(d)).ok()) continue;  // a lost device: the others go on
      return s;
    }
    if (bytes > memory.free + memory.used) {
      return error(ENOMEM, "device_budget %s is above what device %zu has free, %s", core::human_bytes(bytes).c_str(),
                   d, core::human_bytes(memory.free + memory.used).c_str());
    }
  }
  DeferredWork after;
  Lock lock(map_.mutex());
  releases_.reap(lock);
  for (size_t d = 0; d < device_set_.size(); ++d) {
    // Leases that are ending do not count: eviction waits for them.
    if (const uint64_t live = device_set_[d].budget.live(); live > bytes) {
      return error(EBUSY, "device_budget cannot become %s: live leases hold %s of device %zu",
                   core::human_bytes(bytes).c_str(), core::human_bytes(live).c_str(), d);
    }
  }
  in_force_.device_budget = bytes;
  for (DeviceState& g : device_set_) {
    if (g.budget.begun()) g.budget.set(bytes);
  }
  map_.resize_policies();
  promoter_.pump(after);
  device_set_.work().notify_all();
  lock.unlock();
  page_in_.run(after);
  return {};
}

void Tunables::follow_module() {
  trap::Knobs knobs;
  const bool there = trap_.knobs(&knobs).ok();
  Lock lock(map_.mutex());
  reserve_.set_watermarks(knobs.watermark_low, knobs.watermark_high);
  in_force_.readahead_bytes = there ? std::min(wanted_readahead_, knobs.readahead_bytes) : wanted_readahead_;
  in_force_.fault_timeout_ms = there ? std::min(wanted_timeout_ms_, knobs.fault_timeout_ms) : wanted_timeout_ms_;
  for (auto& [base, r] : map_.regions())
    r->readahead.set_max(static_cast<uint32_t>(config_.readahead_bytes / r->block_size));
  faults_.set_deadline(knobs.fault_timeout_ms);
  if (!there) return;
  uint64_t limit = UINT64_MAX;
  for (const uint64_t l : {knobs.frame_limit, knobs.context_limit}) limit = l != 0 ? std::min(limit, l) : limit;
  pressure_.set_ceiling(limit);
}

void Tunables::set_readahead(uint64_t bytes) {
  {
    Lock lock(map_.mutex());
    wanted_readahead_ = bytes;
  }
  follow_module();
}

void Tunables::set_fault_timeout(unsigned ms) {
  {
    Lock lock(map_.mutex());
    wanted_timeout_ms_ = ms;
  }
  follow_module();
}

void Tunables::set_space_budget(uint64_t bytes) {
  space_.set_budget(bytes);
  Lock lock(map_.mutex());
  writes_.has_room();  // maybe: threads that wait for memory need not wait for the back-off
  pressure_.wake_all_reclaim();
}

void Tunables::set_staging_share(unsigned percent) {
  Lock lock(map_.mutex());
  supply_.set_share(percent);
}

void Tunables::set_writeback(uint64_t interval_ns, uint64_t dirty_limit) {
  Lock lock(map_.mutex());
  in_force_.writeback_interval_ns = interval_ns;
  in_force_.dirty_limit = dirty_limit;
  map_.dirty().settings_changed();
}

void Tunables::set_peer_spill(unsigned percent) {
  Lock lock(map_.mutex());
  map_.spilled().set_share(percent);
  device_set_.work().notify_all();
}

void Tunables::set_device_reserve(uint64_t bytes) {
  Lock lock(map_.mutex());
  in_force_.device_reserve = bytes;
}

}  // namespace vmem::pager
