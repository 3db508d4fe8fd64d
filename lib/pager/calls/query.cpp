#include "pager/calls/query.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string_view>

#include "core/clock.h"
#include "pager/calls/calls.h"

namespace vmem::pager {

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
    if (state == State::unpopulated) continue;
    const uint64_t blocks = r.table.count(state);
    touched += blocks;
    (core::in_memory(state)     ? c.host_bytes
     : core::on_a_device(state) ? c.device_bytes
     : state == State::poisoned ? c.failed_bytes
                                : c.ssd_bytes) += blocks * r.block_size;
  }
  (r.from_file() ? c.ssd_bytes : c.zero_bytes) += (r.blocks - touched) * r.block_size;
  // As in vmem_query: a block on its way to a device is in host memory until its copy is issued.
  const uint64_t coming = (r.table.count(State::promoting) - r.counts.issued) * r.block_size;
  c.device_bytes -= coming;
  c.host_bytes += coming;
  c.leased_bytes = r.leases.blocks() * r.block_size;
  c.backing = r.backing;
  c.gpu = r.gpu;
  c.heat = r.use.heat.levels(now);
  copy_name(c.name, r.name);
  return c;
}

}  // namespace

Query::Query(PagerContext& ctx, Calls& calls)
    : ctx_(ctx), host_(calls.host), leases_(calls.leases), tier_(calls.tier) {}

Status Query::query(const void* ptr, size_t size, vmem_residency* out) {
  Lock lock(ctx_.map.mutex());
  BlockSpan span;
  if (Status s = ctx_.map.check_range(ptr, size, &span); !s.ok()) return s;
  Region& r = *span.region;
  const uintptr_t from = reinterpret_cast<uintptr_t>(ptr), to = from + size;
  ++r.counts.in_flight;
  out->zero_bytes = out->ssd_bytes = out->host_bytes = out->device_bytes = 0;
  out->block_size = r.block_size;
  uint64_t counted = 0;
  for (BlockIndex b = r.table.next_populated(span.first); b <= span.last; b = r.table.next_populated(b + 1)) {
    if (b % kTurn == 0) lock.give_way();
    const uintptr_t start = std::max(from, reinterpret_cast<uintptr_t>(r.address(b)));
    const uintptr_t end = std::min(to, reinterpret_cast<uintptr_t>(r.address(b)) + r.block_size);
    const State state = r.table[b].state;
    if (state == State::unpopulated) continue;
    counted += end - start;
    // Until its copy is issued, a block on its way to a device is, or soon will be, in a staging
    // frame.
    const bool coming = state == State::promoting && !tier_.blocks.has_come(r, b, r.table[b].device);
    if (core::in_memory(state) || coming) {
      out->host_bytes += end - start;
    } else if (core::on_a_device(state)) {
      out->device_bytes += end - start;
    } else {
      out->ssd_bytes += end - start;
    }
  }
  (r.from_file() ? out->ssd_bytes : out->zero_bytes) += size - counted;
  --r.counts.in_flight;
  ctx_.map.notify();
  return {};
}

void Query::stats(struct vmem_stats* out) {
  const auto read = [](const std::atomic<uint64_t>& c) { return c.load(std::memory_order_relaxed); };
  out->faults = read(ctx_.counters.faults);
  out->fault_ns_total = read(ctx_.counters.fault_ns_total);
  out->fault_ns_max = read(ctx_.counters.fault_ns_max);
  out->read_bytes = read(ctx_.counters.read_bytes);
  out->write_bytes = read(ctx_.counters.write_bytes);
  out->evictions = read(ctx_.counters.evictions);
  out->clean_drops = read(ctx_.counters.clean_drops);
  out->prefetched_blocks = read(ctx_.counters.prefetched_blocks);
  out->prefetch_hits = read(ctx_.counters.prefetch_hits);
  out->host_to_device_bytes = read(ctx_.counters.host_to_device_bytes);
  out->device_to_host_bytes = read(ctx_.counters.device_to_host_bytes);
  out->io_errors = read(ctx_.counters.io_errors);
  out->checksum_errors = read(ctx_.counters.checksum_errors);
  out->soft_faults = read(ctx_.counters.soft_faults);
  out->prefetch_wasted = read(ctx_.counters.prefetch_wasted);
  out->copied_bytes = read(ctx_.counters.copied_bytes);
  out->lost_blocks = read(ctx_.counters.lost_blocks);
  out->fault_around_blocks = read(ctx_.counters.fault_around_blocks);
  out->background_write_bytes = read(ctx_.counters.background_write_bytes);
  out->ssd_bytes = ctx_.space.used();
  Lock lock(ctx_.map.mutex());
  out->host_bytes = ctx_.budget.charged();
  out->host_budget = ctx_.budget.limit();
  out->device_bytes = 0;
  for (const DeviceState& g : ctx_.device_set) out->device_bytes += g.budget.charged();
  out->regions = ctx_.map.regions().size();
  out->unknown_blocks = host_.failed.unknown_blocks();
  out->dirty_bytes = ctx_.map.dirty().bytes();
}

Status Query::device_stats(int d, struct vmem_device_stats* out) {
  if (Status s = check_location(d, ctx_.device_set.size(), false); !s.ok() || d < 0) {
    return s.ok() ? error(ENODEV, "location %d is no device", d) : s;
  }
  if (Status s = ctx_.device_set.use(d); !s.ok()) return s;
  Lock lock(ctx_.map.mutex());
  leases_.releases.reap(lock);
  const DeviceState& g = ctx_.device_set[static_cast<size_t>(d)];
  out->budget = g.budget.limit();
  out->used_bytes = g.budget.charged();
  out->leased_bytes = g.budget.leased();
  out->in_bytes = g.in_bytes;
  out->out_bytes = g.out_bytes;
  out->evictions = g.evictions;
  out->clean_drops = g.clean_drops;
  out->driver_host_bytes = 0;
  out->backend = ctx_.device_set.own_page_tables() ? VMEM_BACKEND_HANDLES : VMEM_BACKEND_MANAGED;
  out->guest_bytes = ctx_.map.spilled().bytes(static_cast<size_t>(d));
  out->to_peers = g.to_peers;
  out->from_peers = g.from_peers;
  // Ask the driver now, because it does not report when it takes host pages: a few blocks at a
  // time, without the lock.
  std::array<uintptr_t, kDriverLook> blocks;
  uintptr_t at = 0;
  for (auto it = ctx_.map.regions().begin(); it != ctx_.map.regions().end();) {
    Region& r = *it->second;
    size_t count = 0, passed = 0;
    BlockIndex b = at > it->first ? (at - it->first) / r.block_size : 0;
    for (b = r.gpu && !r.dying ? r.table.next_populated(b) : r.blocks; b < r.blocks;
         b = r.table.next_populated(b + 1)) {
      if (count == blocks.size() || ++passed > kDriverPass) break;
      if (r.table[b].state == State::on_device && r.table[b].device == d)
        blocks[count++] = reinterpret_cast<uintptr_t>(r.address(b));
    }
    at = b < r.blocks ? reinterpret_cast<uintptr_t>(r.address(b)) : it->first + r.span;
    if (count != 0 || b < r.blocks) {
      const size_t size = r.block_size;
      ++r.counts.in_flight;
      lock.unlock();
      for (const uintptr_t block : std::span(blocks.data(), count)) {
        uint64_t bytes = 0;
        ctx_.devices->host_resident_bytes({block, size}, &bytes).ignore();
        out->driver_host_bytes += bytes;
      }
      lock.lock();
      --r.counts.in_flight;
      ctx_.map.notify();
    }
    it = ctx_.map.regions().lower_bound(at);
    if (it != ctx_.map.regions().begin() && at < std::prev(it)->first + std::prev(it)->second->span) --it;
  }
  return {};
}

void Query::census(size_t max_regions, Snapshot* out) {
  out->regions.clear();
  out->regions.reserve(max_regions);  // before the lock, for which every fault may wait
  out->devices.assign(ctx_.device_set.size(), DeviceCensus{});
  for (size_t d = 0; d < ctx_.device_set.size(); ++d)
    copy_name(out->devices[d].name, ctx_.devices->info(static_cast<int>(d)).name);
  out->device_tier = ctx_.devices != nullptr ? ctx_.devices->name() : "";
  const uint64_t now = now_ns();
  Lock lock(ctx_.map.mutex());
  out->regions_total = ctx_.map.regions().size();
  for (const auto& [base, r] : ctx_.map.regions()) {
    if (out->regions.size() == max_regions) break;
    if (!r->dying) out->regions.push_back(count(*r, now));
  }
  for (size_t d = 0; d < ctx_.device_set.size(); ++d) {
    const DeviceState& g = ctx_.device_set[d];
    DeviceCensus& c = out->devices[d];
    c.budget = g.budget.limit();
    c.used = g.budget.charged();
    c.leased = g.budget.leased();
    c.in_bytes = g.in_bytes;
    c.out_bytes = g.out_bytes;
    c.evictions = g.evictions;
    c.clean_drops = g.clean_drops;
    c.spilled = ctx_.map.spilled().bytes(d);
    c.lost = g.lost;
  }
}

}  // namespace vmem::pager
