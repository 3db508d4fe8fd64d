// Construction, start and end of the pager, and the upward calls that it implements.
#include "pager/pager.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/clock.h"
#include "core/log.h"
#include "core/scope_guard.h"
#include "core/thread.h"
#include "pager/tier/retry.h"

namespace vmem::pager {

Pager::Pager(Parts parts, Config config, const Tunables& tunables)
    : trap_(std::move(parts.trap)),
      engine_(std::move(parts.engine)),
      space_(std::move(parts.space)),
      devices_(std::move(parts.devices)),
      ctx_({*trap_, *engine_, *space_, devices_.get()}, std::move(config), tunables, *this),
      host_(ctx_),
      leases_(ctx_, host_),
      tier_(ctx_, host_, leases_),
      calls_(ctx_, host_, leases_, tier_),
      fault_threads_(ctx_, host_.faults),
      reclaim_threads_(ctx_, host_),
      workers_(ctx_, calls_) {}

Status Pager::start() {
  {
    Lock lock(ctx_.map.mutex());
    if (ctx_.config.io_buffer_bytes != 0 && !ctx_.budget.charge(ctx_.config.io_buffer_bytes, 0, Use::fixed)) {
      return error(EINVAL, "host_budget %s has no room for %s of buffers for encrypted I/O",
                   core::human_bytes(ctx_.tunables.host_budget).c_str(),
                   core::human_bytes(ctx_.config.io_buffer_bytes).c_str());
    }
  }
  calls_.tunables_update.follow_module();
  if (Status s = fault_threads_.start(); !s.ok()) return s;
  if (Status s = reclaim_threads_.start(ctx_.config.evict_threads); !s.ok()) return s;
  return workers_.start();
}

Pager::~Pager() {
  {
    Lock lock(ctx_.map.mutex());
    reclaim_threads_.stop();
    ctx_.device_set.work().notify_all();
    fault_threads_.stop_renewing();
  }
  workers_.stop();
  fault_threads_.stop();
  reclaim_threads_.join();
  space_.reset();   // before the engine, which knows its files
  engine_.reset();  // waits for its threads; nothing is in flight
  if (drains != 0) static_cast<void>(devices_.release());
}

// Returns how many pages the blocks of a pool may occupy now.
uint64_t Pager::pages(uint8_t pool) const {
  if (pool == kHostPool) return ctx_.frames.room() / core::kPage;
  if (pool >= kDevicePools)
    return std::max<uint64_t>(ctx_.device_set[pool - kDevicePools].budget.limit(), core::kHugePage) / core::kPage;
  const Staging& frames = ctx_.staging.of(core::kHugePage << (pool - kStagingPools)).frames;
  return std::max<uint64_t>(frames.bytes(), frames.frame()) / core::kPage;
}

void Pager::reserve_queues(size_t transitions) {
  for (DeviceState& g : ctx_.device_set) {
    g.ready.reserve(transitions);
    g.incoming.reserve(transitions);
  }
}

void Pager::host_is_short() {
  if (ctx_.cpu_mappings.any()) ctx_.device_set.work().notify_one();
}

void Pager::memory_freed(DeferredWork& after) {
  host_.pressure.watch_idle();
  while (!host_.waits.queue().empty()) {
    const MemoryWaiter s = host_.waits.queue().front();
    const Block& block = s.region->table[s.block];
    if (block.state == State::unpopulated &&
        !ctx_.metadata_charges.may_grow(*s.region, s.block)) {  // no memory for its table
      s.region->table.answer_faults(s.block);
      if (s.urgency == Urgency::fault) host_.failed.refuse_growth(*s.region, s.block);
      ctx_.map.notify();  // an acquire that waits returns the reason
    } else if (block.state == State::unpopulated || block.state == State::stored) {
      if (!host_.page_in.start_fill(*s.region, s.block, s.urgency, after, &s)) return;
    } else if (block.state == State::staged && (block.flags & core::kFaultPending) != 0) {
      if (!host_.installer.try_install(*s.region, s.block, after, &s)) return;
    }
    host_.waits.queue().pop();
  }
  // Memory may also come free without a write that succeeds: a region was freed, or a lease
  // released.
  ctx_.metadata_charges.try_again();
  if (host_.failed.any_dropped() && ctx_.budget.available() >= ctx_.reserve.largest_block())
    host_.failed.revive_dropped();
  host_.readahead.pump_speculative(after);
  if (!ctx_.device_set.empty()) tier_.promoter.pump(after);
}

Status Pager::set_name(const void* ptr, const char* name) {
  if (name == nullptr) return error(EINVAL, "name is null; give a string");
  Lock lock(ctx_.map.mutex());
  Region* r = ctx_.map.find(reinterpret_cast<uintptr_t>(ptr));
  if (r == nullptr) return error(EINVAL, "%p is not inside a region of libvmem", ptr);
  r->name.assign(name, strnlen(name, 63));
  return {};
}

Status Pager::acquire(std::span<const vmem_range> ranges, int location, void* stream, AcquireRequest* ask) {
  const core::ScopeGuard asked([&] {
    if (ask != nullptr) leases_.acquire_requests.withdraw(ranges, ask);
  });
  if (Status s = check_location(location, ctx_.device_set.size(), false); !s.ok()) return s;
  if (location >= 0) return calls_.device_acquire.acquire(ranges, location, stream, ask);
  for (const vmem_range& range : ranges) {
    if ((range.access & VMEM_WRITE) != 0) write_overdue(range.ptr, range.size);
  }
  return calls_.host_acquire.acquire(ranges, ask);  // the CPU and DMA have no streams
}

Status Pager::evict(const void* ptr, size_t size, int location) {
  if (location == VMEM_SSD) write_overdue(ptr, size);
  return calls_.sync.evict(ptr, size, location);
}

void Pager::write_overdue(const void* ptr, size_t size) {
  Lock lock(ctx_.map.mutex());
  BlockSpan span;
  if (ctx_.map.dirty().first() == kNoFrame || !ctx_.map.check_range(ptr, size, &span).ok()) return;
  if (span.region->backing != Backing::file_shared) return;
  ++span.region->counts.in_flight;
  host_.background.write_overdue(lock, span);
  --span.region->counts.in_flight;
  if (span.region->dying) ctx_.map.notify();
}

bool Pager::has_regions() {
  Lock lock(ctx_.map.mutex());
  return !ctx_.map.regions().empty();
}

std::string Pager::check() {
  Lock lock(ctx_.map.mutex());
  while (ctx_.staging.growing()) lock.sleep(ctx_.map.changed());  // a slab that is being made is charged already
  if (std::string s = ctx_.map.check(); !s.empty()) return s;
  uint64_t charged = 0, tables = 0;
  std::array<size_t, device::kUnitSizes> staged{};
  for (auto& [base, r] : ctx_.map.regions()) {
    tables += r->charge.table + r->charge.leases;
    for (BlockIndex b = r->table.next_populated(0); b < r->blocks; b = r->table.next_populated(b + 1)) {
      if (MemoryWaitQueue::marked(r->table[b]) && !host_.waits.queue().accounts_for(*r, b))
        return "a block is marked as one that waits for memory, and does not: " +
               std::string(ctx_.map.describe_locked(*r, b));
      if (core::in_memory(r->table[b].state) || core::on_a_device(r->table[b].state)) {
        const Frame& frame = ctx_.map.frame_table()[r->table[b].aux];
        if (in_staging(frame.pool) && frame.bytes != nullptr) ++staged[frame.pool - kStagingPools];
        if (frame.pool == kHostPool || frame.dev.cpu_mapped) charged += r->block_size;
      }
    }
  }
  if (std::string s = ctx_.cpu_mappings.check(); !s.empty()) return s;
  if (std::string s = ctx_.frames.check(); !s.empty()) return s;
  if (std::string s = ctx_.writeback_throttle.check(ctx_.map.transitions().all(), now_ns()); !s.empty()) return s;
  if (std::string s = host_.waits.queue().check(); !s.empty()) return s;
  if (std::string s = host_.failed.check(); !s.empty()) return s;
  if (std::string s = leases_.releases.check(); !s.empty()) return s;
  if (std::string s = host_.reclaim_requests.check(); !s.empty()) return s;
  if (std::string s = host_.readahead_queue.check(ctx_.map.transitions().all()); !s.empty()) return s;
  if (std::string s = host_.page_in.check(); !s.empty()) return s;
  if (charged != ctx_.budget.charged(Use::blocks)) {
    return core::strprintf("%llu bytes are charged for blocks, those in host memory have %llu",
                           static_cast<unsigned long long>(ctx_.budget.charged(Use::blocks)),
                           static_cast<unsigned long long>(charged));
  }
  uint64_t staging_bytes = 0;
  for (const StagingPool& p : ctx_.staging) {
    if (std::string s = p.growth.check(now_ns()); !s.empty()) return s;
    staging_bytes += p.frames.bytes();
    // Nothing is in flight, so each staging frame is free, or has a block or a host copy.
    const size_t blocks = staged[device::unit_class(p.frames.frame())];
    const size_t copied = ctx_.map.copies().count(p.frames);
    if (blocks + copied + p.frames.free() != p.frames.total()) {
      return core::strprintf("staging frames of %s: %zu of blocks, %zu of copies, %zu free, but %zu in all",
                             core::human_bytes(p.frames.frame()).c_str(), blocks, copied, p.frames.free(),
                             p.frames.total());
    }
  }
  if (staging_bytes != ctx_.budget.charged(Use::staging)) return "staging frames and their charge disagree";
  if (std::string s = ctx_.metadata_charges.check(tables); !s.empty()) return s;
  if (std::string s = leases_.lease_manager.check(); !s.empty()) return s;
  return ctx_.device_set.check();
}

}  // namespace vmem::pager
