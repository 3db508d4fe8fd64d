// What is set of the device tier, and what it tells of itself.
#include <algorithm>
#include <array>
#include <cerrno>

#include "pager/pager.h"

namespace vmem::pager {

using core::BlockIndex;
using core::error;
using core::State;
using core::Status;

Status Pager::set_device_budget(uint64_t bytes) {
  std::vector<bool> known(gpus_.size());
  {
    Lock lock(map_.mutex());
    const size_t largest = devices_ != nullptr ? std::max(staging_.largest_block(), devices_->unit()) : device::kUnit;
    if (Status s = holds_a_block(bytes, largest); !s.ok()) return s;
    for (size_t d = 0; d < known.size(); ++d) known[d] = gpus_[d].budget.begun();
  }
  for (size_t d = 0; d < known.size(); ++d) {
    if (!known[d]) continue;
    device::Memory memory;
    if (Status s = devices_->memory(static_cast<int>(d), &memory); !s.ok()) {
      if (!devices_->health(static_cast<int>(d)).ok()) continue;  // lost: the others go on
      return s;
    }
    if (bytes > memory.free + memory.used) {
      return error(ENOMEM, "device_budget %s is above what device %zu has free, %s", core::human_bytes(bytes).c_str(),
                   d, core::human_bytes(memory.free + memory.used).c_str());
    }
  }
  After after;
  Lock lock(map_.mutex());
  releases_.reap(lock);
  for (size_t d = 0; d < gpus_.size(); ++d) {
    // Leases that end are waited for by those who evict, not here.
    if (const uint64_t live = gpus_[d].budget.live(); live > bytes) {
      return error(EBUSY, "device_budget cannot become %s: live leases hold %s of device %zu",
                   core::human_bytes(bytes).c_str(), core::human_bytes(live).c_str(), d);
    }
  }
  config_.device_budget = bytes;
  for (Gpu& g : gpus_) {
    if (g.budget.begun()) g.budget.set(bytes);
  }
  map_.resize_policies();
  promoter_.pump(after);
  gpus_.work().notify_all();
  lock.unlock();
  page_in_.run(after);
  return {};
}

Status Pager::device_stats(int d, struct vmem_device_stats* out) {
  if (Status s = check_location(d, false); !s.ok() || d < 0) {
    return s.ok() ? error(ENODEV, "location %d is no device", d) : s;
  }
  if (Status s = gpus_.use(d); !s.ok()) return s;
  Lock lock(map_.mutex());
  releases_.reap(lock);
  const Gpu& g = gpus_[static_cast<size_t>(d)];
  out->budget = g.budget.limit();
  out->used_bytes = g.budget.charged();
  out->leased_bytes = g.budget.leased();
  out->in_bytes = g.in_bytes;
  out->out_bytes = g.out_bytes;
  out->evictions = g.evictions;
  out->clean_drops = g.clean_drops;
  out->driver_host_bytes = 0;
  out->body = own_page_tables() ? VMEM_BODY_HANDLES : VMEM_BODY_MANAGED;
  out->guest_bytes = map_.guests().bytes(static_cast<size_t>(d));
  out->to_neighbours = g.to_neighbours;
  out->from_neighbours = g.from_neighbours;
  // Counted now: the driver tells nobody when it takes host pages. A few blocks at a time, and without the lock.
  std::array<uintptr_t, DeviceWorkers::kLook> blocks;
  uintptr_t at = 0;
  for (auto it = map_.regions().begin(); it != map_.regions().end();) {
    Region& r = *it->second;
    size_t count = 0, passed = 0;
    BlockIndex b = at > it->first ? (at - it->first) / r.block_size : 0;
    for (b = r.gpu && !r.dying ? r.table.next_touched(b) : r.blocks; b < r.blocks; b = r.table.next_touched(b + 1)) {
      if (count == blocks.size() || ++passed > DeviceWorkers::kPass) break;
      if (r.table[b].state == State::on_device && r.table[b].device == d)
        blocks[count++] = reinterpret_cast<uintptr_t>(r.address(b));
    }
    at = b < r.blocks ? reinterpret_cast<uintptr_t>(r.address(b)) : it->first + r.span;
    if (count != 0 || b < r.blocks) {
      const size_t size = r.block_size;
      ++r.in_flight;
      lock.unlock();
      for (const uintptr_t block : std::span(blocks.data(), count)) {
        uint64_t bytes = 0;
        devices_->host_resident_bytes({block, size}, &bytes).ignore();
        out->driver_host_bytes += bytes;
      }
      lock.lock();
      --r.in_flight;
      map_.notify();
    }
    it = map_.regions().lower_bound(at);
    if (it != map_.regions().begin() && at < std::prev(it)->first + std::prev(it)->second->span) --it;
  }
  return {};
}

void Pager::set_staging_share(unsigned percent) {
  Lock lock(map_.mutex());
  supply_.set_share(percent);
}

void Pager::set_neighbours(unsigned percent) {
  Lock lock(map_.mutex());
  map_.guests().set_share(percent);
  gpus_.work().notify_all();
}

void Pager::set_device_reserve(uint64_t bytes) {
  Lock lock(map_.mutex());
  config_.device_reserve = bytes;
}

}  // namespace vmem::pager
