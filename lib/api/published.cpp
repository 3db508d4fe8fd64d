#include "api/published.h"

#include <memory>

#include "pager/calls/query.h"
#include "pager/pager.h"

namespace vmem::api {

namespace {

uint64_t read(const std::atomic<uint64_t>& counter) {
  return counter.load(std::memory_order_relaxed);
}

void fill(const core::Histogram& from, publish::Histogram* to) {
  for (size_t i = 0; i < core::Histogram::kBuckets; ++i) to->count[i] = read(from.count[i]);
  to->sum_ns = read(from.sum_ns);
}

void fill(pager::Pager& pager, publish::Stats* to) {
  struct vmem_stats stats = {};
  pager.queries().stats(&stats);
  to->faults = stats.faults;
  to->soft_faults = stats.soft_faults;
  to->fault_ns_total = stats.fault_ns_total;
  to->fault_ns_max = stats.fault_ns_max;
  to->read_bytes = stats.read_bytes;
  to->write_bytes = stats.write_bytes;
  to->host_bytes = stats.host_bytes;
  to->device_bytes = stats.device_bytes;
  to->ssd_bytes = stats.ssd_bytes;
  to->host_budget = stats.host_budget;
  to->evictions = stats.evictions;
  to->clean_drops = stats.clean_drops;
  to->prefetched_blocks = stats.prefetched_blocks;
  to->prefetch_hits = stats.prefetch_hits;
  to->prefetch_wasted = stats.prefetch_wasted;
  to->host_to_device_bytes = stats.host_to_device_bytes;
  to->device_to_host_bytes = stats.device_to_host_bytes;
  to->copied_bytes = stats.copied_bytes;
  to->io_errors = stats.io_errors;
  to->checksum_errors = stats.checksum_errors;
  to->lost_blocks = stats.lost_blocks;
  to->unknown_blocks = stats.unknown_blocks;
  to->fault_around_blocks = stats.fault_around_blocks;
  to->dirty_bytes = stats.dirty_bytes;
  to->background_write_bytes = stats.background_write_bytes;
  to->lease_blocks = read(pager.counters().lease_blocks);
  to->lease_hits = read(pager.counters().lease_hits);
}

publish::Region region(const pager::RegionCensus& c) {
  publish::Region r{};
  r.id = c.id;
  r.base = c.base;
  r.size = c.size;
  r.block_size = c.block_size;
  r.zero_bytes = c.zero_bytes;
  r.ssd_bytes = c.ssd_bytes;
  r.host_bytes = c.host_bytes;
  r.device_bytes = c.device_bytes;
  r.failed_bytes = c.failed_bytes;
  r.leased_bytes = c.leased_bytes;
  r.backing = static_cast<uint32_t>(c.backing);
  r.has_device_tier = c.gpu ? 1 : 0;
  static_assert(sizeof r.heat == sizeof c.heat);
  std::copy(c.heat.begin(), c.heat.end(), r.heat);
  publish::put_text(r.name, c.name);
  return r;
}
static_assert(static_cast<uint32_t>(pager::Backing::file_private) ==
              static_cast<uint32_t>(publish::Backing::file_private));

publish::Device device(const pager::DeviceCensus& c, size_t ordinal) {
  publish::Device d{};
  d.ordinal = static_cast<uint32_t>(ordinal);
  d.lost = c.lost ? 1 : 0;
  d.budget = c.budget;
  d.used_bytes = c.used;
  d.leased_bytes = c.leased;
  d.in_bytes = c.in_bytes;
  d.out_bytes = c.out_bytes;
  d.evictions = c.evictions;
  d.clean_drops = c.clean_drops;
  d.guest_bytes = c.spilled;
  publish::put_text(d.name, c.name);
  return d;
}

// Fills *out. Without a pager (between vmem_shutdown and the next use) everything is zero.
void take(pager::PagerGate& gate, pager::Snapshot& census, publish::Snapshot* out) {
  publish::Header& h = out->header;
  h.stats = {};
  h.fault = {};
  for (publish::Histogram& m : h.move) m = {};
  h.regions_total = 0;
  publish::put_text(h.trap, "");
  publish::put_text(h.device_tier, "");
  pager::PagerGate::Use pager;
  if (!gate.use(&pager).ok() || !pager) return;
  publish::put_text(h.trap, pager->trap().caps().name);
  fill(*pager, &h.stats);
  fill(pager->counters().fault_ns, &h.fault);
  for (size_t i = 0; i < core::kWays; ++i) fill(pager->counters().move_ns[i], &h.move[i]);
  pager->queries().census(publish::kMaxRegions, &census);
  publish::put_text(h.device_tier, census.device_tier);
  h.regions_total = census.regions_total;
  for (const pager::RegionCensus& c : census.regions) out->regions.push_back(region(c));
  for (size_t d = 0; d < census.devices.size(); ++d) out->devices.push_back(device(census.devices[d], d));
}

}  // namespace

std::function<void(publish::Snapshot*)> snapshots_of(pager::PagerGate& gate) {
  auto census = std::make_shared<pager::Snapshot>();
  return [&gate, census](publish::Snapshot* s) { take(gate, *census, s); };
}

}  // namespace vmem::api
