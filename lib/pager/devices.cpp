// The device tier: its life, and the workers that move blocks (Arrivals, Demoter and others).
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "core/break.h"
#include "core/log.h"
#include "core/step.h"
#include "core/thread.h"
#include "device/park.h"
#include "pager/clock.h"
#include "pager/pager.h"

namespace vmem::pager {

using core::Block;
using core::BlockIndex;
using core::error;
using core::ResidentId;
using core::State;
using core::Status;
using core::Urgency;

namespace {

constexpr unsigned kWorkers = 4;              // two each way, which overlap
constexpr uint64_t kLookEvery = 200000000;    // ns between looks for host pages of the driver
constexpr size_t kLook = 128;                 // blocks looked at, 5 to 10 us each
constexpr uint64_t kForOthers = 32;           // a part of a device's memory: what is to be free where nobody has said
constexpr uint64_t kAwayFor = 5'000'000'000;  // ns; with less, other devices' blocks are not there
constexpr size_t kPass = 8192;                // .. and passed over under the lock, most of them elsewhere

// Neighbours together: they are made, or moved, as one range. At most so many bytes, or two blocks.
template <size_t N>
core::Few<Move*, N> take_batch(core::OwnVector<Move*>& from, uint64_t bytes) {
  std::sort(from.begin(), from.end(), [](const Move* a, const Move* b) {
    return a->region != b->region ? a->region->id < b->region->id : a->block < b->block;
  });
  core::Few<Move*, N> batch;
  auto i = from.begin();
  for (; i != from.end() && batch.size() < N; ++i) {
    const size_t size = (*i)->region->block_size;
    if (batch.size() >= 2 && size > bytes) break;
    bytes -= std::min<uint64_t>(bytes, size);
    batch.push_back(*i);
  }
  from.erase(from.begin(), i);
  return batch;
}

// What no block has goes back, above so many bytes of all. A little at a time: blocks may come meanwhile.
Status trim_to(device::Devices& devices, int d, uint64_t keep, const device::Memory& memory) {
  constexpr uint64_t kStep = uint64_t{64} << 20;
  Status s;
  for (uint64_t all = memory.used + memory.kept; s.ok() && all > keep;) {
    all = std::max(keep, all - std::min(all, kStep));
    s = devices.trim(d, all);
  }
  return s;
}

}  // namespace

Status Pager::start_devices() {
  if (devices_ == nullptr) return {};
  if (!own_page_tables()) {
    if (Status s = device::park::set_hook([this](uintptr_t at, bool store) { return on_touch(at, store); }); !s.ok())
      return s;
  }
  threads_.devices.reserve(kWorkers);
  for (unsigned i = 0; i < kWorkers; ++i) {
    std::thread worker;
    if (Status s = core::start_thread(
            "vmem-device", [this] { device_loop(); }, &worker);
        !s.ok())
      return s;
    threads_.devices.push_back(std::move(worker));
  }
  return {};
}

void Pager::stop_devices() {
  if (devices_ == nullptr) return;
  {
    Lock lock(map_.mutex());
    threads_.stop_devices = true;
    gpus_.work().notify_all();
  }
  core::step("devices.stopping");
  for (std::thread& t : threads_.devices) t.join();
  if (!own_page_tables()) device::park::set_hook({}).ignore();
}

// On the park thread: a CPU touch that the block's access forbids and no move explains.
bool Pager::on_touch(uintptr_t address, bool store) {
  Lock lock(map_.mutex());
  for (;;) {
    Region* r = map_.find(address);
    if (r == nullptr || !r->gpu || r->lost || r->dying) return false;
    const BlockIndex b = r->index(reinterpret_cast<const void*>(address));
    Block& block = r->table[b];
    if (block.state == State::on_device) {
      if (!store) return true;
      if (!r->writable()) return false;  // an error of the program, as a store to any read-only mapping
      const device::Range range{reinterpret_cast<uintptr_t>(r->address(b)), r->block_size};
      blocks_.will_change(*r, b);
      // Claimed meanwhile: it must not leave, clean as it was, after the store has been let in.
      blocks_.claim(*r, b);
      ++r->in_flight;
      lock.unlock();
      core::step("touch.opening");
      const bool opened = devices_->open({&range, 1}, device::Access::read_write).ok();
      lock.lock();
      blocks_.unclaim(*r, b);
      --r->in_flight;
      map_.notify();
      After after;
      promoter_.pump(after);
      lock.unlock();
      page_in_.run(after);
      return opened;
    }
    // It moves. Behind a shut gate, or at the trap, the next try waits; before the gate is shut, or after it has
    // opened, only we can.
    if (!core::on_a_device(block.state) || device::park::gate(address) != device::park::Gate::open) return true;
    lock.sleep_for(map_.changed(), std::chrono::microseconds(200));
  }
}

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
  std::array<uintptr_t, kLook> blocks;
  uintptr_t at = 0;
  for (auto it = map_.regions().begin(); it != map_.regions().end();) {
    Region& r = *it->second;
    size_t count = 0, passed = 0;
    BlockIndex b = at > it->first ? (at - it->first) / r.block_size : 0;
    for (b = r.gpu && !r.dying ? r.table.next_touched(b) : r.blocks; b < r.blocks; b = r.table.next_touched(b + 1)) {
      if (count == blocks.size() || ++passed > kPass) break;
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

// ---- workers

void Pager::device_loop() {
  unsigned pause = 200, hint_pause = 100;  // us
  Lock lock(map_.mutex());
  const auto any_budget = [this](auto holds) VMEM_LOCKED {
    return std::any_of(gpus_.begin(), gpus_.end(), [&](const Gpu& g) { return holds(g.budget); });
  };
  const auto look_around = [&]() VMEM_LOCKED {
    const uint64_t now = now_ns();
    if (now < looked_ns_ + kLookEvery) return;
    looked_ns_ = now;
    reclaim_host_pages(lock);
  };
  bool again = false;
  while (!threads_.stop_devices) {
    const uint64_t told = gpus_.work().count();
    if (device_step(lock)) {
      pause = 200, hint_pause = 100, again = false;
      if (any_budget([](const DeviceBudget& b) { return b.is_short(); })) look_around();
      continue;
    }
    if (threads_.stop_devices) break;  // said while the step had given the lock away
    // Told while the step had given the lock away, perhaps past the place. By itself, too, where something is short.
    const bool first = !std::exchange(again, gpus_.work().count() != told && !core::broken("work_count"));
    if (again) {
      if (first) continue;
      gpus_.work().wait_for(lock, std::chrono::microseconds(pause));
      pause = std::min(2 * pause, 20000u);
      look_around();
      continue;
    }
    // A stream that passes a release, or a hint, tells nobody.
    if (!queues_.stream_hints.empty()) {
      gpus_.work().wait_for(lock, std::chrono::microseconds(hint_pause));
      hint_pause = std::min(2 * hint_pause, 2000u);
      look_around();
    } else if (!releases_.empty() && !queues_.wishes.empty()) {
      gpus_.work().wait_for(lock, std::chrono::microseconds(200));
      look_around();
    } else if (shown_.waits()) {  // until leases end, or memory comes free
      gpus_.work().wait_for(lock, std::chrono::microseconds(pause));
      pause = std::min(2 * pause, 20000u);
      look_around();
    } else if (any_budget([](const DeviceBudget& b) { return b.over(); }) || device_room_.guests_overstay()) {
      gpus_.work().wait_for(lock, std::chrono::microseconds(pause));  // a lowered budget: leases end, frames come free
      pause = std::min(2 * pause, 50000u);
      look_around();
    } else if (!any_budget([](const DeviceBudget& b) { return !b.idle(); })) {
      gpus_.work().wait(lock);
    } else {
      const uint64_t now = now_ns(), next = looked_ns_ + kLookEvery;
      if (now < next) gpus_.work().wait_for(lock, std::chrono::nanoseconds(next - now));
      look_around();
    }
  }
}

// A CPU that reads a block on a device makes the driver take host pages for it, which nobody has budgeted and which the
// driver keeps until the block is made anew. Nobody is told, so a few blocks are looked at in each round; those that
// have such pages go to host memory, where their reader is, within the budget. What is pinned to its device stays.
void Pager::reclaim_host_pages(Lock& lock) {
  look_at_memory(lock);
  if (own_page_tables()) return;  // there are none
  core::Few<std::pair<Region*, BlockIndex>, kLook> found, with;
  size_t passed = 0;
  for (auto& [base, region] : map_.regions()) {
    Region& r = *region;
    if (!r.gpu || r.dying || r.lost || r.read_mostly || base + r.span <= look_at_) continue;
    BlockIndex b = r.table.next_touched(look_at_ > base ? (look_at_ - base) / r.block_size : 0);
    for (; b < r.blocks && found.size() < kLook && passed < kPass; b = r.table.next_touched(b + 1)) {
      ++passed;
      bool pinned = false;
      if (r.table[b].state != State::on_device || leased(r, b)) continue;
      temperature(r, b, &pinned);
      if (!pinned) found.push_back({&r, b});
    }
    look_at_ = base + std::min(b, r.blocks) * r.block_size;
    if (found.size() == kLook || passed == kPass) break;
  }
  if (found.size() < kLook && passed < kPass) look_at_ = 0;  // all have been seen
  for (const auto& [r, b] : found) ++r->in_flight;
  lock.unlock();
  for (const auto& [r, b] : found) {
    uint64_t bytes = 0;
    devices_->host_resident_bytes({reinterpret_cast<uintptr_t>(r->address(b)), r->block_size}, &bytes).ignore();
    if (bytes != 0) with.push_back({r, b});
  }
  core::step("device.looked");
  lock.lock();
  releases_.reap(lock);
  Batch batch;
  for (const auto& [r, b] : with) {
    if (r->dying || r->lost || r->table[b].state != State::on_device || leased(*r, b) || batch.size() == kDeviceBatch)
      continue;
    if (Move* m = demoter_.begin(*r, b, Leave::host)) batch.push_back(m);
  }
  for (const auto& [r, b] : found) --r->in_flight;
  map_.notify();
  if (batch.empty()) return;
  demoter_.run(lock, batch.all());
}

// Locked on entry and on return. Where others had a device's memory, blocks have again what there is now. What devices
// keep for blocks to come goes back to their drivers: where none have come for a while, where a budget was lowered, and
// where the device has little for other processes, and for the program itself.
void Pager::look_at_memory(Lock& lock) {
  bool more = false;
  for (size_t d = 0; d < gpus_.size(); ++d) {
    DeviceBudget& budget = gpus_[d].budget;
    if (!budget.keeps() && !budget.is_short() && map_.guests().bytes(d) == 0) continue;
    const uint64_t limit = budget.limit();
    const bool lowered = budget.must_trim();
    budget.looked();
    const bool rests = budget.rests();
    const bool had_blocks = budget.charged() != 0;
    const std::optional<uint64_t> reserve = config_.device_reserve;
    lock.unlock();
    core::step("device.memory");
    device::Memory memory = {};
    Status s = devices_->memory(static_cast<int>(d), &memory);
    const bool little = memory.free < memory.kept + reserve.value_or(memory.total / kForOthers);
    if (s.ok() && memory.kept != 0 && (lowered || little || rests))
      s = trim_to(*devices_, static_cast<int>(d), little || rests ? 0 : limit, memory);
    const bool lost = !s.ok() && !devices_->health(static_cast<int>(d)).ok();
    lock.lock();
    if (s.ok() && little) map_.guests().send_away(d, now_ns() + kAwayFor);
    if (s.ok() && lowered) budget.trimmed(limit);
    if (s.ok() && budget.follow_up(memory.used + memory.free)) more = true;
    // What it keeps of blocks that have left since it said so is seen next time; so is what it did not say.
    const bool may_keep = memory.kept != 0 || had_blocks || budget.charged() != 0 || budget.came();
    if (s.ok() || lost) budget.set_keeps(s.ok() && own_page_tables() && may_keep);
  }
  if (!more) return;
  map_.resize_policies();
  pump(lock);
}

// Locked on entry and on return; a worker more may be at what arrives. Ends something that was begun, where that is
// whose turn it is. As long as there are two of them, what is yet to begin comes first: acquires may begin copies
// faster than a device ends them, for as long as they run. The last takes turns where nobody ends what a device has: of
// what is to begin there may be no end either, and a busy device keeps the others at it.
bool Pager::end_what_waits(Lock& lock) {
  const bool last = threads_.arriving + 2 == kWorkers;
  for (size_t d = 0; d < gpus_.size(); ++d) {
    Gpu& g = gpus_[d];
    if (g.issued.empty() || (last && g.ending != 0)) continue;
    threads_.ended_last |= last;
    ++threads_.arriving;
    ++g.ending;
    arrivals_.end_issued(lock, static_cast<int>(d));
    --g.ending;
    --threads_.arriving;
    return true;
  }
  return false;
}

// Does one piece of work, if there is one; the lock is gone meanwhile.
bool Pager::device_step(Lock& lock) {
  if (views_.rescue(lock) || serve_stream_hints(lock) || views_.serve(lock)) return true;
  if (supply_.grow(lock)) {
    pump(lock);
    return true;
  }
  // What arrives may wait for as long as a device is busy: never all of them, for the CPU and those that lack room wait
  // for what leaves.
  if (threads_.arriving + 2 == kWorkers && !threads_.ended_last && end_what_waits(lock)) return true;
  for (size_t d = 0; d < gpus_.size() && threads_.arriving + 1 < kWorkers; ++d) {
    Gpu& g = gpus_[d];
    if (!g.from_peers.empty() && !g.migrating) {
      const auto batch = take_batch<kPeerBatch>(g.from_peers, kPeerBatchBytes);
      g.migrating = true;
      threads_.ended_last = false;
      ++threads_.arriving;
      lock.unlock();
      migrator_.run(batch.all(), static_cast<int>(d), static_cast<int>(d));
      lock.lock();
      --threads_.arriving;
      g.migrating = false;
      return true;
    }
    if (g.ready.empty()) continue;
    Batch batch = take_batch<Batch::capacity()>(g.ready, kBatchBytes);
    threads_.ended_last = false;
    ++threads_.arriving;
    lock.unlock();
    arrivals_.run(batch, static_cast<int>(d));
    lock.lock();
    --threads_.arriving;
    return true;
  }
  if (threads_.arriving + 1 < kWorkers && end_what_waits(lock)) return true;
  for (size_t d = 0; d < gpus_.size(); ++d) {
    if (device_room_.make(lock, static_cast<int>(d))) return true;
  }
  return serve_departure(lock);
}

}  // namespace vmem::pager
