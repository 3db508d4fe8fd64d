// Counting for those who watch. Cheap: tables count their states as they change, so nothing is walked but the regions.
#include "pager/census.h"

#include <cstring>
#include <string_view>

#include "pager/clock.h"
#include "pager/pager.h"

namespace vmem::pager {

using core::State;

namespace {

void copy_name(char (&to)[64], std::string_view from) {
  const size_t n = std::min(from.size(), sizeof to - 1);
  memcpy(to, from.data(), n);
  to[n] = '\0';
}

RegionCensus count(Region& r, uint64_t now) {
  RegionCensus c{};
  c.id = r.id;
  c.base = reinterpret_cast<uintptr_t>(r.base);
  c.size = r.size;
  c.block_size = r.block_size;
  uint64_t touched = 0;
  for (size_t i = 0; i < static_cast<size_t>(State::count_); ++i) {
    const State state = static_cast<State>(i);
    if (state == State::untouched) continue;
    const uint64_t blocks = r.table.count(state);
    touched += blocks;
    (core::in_memory(state)     ? c.host_bytes
     : core::on_a_device(state) ? c.device_bytes
     : state == State::failed   ? c.failed_bytes
                                : c.ssd_bytes) += blocks * r.block_size;
  }
  (r.from_file() ? c.ssd_bytes : c.zero_bytes) += (r.blocks - touched) * r.block_size;
  // As vmem_query has it: until its copy is issued a block on its way to a device is in host memory.
  const uint64_t coming = (r.table.count(State::entering) - r.issued) * r.block_size;
  c.device_bytes -= coming;
  c.host_bytes += coming;
  c.leased_bytes = r.leases.blocks() * r.block_size;
  c.backing = r.backing;
  c.gpu = r.gpu;
  c.heat = r.heat.levels(now);
  copy_name(c.name, r.name);
  return c;
}

}  // namespace

void Pager::census(size_t max_regions, Census* out) {
  out->regions.clear();
  out->regions.reserve(max_regions);  // before the lock: it is everybody's
  out->devices.assign(gpus_.size(), DeviceCensus{});
  for (size_t d = 0; d < gpus_.size(); ++d) copy_name(out->devices[d].name, devices_->info(static_cast<int>(d)).name);
  out->device_tier = devices_ != nullptr ? devices_->name() : "";
  const uint64_t now = now_ns();
  Lock lock(map_.mutex());
  out->regions_total = map_.regions().size();
  for (const auto& [base, r] : map_.regions()) {
    if (out->regions.size() == max_regions) break;
    if (!r->dying) out->regions.push_back(count(*r, now));
  }
  for (size_t d = 0; d < gpus_.size(); ++d) {
    const Gpu& g = gpus_[d];
    DeviceCensus& c = out->devices[d];
    c.budget = g.budget.limit();
    c.used = g.budget.charged();
    c.leased = g.budget.leased();
    c.in_bytes = g.in_bytes;
    c.out_bytes = g.out_bytes;
    c.evictions = g.evictions;
    c.clean_drops = g.clean_drops;
    c.guests = map_.guests().bytes(d);
    c.lost = g.lost;
  }
}

}  // namespace vmem::pager
