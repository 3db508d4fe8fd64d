#include "pager/threads/device_workers.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/break.h"
#include "core/clock.h"
#include "core/step.h"
#include "core/thread.h"
#include "device/managed/fault_gate.h"
#include "pager/block/batch.h"

namespace vmem::pager {

namespace {

constexpr unsigned kWorkers = 4;              // two each way, which overlap
constexpr unsigned kUnusedLooks = 2;          // staging frames that no region needs stay for so many
constexpr uint64_t kLookEvery = 200000000;    // ns between looks for host pages of the driver
constexpr uint64_t kForOthers = 32;           // a part of a device's memory: what is to be free where nobody has said
constexpr uint64_t kAwayFor = 5'000'000'000;  // ns; with less, other devices' blocks are not there

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

Status DeviceWorkers::start() {
  if (devices_ == nullptr) return {};
  if (!device_set_.own_page_tables()) {
    if (Status s = device::fault_gate::set_hook([this](uintptr_t at, bool store) { return on_touch(at, store); });
        !s.ok())
      return s;
  }
  threads_.reserve(kWorkers);
  for (unsigned i = 0; i < kWorkers; ++i) {
    std::thread worker;
    if (Status s = core::start_thread(
            "vmem-device", [this] { loop(); }, &worker);
        !s.ok())
      return s;
    threads_.push_back(std::move(worker));
  }
  return {};
}

void DeviceWorkers::stop() {
  if (devices_ == nullptr) return;
  {
    Lock lock(map_.mutex());
    stop_ = true;
    device_set_.work().notify_all();
  }
  core::step("devices.stopping");
  for (std::thread& t : threads_) t.join();
  if (!device_set_.own_page_tables()) device::fault_gate::set_hook({}).ignore();
}

// On the park thread: a CPU access that the block's access forbids and no transition explains.
bool DeviceWorkers::on_touch(uintptr_t address, bool store) {
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
      DeferredWork after;
      promoter_.pump(after);
      lock.unlock();
      page_in_.run(after);
      return opened;
    }
    // It moves. Behind a shut gate, or at the trap, the next try waits; before the gate is shut, or after it has
    // opened, only we can.
    if (!core::on_a_device(block.state) || device::fault_gate::gate(address) != device::fault_gate::Gate::open)
      return true;
    lock.sleep_for(map_.changed(), std::chrono::microseconds(200));
  }
}

void DeviceWorkers::loop() {
  unsigned pause = 200, hint_pause = 100;  // us
  Lock lock(map_.mutex());
  const auto any_budget = [this](auto holds) VMEM_LOCKED {
    return std::any_of(device_set_.begin(), device_set_.end(), [&](const DeviceState& g) { return holds(g.budget); });
  };
  const auto look_around = [&]() VMEM_LOCKED {
    const uint64_t now = now_ns();
    if (now < looked_ns_ + kLookEvery) return;
    looked_ns_ = now;
    reclaim_host_pages(lock);
    // Of a size that no region has any more: the next one would have been made by now.
    unused_looks_ = staging_.unused() != nullptr ? unused_looks_ + 1 : 0;
    if (unused_looks_ > kUnusedLooks) supply_.give_back(lock);
  };
  bool again = false;
  while (!stop_) {
    const uint64_t told = device_set_.work().count();
    if (step(lock)) {
      pause = 200, hint_pause = 100, again = false;
      if (any_budget([](const DeviceBudget& b) { return b.is_short(); })) look_around();
      continue;
    }
    if (stop_) break;  // said while the step had given the lock away
    // Told while the step had given the lock away, perhaps past the place. By itself, too, where something is short.
    const bool first = !std::exchange(again, device_set_.work().count() != told && !core::broken("work_count"));
    if (again) {
      if (first) continue;
      device_set_.work().wait_for(lock, std::chrono::microseconds(pause));
      pause = std::min(2 * pause, 20000u);
      look_around();
      continue;
    }
    // A stream that passes a release, or a hint, tells nobody.
    if (above_.hints_wait_for_streams()) {
      device_set_.work().wait_for(lock, std::chrono::microseconds(hint_pause));
      hint_pause = std::min(2 * hint_pause, 2000u);
      look_around();
    } else if (!releases_.empty() && !requests_.empty()) {
      device_set_.work().wait_for(lock, std::chrono::microseconds(200));
      look_around();
    } else if (cpu_mappings_.waits()) {  // until leases end, or memory comes free
      device_set_.work().wait_for(lock, std::chrono::microseconds(pause));
      pause = std::min(2 * pause, 20000u);
      look_around();
    } else if (any_budget([](const DeviceBudget& b) { return b.over(); }) || device_reclaim_.spilled_overstay()) {
      device_set_.work().wait_for(lock,
                                  std::chrono::microseconds(pause));  // a lowered budget: leases end, frames come free
      pause = std::min(2 * pause, 50000u);
      look_around();
    } else if (!any_budget([](const DeviceBudget& b) { return !b.idle(); }) && staging_.unused() == nullptr) {
      device_set_.work().wait(lock);
    } else {
      const uint64_t now = now_ns(), next = looked_ns_ + kLookEvery;
      if (now < next) device_set_.work().wait_for(lock, std::chrono::nanoseconds(next - now));
      look_around();
    }
  }
}

// A CPU that reads a block on a device makes the driver take host pages for it, which nobody has budgeted and which the
// driver keeps until the block is made anew. Nobody is told, so a few blocks are looked at in each round; those that
// have such pages go to host memory, where their reader is, within the budget. What is pinned to its device stays.
void DeviceWorkers::reclaim_host_pages(Lock& lock) {
  look_at_memory(lock);
  if (device_set_.own_page_tables()) return;  // there are none
  core::InplaceVector<std::pair<Region*, BlockIndex>, kLook> found, with;
  size_t passed = 0;
  for (auto& [base, region] : map_.regions()) {
    Region& r = *region;
    if (!r.gpu || r.dying || r.lost || r.read_mostly || base + r.span <= look_at_) continue;
    BlockIndex b = r.table.next_populated(look_at_ > base ? (look_at_ - base) / r.block_size : 0);
    for (; b < r.blocks && found.size() < kLook && passed < kPass; b = r.table.next_populated(b + 1)) {
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
    if (Transition* m = demoter_.begin(*r, b, Leave::host)) batch.push_back(m);
  }
  for (const auto& [r, b] : found) --r->in_flight;
  map_.notify();
  if (batch.empty()) return;
  demoter_.run(lock, batch.all());
}

// Locked on entry and on return. Where others had a device's memory, blocks have again what there is now. What devices
// keep for blocks to come goes back to their drivers: where none have come for a while, where a budget was lowered, and
// where the device has little for other processes, and for the program itself.
void DeviceWorkers::look_at_memory(Lock& lock) {
  bool more = false;
  for (size_t d = 0; d < device_set_.size(); ++d) {
    DeviceBudget& budget = device_set_[d].budget;
    if (!budget.keeps() && !budget.is_short() && map_.spilled().bytes(d) == 0) continue;
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
    if (s.ok() && little) map_.spilled().send_away(d, now_ns() + kAwayFor);
    if (s.ok() && lowered) budget.trimmed(limit);
    if (s.ok() && budget.follow_up(memory.used + memory.free)) more = true;
    // What it keeps of blocks that have left since it said so is seen next time; so is what it did not say.
    const bool may_keep = memory.kept != 0 || had_blocks || budget.charged() != 0 || budget.came();
    if (s.ok() || lost) budget.set_keeps(s.ok() && device_set_.own_page_tables() && may_keep);
  }
  if (!more) return;
  map_.resize_policies();
  page_in_.serve_waiting(lock);
}

// Locked on entry and on return; a worker more may be at what arrives. Ends something that was begun, where that is
// whose turn it is. As long as there are two of them, what is yet to begin comes first: acquires may begin copies
// faster than a device ends them, for as long as they run. The last takes turns where nobody ends what a device has: of
// what is to begin there may be no end either, and a busy device keeps the others at it.
bool DeviceWorkers::end_what_waits(Lock& lock) {
  const bool last = arriving_ + 2 == kWorkers;
  for (size_t d = 0; d < device_set_.size(); ++d) {
    DeviceState& g = device_set_[d];
    if (g.issued.empty() || (last && g.ending != 0)) continue;
    ended_last_ |= last;
    ++arriving_;
    ++g.ending;
    copy_in_.end_issued(lock, static_cast<int>(d));
    --g.ending;
    --arriving_;
    return true;
  }
  return false;
}

// Locked on entry and on return, and not meanwhile. What is to arrive, if a worker may be at it: from other devices and
// from host memory, of each device in turn, since of any of them there may be no end.
bool DeviceWorkers::bring_what_is_ready(Lock& lock) {
  const size_t turns = 2 * device_set_.size();
  for (size_t i = 0; i < turns && arriving_ + 1 < kWorkers; ++i) {
    const size_t turn = (next_turn_ + i) % turns, d = turn / 2;
    const bool incoming = turn % 2 == 0;
    DeviceState& g = device_set_[d];
    if (incoming ? g.incoming.empty() || g.migrating : g.ready.empty()) continue;
    next_turn_ = turn + 1;
    ended_last_ = false;
    ++arriving_;
    if (incoming) {
      g.migrating = true;
      lock.unlock();
      peer_migrator_.run_waiting(static_cast<int>(d));
      lock.lock();
      g.migrating = false;
    } else {
      Batch batch = take_batch<Batch::capacity()>(g.ready, kBatchBytes);
      lock.unlock();
      copy_in_.run(batch, static_cast<int>(d));
      lock.lock();
    }
    --arriving_;
    return true;
  }
  return false;
}

// Does one piece of work, if there is one; the lock is gone meanwhile.
bool DeviceWorkers::step(Lock& lock) {
  if (cpu_mapper_.rescue(lock) || above_.serve_stream_hints(lock) || cpu_mapper_.serve(lock)) return true;
  if (supply_.grow(lock)) {
    page_in_.serve_waiting(lock);
    return true;
  }
  // What arrives may wait for as long as a device is busy: never all of them, for the CPU and those that lack room wait
  // for what leaves.
  if (arriving_ + 2 == kWorkers && !ended_last_ && end_what_waits(lock)) return true;
  if (arriving_ + 1 < kWorkers) {
    ++arriving_;
    const bool did = pipelined_copy_.serve(lock);
    --arriving_;
    if (did) ended_last_ = false;
    if (did) return true;
  }
  if (bring_what_is_ready(lock)) return true;
  if (arriving_ + 1 < kWorkers && end_what_waits(lock)) return true;
  for (size_t d = 0; d < device_set_.size(); ++d) {
    if (device_reclaim_.make(lock, static_cast<int>(d))) return true;
  }
  return above_.serve_demotion(lock);
}

}  // namespace vmem::pager
