// Life of the pager, residents, moves, and what every other file of this room uses.
#include "pager/pager.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/break.h"
#include "core/log.h"
#include "core/thread.h"
#include "pager/clock.h"
#include "pager/insist.h"
#include "pager/io_buffers.h"

namespace vmem::pager {

using core::Block;
using core::BlockIndex;
using core::error;
using core::State;
using core::Status;
using core::Urgency;

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
      gpus_(devices_.get(), map_, config_),
      progress_clock_(map_, writes_, config_),
      shown_(*trap_, map_.residents(), progress_clock_, counters_, devices_ != nullptr && own_page_tables()),
      reserve_(budget_, frames_, shown_),
      tables_(budget_, reserve_, map_.residents(), map_.moves(), *trap_),
      shared_{*trap_,   *engine_, *space_, config_,         counters_, budget_, frames_,
              staging_, map_,     writes_, progress_clock_, reserve_,  tables_},
      grants_(shared_, gpus_),
      blocks_(shared_, gpus_, shown_),
      pressure_(shared_),
      failed_(shared_, pressure_),
      waits_(shared_, pressure_, failed_),
      reader_(shared_),
      installer_(shared_, pressure_, failed_, waits_, *this),
      page_in_(shared_, pressure_, failed_, waits_, installer_, reader_, speculation_, *this),
      read_ahead_(shared_, waits_, page_in_, speculation_, evict_requests_, pressure_),
      isolator_(shared_),
      writer_(shared_, pressure_, failed_),
      write_back_(shared_, pressure_, failed_, installer_, page_in_, isolator_, writer_, *this),
      supply_(shared_, devices_.get(), gpus_, pressure_, write_back_),
      releases_(shared_, devices_.get(), gpus_, grants_, pressure_, waits_, supply_),
      holes_(shared_, devices_.get(), gpus_),
      migrator_(shared_, devices_.get(), gpus_, blocks_, page_in_, *this),
      demoter_(shared_, devices_.get(), gpus_, shown_, blocks_, holes_, failed_, page_in_, writer_, supply_, *this),
      range_demoter_(shared_, devices_.get(), gpus_, page_in_, demoter_),
      evictor_(shared_, pressure_, failed_, waits_, page_in_, isolator_, write_back_, evict_requests_, *this, *this),
      loans_(shared_, queues_.wishes, page_in_, evictor_, supply_, demoter_, *this),
      views_(shared_, devices_.get(), gpus_, shown_, blocks_, pressure_, waits_, page_in_, supply_, releases_, demoter_,
             *this),
      device_room_(shared_, devices_.get(), queues_.wishes, gpus_, releases_, demoter_, migrator_),
      promoter_(shared_, queues_.wishes, gpus_, blocks_, page_in_, read_ahead_, reader_, supply_, migrator_, *this),
      arrivals_(shared_, devices_.get(), queues_.departures, gpus_, blocks_, holes_, failed_, page_in_, supply_, *this),
      shown_files_(shared_, gpus_, page_in_, *this),
      device_acquires_(shared_, devices_.get(), queues_.wishes, gpus_, blocks_, failed_, shown_files_, page_in_,
                       grants_, releases_, views_, device_room_, promoter_, arrivals_),
      workers_(shared_, devices_.get(), queues_.wishes, gpus_, shown_, blocks_, page_in_, supply_, releases_, migrator_,
               demoter_, promoter_, arrivals_, views_, device_room_, *this, *this),
      faults_(shared_, pressure_, failed_, waits_, installer_, page_in_, read_ahead_, shown_, gpus_.work(), *this) {
  map_.policy_of(kHostPool).resize(0, config_.host_budget / core::kPage);
  map_.guests().set_share(config_.device_neighbours);
  wanted_readahead_ = config_.readahead_bytes;
  wanted_timeout_ms_ = config_.fault_timeout_ms;
}

Status Pager::start() {
  {
    Lock lock(map_.mutex());
    if (config_.io_buffer_bytes != 0 && !budget_.charge(config_.io_buffer_bytes, 0, Use::fixed)) {
      return error(EINVAL, "host_budget %s has no room for %s of buffers for encrypted I/O",
                   core::human_bytes(config_.host_budget).c_str(), core::human_bytes(config_.io_buffer_bytes).c_str());
    }
  }
  tunables_changed();
  if (Status s = faults_.start(); !s.ok()) return s;
  if (Status s = evictor_.start(config_.evict_threads); !s.ok()) return s;
  return workers_.start();
}

Pager::~Pager() {
  {
    Lock lock(map_.mutex());
    evictor_.stop();
    gpus_.work().notify_all();
    faults_.stop_renewing();
  }
  workers_.stop();
  faults_.stop();
  evictor_.join();
  space_.reset();   // its files are known to the engine
  engine_.reset();  // waits for its threads; nothing is in flight
  if (drains != 0) static_cast<void>(devices_.release());
}

Status Pager::check_location(int location, bool allow_ssd) const {
  if (location == VMEM_HOST || (allow_ssd && location == VMEM_SSD)) return {};
  if (location >= 0 && static_cast<size_t>(location) < gpus_.size()) return {};
  if (location >= 0 && gpus_.size() != 0) {
    return error(ENODEV, "there is no device %d: this process has %zu", location, gpus_.size());
  }
  if (location >= 0) {
    return error(ENODEV, "there is no device %d: no device tier is in use (setting device, or no GPU and driver)",
                 location);
  }
  return error(EINVAL, "location %d is not accepted here; give a device ordinal, VMEM_HOST%s", location,
               allow_ssd ? " or VMEM_SSD" : "");
}

// The blocks of a pool have so much at most, as it is now.
uint64_t Pager::pages(uint8_t pool) const {
  if (pool == kHostPool) return frames_.room() / core::kPage;
  if (pool >= kDevicePools)
    return std::max<uint64_t>(gpus_[pool - kDevicePools].budget.limit(), core::kHugePage) / core::kPage;
  const Staging& frames = staging_.of(core::kHugePage << (pool - kStagingPools)).frames;
  return std::max<uint64_t>(frames.bytes(), frames.frame()) / core::kPage;
}

void Pager::reserve_queues(size_t moves) {
  for (Gpu& g : gpus_) {
    g.ready.reserve(moves);
    g.from_peers.reserve(moves);
  }
}

void Pager::host_is_short() {
  if (shown_.any()) gpus_.work().notify_one();
}

// Whoever waits for it, most urgent first.
void Pager::came_free(DeferredWork& after) {
  while (!waits_.queue().empty()) {
    const Starved s = waits_.queue().front();
    Block& block = s.region->table[s.block];
    if (block.state == State::untouched && !tables_.may_grow(*s.region, s.block)) {  // it has been used up meanwhile
      block.flags &= static_cast<uint16_t>(~(core::kWanted | core::kWantedWrite));
      if (s.urgency == Urgency::fault) failed_.refuse_growth(*s.region, s.block);
      map_.notify();  // an acquire says why
    } else if (block.state == State::untouched || block.state == State::stored) {
      if (!page_in_.start_fill(*s.region, s.block, s.urgency, after, &s)) return;
    } else if (block.state == State::held && (block.flags & core::kWanted) != 0) {
      if (!installer_.start_install(*s.region, s.block, after, &s)) return;
    }
    waits_.queue().pop();
  }
  // Memory came free another way than by a write that works again: a region was freed, a lease released.
  tables_.try_again();
  if (failed_.any_dropped() && budget_.available() >= reserve_.largest_block()) failed_.revive_dropped();
  read_ahead_.pump_speculative(after);
  if (!gpus_.empty()) promoter_.pump(after);
}

// The same, for those whom memory that came free helps.
void Pager::pump(Lock& lock) {
  After after;
  came_free(after);
  page_in_.run(lock, after);
}

Status Pager::set_name(const void* ptr, const char* name) {
  if (name == nullptr) return error(EINVAL, "name is null; give a string");
  Lock lock(map_.mutex());
  Region* r = map_.find(reinterpret_cast<uintptr_t>(ptr));
  if (r == nullptr) return error(EINVAL, "%p is not inside a region of libvmem", ptr);
  r->name.assign(name, strnlen(name, 63));
  return {};
}

Status Pager::query(const void* ptr, size_t size, vmem_residency* out) {
  Lock lock(map_.mutex());
  SpanOf span;
  if (Status s = map_.check_range(ptr, size, &span); !s.ok()) return s;
  Region& r = *span.region;
  const uintptr_t from = reinterpret_cast<uintptr_t>(ptr), to = from + size;
  ++r.in_flight;
  out->zero_bytes = out->ssd_bytes = out->host_bytes = out->device_bytes = 0;
  out->block_size = r.block_size;
  uint64_t counted = 0;
  for (BlockIndex b = r.table.next_touched(span.first); b <= span.last; b = r.table.next_touched(b + 1)) {
    if (b % kTurn == 0) lock.give_way();
    const uintptr_t start = std::max(from, reinterpret_cast<uintptr_t>(r.address(b)));
    const uintptr_t end = std::min(to, reinterpret_cast<uintptr_t>(r.address(b)) + r.block_size);
    const State state = r.table[b].state;
    if (state == State::untouched) continue;
    counted += end - start;
    // On its way to a device it is in a staging frame, or about to be, until its copy is issued.
    const bool coming = state == State::entering && !blocks_.has_come(r, b, r.table[b].device);
    if (core::in_memory(state) || coming) {
      out->host_bytes += end - start;
    } else if (core::on_a_device(state)) {
      out->device_bytes += end - start;
    } else {
      out->ssd_bytes += end - start;
    }
  }
  (r.from_file() ? out->ssd_bytes : out->zero_bytes) += size - counted;
  --r.in_flight;
  map_.notify();
  return {};
}

void Pager::stats(struct vmem_stats* out) {
  const auto read = [](const std::atomic<uint64_t>& c) { return c.load(std::memory_order_relaxed); };
  out->faults = read(counters_.faults);
  out->fault_ns_total = read(counters_.fault_ns_total);
  out->fault_ns_max = read(counters_.fault_ns_max);
  out->read_bytes = read(counters_.read_bytes);
  out->write_bytes = read(counters_.write_bytes);
  out->evictions = read(counters_.evictions);
  out->clean_drops = read(counters_.clean_drops);
  out->prefetched_blocks = read(counters_.prefetched_blocks);
  out->prefetch_hits = read(counters_.prefetch_hits);
  out->host_to_device_bytes = read(counters_.host_to_device_bytes);
  out->device_to_host_bytes = read(counters_.device_to_host_bytes);
  out->io_errors = read(counters_.io_errors);
  out->checksum_errors = read(counters_.checksum_errors);
  out->soft_faults = read(counters_.soft_faults);
  out->prefetch_wasted = read(counters_.prefetch_wasted);
  out->copied_bytes = read(counters_.copied_bytes);
  out->lost_blocks = read(counters_.lost_blocks);
  out->neighbour_blocks = read(counters_.neighbour_blocks);
  out->ssd_bytes = space_->used();
  Lock lock(map_.mutex());
  out->host_bytes = budget_.charged();
  out->host_budget = budget_.limit();
  out->device_bytes = 0;
  for (const Gpu& g : gpus_) out->device_bytes += g.budget.charged();
  out->regions = map_.regions().size();
  out->unknown_blocks = failed_.unknown_blocks();
}

Status Pager::set_host_budget(uint64_t bytes) {
  After after;
  Lock lock(map_.mutex());
  // A region that was granted goes on being served.
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
  reserve_.follow_budget();
  for (const auto& [base, r] : map_.regions()) {
    if (r->bounces) frames_.limit_bounce(r->block_size, bounce_limit(*r, config_, budget_));
  }
  map_.progress().made();
  budget_.trim();
  map_.resize_policies();
  pressure_.call_evictors();
  came_free(after);
  lock.unlock();
  page_in_.run(after);
  return {};
}

// What an administrator says of the module, and what was set, are in force.
void Pager::tunables_changed() {
  trap::Knobs knobs;
  const bool there = trap_->knobs(&knobs).ok();
  Lock lock(map_.mutex());
  reserve_.set_watermarks(knobs.watermark_low, knobs.watermark_high);
  config_.readahead_bytes = there ? std::min(wanted_readahead_, knobs.readahead_bytes) : wanted_readahead_;
  config_.fault_timeout_ms = there ? std::min(wanted_timeout_ms_, knobs.fault_timeout_ms) : wanted_timeout_ms_;
  for (auto& [base, r] : map_.regions())
    r->readahead.set_max(static_cast<uint32_t>(config_.readahead_bytes / r->block_size));
  faults_.set_deadline(knobs.fault_timeout_ms);
  if (!there) return;
  uint64_t limit = UINT64_MAX;
  for (const uint64_t l : {knobs.frame_limit, knobs.context_limit}) limit = l != 0 ? std::min(limit, l) : limit;
  pressure_.set_ceiling(limit);
}

void Pager::set_readahead(uint64_t bytes) {
  {
    Lock lock(map_.mutex());
    wanted_readahead_ = bytes;
  }
  tunables_changed();
}

void Pager::set_checksum(bool on) {
  reader_.set_verify(on);
}

void Pager::set_fault_timeout(unsigned ms) {
  {
    Lock lock(map_.mutex());
    wanted_timeout_ms_ = ms;
  }
  tunables_changed();
}

void Pager::set_space_budget(uint64_t bytes) {
  space_->set_budget(bytes);
  Lock lock(map_.mutex());
  writes_.has_room();  // there may be: whoever waits for memory should not wait for the back-off
  pressure_.call_evictors();
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
    for (BlockIndex b = r->table.next_touched(0); b < r->blocks; b = r->table.next_touched(b + 1)) {
      if (StarvedQueue::marked(r->table[b]) && !waits_.queue().accounts_for(*r, b))
        return "a block is marked as one that waits for memory, and does not: " + std::string(map_.where(*r, b));
      if (core::in_memory(r->table[b].state) || core::on_a_device(r->table[b].state)) {
        const Resident& resident = map_.residents()[r->table[b].aux];
        if (in_staging(resident.pool) && resident.frame != nullptr) ++staged[resident.pool - kStagingPools];
        if (resident.pool == kHostPool || resident.shown) charged += r->block_size;
      }
    }
  }
  if (std::string s = shown_.check(); !s.empty()) return s;
  if (std::string s = frames_.check(); !s.empty()) return s;
  if (std::string s = writes_.check(map_.moves().all(), now_ns()); !s.empty()) return s;
  if (std::string s = waits_.queue().check(); !s.empty()) return s;
  if (std::string s = failed_.check(); !s.empty()) return s;
  if (std::string s = releases_.check(); !s.empty()) return s;
  if (std::string s = evict_requests_.check(); !s.empty()) return s;
  if (std::string s = speculation_.check(map_.moves().all()); !s.empty()) return s;
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
    // Nothing is in flight: every staging frame is free, a block's, or a copy's.
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
  return gpus_.check();
}

}  // namespace vmem::pager
