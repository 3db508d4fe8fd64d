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
#include "pager/block/location.h"
#include "pager/tier/retry.h"

namespace vmem::pager {

Pager::Pager(Parts parts, Config config)
    : trap_(std::move(parts.trap)),
      engine_(std::move(parts.engine)),
      space_(std::move(parts.space)),
      devices_(std::move(parts.devices)),
      config_(std::move(config)),
      budget_(config_.host_budget),
      frames_(*trap_, budget_, config_.numa_nodes),
      staging_(budget_, config_.staging_share, devices_ != nullptr ? devices_->largest_unit() : device::kUnit),
      map_(*trap_, *space_, staging_, counters_, config_,
           devices_ != nullptr ? static_cast<size_t>(devices_->count()) : 0, *this),
      device_set_(devices_.get(), map_, config_),
      fault_deadline_(map_, writes_, config_),
      cpu_mappings_(*trap_, map_.frame_table(), fault_deadline_, counters_,
                    devices_ != nullptr && device_set_.own_page_tables()),
      reserve_(budget_, frames_, cpu_mappings_),
      tables_(budget_, reserve_, map_.frame_table(), map_.transitions(), *trap_),
      shared_{*trap_,   *engine_, *space_, config_,         counters_, budget_, frames_,
              staging_, map_,     writes_, fault_deadline_, reserve_,  tables_},
      grants_(shared_, device_set_),
      blocks_(shared_, device_set_, cpu_mappings_),
      acquire_requests_(shared_, devices_.get(), device_set_),
      kernel_ranges_(shared_, devices_.get(), device_set_, blocks_),
      pressure_(shared_),
      failed_(shared_, pressure_),
      waits_(shared_, pressure_, failed_),
      reader_(shared_),
      installer_(shared_, pressure_, failed_, waits_, *this),
      page_in_(shared_, pressure_, failed_, waits_, installer_, reader_, readahead_queue_, *this),
      read_ahead_(shared_, waits_, page_in_, readahead_queue_, reclaim_requests_, pressure_),
      isolator_(shared_),
      writer_(shared_, pressure_, failed_),
      isolated_(shared_, failed_, installer_, page_in_),
      writeback_(shared_, failed_, installer_, page_in_, isolated_, isolator_, writer_, *this),
      supply_(shared_, devices_.get(), device_set_, pressure_, isolated_),
      releases_(shared_, devices_.get(), queues_, cpu_mappings_, device_set_, grants_, pressure_, waits_, supply_),
      managed_holes_(shared_, devices_.get(), device_set_),
      exports_(shared_, devices_.get(), device_set_, blocks_, page_in_, releases_),
      peer_migrator_(shared_, devices_.get(), device_set_, blocks_, page_in_, *this),
      device_writeback_(shared_, devices_.get(), blocks_, failed_, page_in_, writer_, *this),
      demoter_(shared_, devices_.get(), device_set_, cpu_mappings_, blocks_, managed_holes_, failed_, page_in_,
               device_writeback_, supply_, *this),
      range_demoter_(shared_, devices_.get(), device_set_, page_in_, demoter_),
      range_flush_(shared_, isolator_, writeback_, releases_, range_demoter_),
      reclaim_(shared_, pressure_, failed_, waits_, page_in_, isolator_, writeback_, reclaim_requests_, *this, *this),
      staging_loans_(shared_, queues_.promotion_requests, page_in_, reclaim_, supply_, demoter_, *this),
      cpu_mapper_(shared_, devices_.get(), device_set_, cpu_mappings_, blocks_, pressure_, waits_, page_in_, supply_,
                  releases_, demoter_, *this),
      device_reclaim_(shared_, devices_.get(), queues_.promotion_requests, device_set_, releases_, demoter_,
                      peer_migrator_),
      promoter_(shared_, queues_.promotion_requests, device_set_, blocks_, failed_, page_in_, read_ahead_, reader_,
                supply_, pipelined_copy_, peer_migrator_, *this),
      pipelined_copy_(shared_, devices_.get(), device_set_, managed_holes_, page_in_, promoter_),
      copy_in_(shared_, devices_.get(), queues_.demotion_requests, device_set_, blocks_, managed_holes_, failed_,
               page_in_, supply_, pipelined_copy_, *this),
      truncated_files_(shared_, device_set_, page_in_, *this),
      device_acquire_(shared_, devices_.get(), queues_.promotion_requests, device_set_, blocks_, failed_,
                      truncated_files_, page_in_, grants_, releases_, cpu_mapper_, device_reclaim_, promoter_,
                      copy_in_),
      host_acquire_(shared_, failed_, waits_, installer_, page_in_, grants_, supply_, releases_, truncated_files_,
                    demoter_, range_demoter_),
      sync_(shared_, queues_.promotion_requests, sums_, failed_, releases_, range_demoter_, range_flush_),
      exit_flush_(shared_, devices_.get(), device_set_, failed_, range_flush_),
      prefetch_(shared_, devices_.get(), queues_, reclaim_requests_, device_set_, pressure_, page_in_, read_ahead_,
                releases_, demoter_, promoter_),
      advise_(shared_, devices_.get(), device_set_, blocks_, failed_, truncated_files_, page_in_, isolated_, releases_,
              demoter_, range_flush_, prefetch_, *this),
      region_charges_(shared_, sums_, readahead_queue_, device_set_, pressure_, failed_, waits_),
      maker_(shared_, devices_.get(), sums_, device_set_, supply_, region_charges_),
      teardown_(shared_, devices_.get(), queues_, readahead_queue_, reclaim_requests_, device_set_, cpu_mappings_,
                pressure_, failed_, waits_, installer_, page_in_, writer_, grants_, releases_, staging_loans_,
                promoter_, sync_, region_charges_, *this),
      queries_(shared_, devices_.get(), device_set_, blocks_, failed_, releases_),
      workers_(shared_, devices_.get(), queues_.promotion_requests, device_set_, cpu_mappings_, blocks_, page_in_,
               supply_, releases_, peer_migrator_, demoter_, pipelined_copy_, promoter_, copy_in_, cpu_mapper_,
               device_reclaim_, prefetch_),
      faults_(shared_, pressure_, failed_, waits_, installer_, page_in_, read_ahead_, reclaim_requests_, cpu_mappings_,
              device_set_.work(), *this),
      tunables_(shared_, config_, devices_.get(), device_set_, pressure_, page_in_, reader_, supply_, releases_,
                promoter_, faults_, *this) {
  map_.policy_of(kHostPool).resize(0, config_.host_budget / core::kPage);
}

Status Pager::start() {
  {
    Lock lock(map_.mutex());
    if (config_.io_buffer_bytes != 0 && !budget_.charge(config_.io_buffer_bytes, 0, Use::fixed)) {
      return error(EINVAL, "host_budget %s has no room for %s of buffers for encrypted I/O",
                   core::human_bytes(config_.host_budget).c_str(), core::human_bytes(config_.io_buffer_bytes).c_str());
    }
  }
  tunables_.follow_module();
  if (Status s = faults_.start(); !s.ok()) return s;
  if (Status s = reclaim_.start(config_.evict_threads); !s.ok()) return s;
  return workers_.start();
}

Pager::~Pager() {
  {
    Lock lock(map_.mutex());
    reclaim_.stop();
    device_set_.work().notify_all();
    faults_.stop_renewing();
  }
  workers_.stop();
  faults_.stop();
  reclaim_.join();
  space_.reset();   // before the engine, which knows its files
  engine_.reset();  // waits for its threads; nothing is in flight
  if (drains != 0) static_cast<void>(devices_.release());
}

// Returns how many pages the blocks of a pool may occupy now.
uint64_t Pager::pages(uint8_t pool) const {
  if (pool == kHostPool) return frames_.room() / core::kPage;
  if (pool >= kDevicePools)
    return std::max<uint64_t>(device_set_[pool - kDevicePools].budget.limit(), core::kHugePage) / core::kPage;
  const Staging& frames = staging_.of(core::kHugePage << (pool - kStagingPools)).frames;
  return std::max<uint64_t>(frames.bytes(), frames.frame()) / core::kPage;
}

void Pager::reserve_queues(size_t transitions) {
  for (DeviceState& g : device_set_) {
    g.ready.reserve(transitions);
    g.incoming.reserve(transitions);
  }
}

void Pager::host_is_short() {
  if (cpu_mappings_.any()) device_set_.work().notify_one();
}

void Pager::memory_freed(DeferredWork& after) {
  pressure_.watch_idle();
  while (!waits_.queue().empty()) {
    const MemoryWaiter s = waits_.queue().front();
    const Block& block = s.region->table[s.block];
    if (block.state == State::unpopulated && !tables_.may_grow(*s.region, s.block)) {  // no memory for its table
      s.region->table.answer_faults(s.block);
      if (s.urgency == Urgency::fault) failed_.refuse_growth(*s.region, s.block);
      map_.notify();  // an acquire that waits returns the reason
    } else if (block.state == State::unpopulated || block.state == State::stored) {
      if (!page_in_.start_fill(*s.region, s.block, s.urgency, after, &s)) return;
    } else if (block.state == State::staged && (block.flags & core::kFaultPending) != 0) {
      if (!installer_.start_install(*s.region, s.block, after, &s)) return;
    }
    waits_.queue().pop();
  }
  // Memory may also come free without a write that succeeds: a region was freed, or a lease
  // released.
  tables_.try_again();
  if (failed_.any_dropped() && budget_.available() >= reserve_.largest_block()) failed_.revive_dropped();
  read_ahead_.pump_speculative(after);
  if (!device_set_.empty()) promoter_.pump(after);
}

Status Pager::set_name(const void* ptr, const char* name) {
  if (name == nullptr) return error(EINVAL, "name is null; give a string");
  Lock lock(map_.mutex());
  Region* r = map_.find(reinterpret_cast<uintptr_t>(ptr));
  if (r == nullptr) return error(EINVAL, "%p is not inside a region of libvmem", ptr);
  r->name.assign(name, strnlen(name, 63));
  return {};
}

Status Pager::acquire(std::span<const vmem_range> ranges, int location, void* stream, AcquireRequest* ask) {
  const core::ScopeGuard asked([&] {
    if (ask != nullptr) acquire_requests_.withdraw(ranges, ask);
  });
  if (Status s = check_location(location, device_set_.size(), false); !s.ok()) return s;
  if (location >= 0) return device_acquire_.acquire(ranges, location, stream, ask);
  for (const vmem_range& range : ranges) {
    if ((range.access & VMEM_WRITE) != 0) write_overdue(range.ptr, range.size);
  }
  return host_acquire_.acquire(ranges, ask);  // the CPU and DMA have no streams
}

Status Pager::evict(const void* ptr, size_t size, int location) {
  if (location == VMEM_SSD) write_overdue(ptr, size);
  return sync_.evict(ptr, size, location);
}

void Pager::write_overdue(const void* ptr, size_t size) {
  Lock lock(map_.mutex());
  BlockSpan span;
  if (map_.dirty().first() == kNoFrame || !map_.check_range(ptr, size, &span).ok()) return;
  if (span.region->backing != Backing::file_shared) return;
  ++span.region->in_flight;
  reclaim_.background().write_overdue(lock, span);
  --span.region->in_flight;
  if (span.region->dying) map_.notify();
}

bool Pager::has_regions() {
  Lock lock(map_.mutex());
  return !map_.regions().empty();
}

std::string Pager::check() {
  Lock lock(map_.mutex());
  while (staging_.growing()) lock.sleep(map_.changed());  // a slab that is being made is charged already
  if (std::string s = map_.check(); !s.empty()) return s;
  uint64_t charged = 0, tables = 0;
  std::array<size_t, device::kUnitSizes> staged{};
  for (auto& [base, r] : map_.regions()) {
    tables += r->table_charged + r->leases_charged;
    for (BlockIndex b = r->table.next_populated(0); b < r->blocks; b = r->table.next_populated(b + 1)) {
      if (MemoryWaitQueue::marked(r->table[b]) && !waits_.queue().accounts_for(*r, b))
        return "a block is marked as one that waits for memory, and does not: " + std::string(map_.where(*r, b));
      if (core::in_memory(r->table[b].state) || core::on_a_device(r->table[b].state)) {
        const Frame& frame = map_.frame_table()[r->table[b].aux];
        if (in_staging(frame.pool) && frame.bytes != nullptr) ++staged[frame.pool - kStagingPools];
        if (frame.pool == kHostPool || frame.cpu_mapped) charged += r->block_size;
      }
    }
  }
  if (std::string s = cpu_mappings_.check(); !s.empty()) return s;
  if (std::string s = frames_.check(); !s.empty()) return s;
  if (std::string s = writes_.check(map_.transitions().all(), now_ns()); !s.empty()) return s;
  if (std::string s = waits_.queue().check(); !s.empty()) return s;
  if (std::string s = failed_.check(); !s.empty()) return s;
  if (std::string s = releases_.check(); !s.empty()) return s;
  if (std::string s = reclaim_requests_.check(); !s.empty()) return s;
  if (std::string s = readahead_queue_.check(map_.transitions().all()); !s.empty()) return s;
  if (std::string s = page_in_.check(); !s.empty()) return s;
  if (charged != budget_.charged(Use::blocks)) {
    return core::strprintf("%llu bytes are charged for blocks, those in host memory have %llu",
                           static_cast<unsigned long long>(budget_.charged(Use::blocks)),
                           static_cast<unsigned long long>(charged));
  }
  uint64_t staging_bytes = 0;
  for (const StagingPool& p : staging_) {
    if (std::string s = p.growth.check(now_ns()); !s.empty()) return s;
    staging_bytes += p.frames.bytes();
    // Nothing is in flight, so each staging frame is free, or has a block or a host copy.
    const size_t blocks = staged[device::unit_class(p.frames.frame())];
    const size_t copied = map_.copies().count(p.frames);
    if (blocks + copied + p.frames.free() != p.frames.total()) {
      return core::strprintf("staging frames of %s: %zu of blocks, %zu of copies, %zu free, but %zu in all",
                             core::human_bytes(p.frames.frame()).c_str(), blocks, copied, p.frames.free(),
                             p.frames.total());
    }
  }
  if (staging_bytes != budget_.charged(Use::staging)) return "staging frames and their charge disagree";
  if (std::string s = tables_.check(tables); !s.empty()) return s;
  if (std::string s = grants_.check(); !s.empty()) return s;
  return device_set_.check();
}

}  // namespace vmem::pager
