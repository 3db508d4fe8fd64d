#include "pager/threads/device_workers.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/break.h"
#include "core/clock.h"
#include "core/step.h"
#include "core/thread.h"
#include "device/cpu_gate.h"
#include "pager/block/block_run.h"
#include "pager/calls/calls.h"

namespace vmem::pager {

namespace {

constexpr unsigned kWorkers = 4;            // two in each direction, so that copies overlap
constexpr unsigned kUnusedLooks = 2;        // looks after which unused staging frames are given back
constexpr uint64_t kLookEvery = 200000000;  // ns between looks at devices' memory and at host pages of the driver
constexpr uint64_t kForOthers = 32;         // 1/kForOthers of a device's memory stays free if device_reserve is not set
constexpr uint64_t kAwayFor = 5'000'000'000;  // ns without spilled blocks on a device that has less free memory

// Returns memory that no block uses to the driver, until the device has `keep` bytes in all. Trims
// in small steps, since blocks may come in between.
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

DeviceWorkers::DeviceWorkers(PagerContext& ctx, Calls& calls)
    : ctx_(ctx), calls_(calls), host_(calls.host), leases_(calls.leases), tier_(calls.tier) {}

Status DeviceWorkers::start() {
  if (ctx_.devices == nullptr) return {};
  if (device::CpuGate* const gate = ctx_.devices->cpu_gate(); gate != nullptr) {
    if (Status s = gate->set_hook([this](uintptr_t at, bool store) { return on_touch(at, store); }); !s.ok()) return s;
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
  if (ctx_.devices == nullptr) return;
  {
    Lock lock(ctx_.map.mutex());
    stop_ = true;
    ctx_.device_set.work().notify_all();
  }
  core::step("devices.stopping");
  for (std::thread& t : threads_) t.join();
  if (device::CpuGate* const gate = ctx_.devices->cpu_gate(); gate != nullptr) gate->set_hook({}).ignore();
}

// Runs on the park thread. Handles a CPU access that the block's protection forbids and no
// transition explains. Returns true if the access is to be retried, false if the handler installed
// before ours gets it.
bool DeviceWorkers::on_touch(uintptr_t address, bool store) {
  Lock lock(ctx_.map.mutex());
  for (;;) {
    Region* r = ctx_.map.find(address);
    if (r == nullptr || !r->gpu || r->lost || r->dying) return false;
    const BlockIndex b = r->index(reinterpret_cast<const void*>(address));
    const Block& block = r->table[b];
    if (block.state == State::on_device) {
      if (!store) return true;
      if (!r->writable()) return false;  // an error of the program, like a store to any read-only mapping
      const device::Range range{reinterpret_cast<uintptr_t>(r->address(b)), r->block_size};
      tier_.blocks.will_change(*r, b);
      // Claim the block: it must not leave as clean after the store has been let in.
      tier_.blocks.claim(*r, b);
      ++r->counts.in_flight;
      lock.unlock();
      core::step("touch.opening");
      const bool opened = ctx_.devices->open({&range, 1}, device::Access::read_write).ok();
      lock.lock();
      tier_.blocks.unclaim(*r, b);
      --r->counts.in_flight;
      ctx_.map.notify();
      DeferredWork after;
      tier_.promoter.pump(after);
      lock.unlock();
      host_.page_in.run(after);
      return opened;
    }
    // The block is moving. A retried access waits at a shut gate or at the trap. If the gate is not
    // shut yet, or is open again, only this loop can wait.
    if (!core::on_a_device(block.state) || ctx_.devices->cpu_gate()->gate(address) != device::Gate::open) return true;
    lock.sleep_for(ctx_.map.changed(), std::chrono::microseconds(200));
  }
}

void DeviceWorkers::loop() {
  unsigned pause = 200, hint_pause = 100;  // us
  Lock lock(ctx_.map.mutex());
  const auto any_budget = [this](auto holds) VMEM_LOCKED {
    return std::any_of(ctx_.device_set.begin(), ctx_.device_set.end(),
                       [&](const DeviceState& g) { return holds(g.budget); });
  };
  const auto look_around = [&]() VMEM_LOCKED {
    const uint64_t now = now_ns();
    if (now < looked_ns_ + kLookEvery) return;
    looked_ns_ = now;
    reclaim_host_pages(lock);
    // Frames of a size that no region uses any more: a new region would have claimed them by now.
    unused_looks_ = ctx_.staging.unused() != nullptr ? unused_looks_ + 1 : 0;
    if (unused_looks_ > kUnusedLooks) tier_.staging_allocator.give_back(lock);
  };
  bool again = false;
  while (!stop_) {
    const uint64_t told = ctx_.device_set.work().count();
    if (step(lock)) {
      pause = 200, hint_pause = 100, again = false;
      if (any_budget([](const DeviceBudget& b) { return b.is_short(); })) look_around();
      continue;
    }
    if (stop_) break;  // set while step() had dropped the lock
    // Work may have been queued behind our scan while step() had dropped the lock: scan once more.
    // If that recurs, sleep for a short time only.
    const bool first = !std::exchange(again, ctx_.device_set.work().count() != told && !core::broken("work_count"));
    if (again) {
      if (first) continue;
      ctx_.device_set.work().wait_for(lock, std::chrono::microseconds(pause));
      pause = std::min(2 * pause, 20000u);
      look_around();
      continue;
    }
    // Poll: streams that pass a release or a hint send no notification.
    if (calls_.prefetch.hints_wait_for_streams()) {
      ctx_.device_set.work().wait_for(lock, std::chrono::microseconds(hint_pause));
      hint_pause = std::min(2 * hint_pause, 2000u);
      look_around();
    } else if (!leases_.releases.empty() && !ctx_.queues.promotion_requests.empty()) {
      ctx_.device_set.work().wait_for(lock, std::chrono::microseconds(200));
      look_around();
    } else if (ctx_.cpu_mappings.waits()) {  // poll until leases end or memory comes free
      ctx_.device_set.work().wait_for(lock, std::chrono::microseconds(pause));
      pause = std::min(2 * pause, 20000u);
      look_around();
    } else if (any_budget([](const DeviceBudget& b) { return b.over(); }) || tier_.device_reclaim.spilled_overstay()) {
      // A budget was lowered: poll until leases end or frames come free.
      ctx_.device_set.work().wait_for(lock, std::chrono::microseconds(pause));
      pause = std::min(2 * pause, 50000u);
      look_around();
    } else if (!any_budget([](const DeviceBudget& b) { return !b.idle(); }) && ctx_.staging.unused() == nullptr) {
      ctx_.device_set.work().wait(lock);
    } else {
      const uint64_t now = now_ns(), next = looked_ns_ + kLookEvery;
      if (now < next) ctx_.device_set.work().wait_for(lock, std::chrono::nanoseconds(next - now));
      look_around();
    }
  }
}

// When a CPU reads a block on a device, the driver takes host pages for it. They are in no budget,
// and the driver keeps them until the block is made anew. The driver does not report them, so each
// round asks about a few blocks. Blocks with such pages move to host memory, where their reader is,
// within the budget. Blocks that are pinned to their device stay.
void DeviceWorkers::reclaim_host_pages(Lock& lock) {
  look_at_memory(lock);
  if (ctx_.device_set.own_page_tables()) return;  // such devices take no host pages
  core::InplaceVector<std::pair<Region*, BlockIndex>, kDriverLook> found, with;
  size_t passed = 0;
  for (auto& [base, region] : ctx_.map.regions()) {
    Region& r = *region;
    if (!r.gpu || r.dying || r.lost || r.advice.read_mostly || base + r.span <= look_at_) continue;
    BlockIndex b = r.table.next_populated(look_at_ > base ? (look_at_ - base) / r.block_size : 0);
    for (; b < r.blocks && found.size() < kDriverLook && passed < kDriverPass; b = r.table.next_populated(b + 1)) {
      ++passed;
      bool pinned = false;
      if (r.table[b].state != State::on_device || leased(r, b)) continue;
      temperature(r, b, &pinned);
      if (!pinned) found.push_back({&r, b});
    }
    look_at_ = base + std::min(b, r.blocks) * r.block_size;
    if (found.size() == kDriverLook || passed == kDriverPass) break;
  }
  if (found.size() < kDriverLook && passed < kDriverPass) look_at_ = 0;  // all regions have been scanned
  for (const auto& [r, b] : found) ++r->counts.in_flight;
  lock.unlock();
  for (const auto& [r, b] : found) {
    uint64_t bytes = 0;
    ctx_.devices->host_resident_bytes({reinterpret_cast<uintptr_t>(r->address(b)), r->block_size}, &bytes).ignore();
    if (bytes != 0) with.push_back({r, b});
  }
  core::step("device.looked");
  lock.lock();
  leases_.releases.reap(lock);
  Batch batch;
  for (const auto& [r, b] : with) {
    if (r->dying || r->lost || r->table[b].state != State::on_device || leased(*r, b) || batch.size() == kDeviceBatch)
      continue;
    if (Transition* m = tier_.demoter.begin(*r, b, Leave::host)) batch.push_back(m);
  }
  for (const auto& [r, b] : found) --r->counts.in_flight;
  ctx_.map.notify();
  if (batch.empty()) return;
  tier_.demoter.run(lock, batch.all());
}

// Drops and retakes the lock. Raises the limit of a device if other processes have freed memory
// there. Returns memory that a device keeps for future blocks to its driver:
// - if no block has come for a while,
// - if its budget was lowered, or
// - if the device has little free memory for other processes and the program itself.
void DeviceWorkers::look_at_memory(Lock& lock) {
  bool more = false;
  for (size_t d = 0; d < ctx_.device_set.size(); ++d) {
    DeviceBudget& budget = ctx_.device_set[d].budget;
    if (!budget.keeps() && !budget.is_short() && ctx_.map.spilled().bytes(d) == 0) continue;
    const uint64_t limit = budget.limit();
    const bool lowered = budget.must_trim();
    budget.looked();
    const bool rests = budget.rests();
    const bool had_blocks = budget.charged() != 0;
    const std::optional<uint64_t> reserve = ctx_.tunables.device_reserve;
    lock.unlock();
    core::step("device.memory");
    device::Memory memory = {};
    Status s = ctx_.devices->memory(static_cast<int>(d), &memory);
    const bool little = memory.free < memory.kept + reserve.value_or(memory.total / kForOthers);
    if (s.ok() && memory.kept != 0 && (lowered || little || rests))
      s = trim_to(*ctx_.devices, static_cast<int>(d), little || rests ? 0 : limit, memory);
    const bool lost = !s.ok() && !ctx_.devices->health(static_cast<int>(d)).ok();
    lock.lock();
    if (s.ok() && little) ctx_.map.spilled().send_away(d, now_ns() + kAwayFor);
    if (s.ok() && lowered) budget.trimmed(limit);
    if (s.ok() && budget.follow_up(memory.used + memory.free)) more = true;
    // Memory kept from blocks that left after the device answered is seen next time, and so is that
    // of a device that did not answer.
    const bool may_keep = memory.kept != 0 || had_blocks || budget.charged() != 0 || budget.came();
    if (s.ok() || lost) budget.set_keeps(s.ok() && ctx_.device_set.own_page_tables() && may_keep);
  }
  if (!more) return;
  ctx_.map.resize_policies();
  host_.page_in.serve_waiting(lock);
}

// Ends copies that were begun on a device. Call only if one more worker may handle arrivals. Drops
// and retakes the lock. Returns false if there is nothing to end.
// - While two more workers may handle arrivals, step() begins copies before it ends any. Acquires
//   may begin copies faster than a device ends them, so ends alone could keep both workers busy.
// - The last worker alternates, and ends copies of devices where no other worker does: new arrivals
//   may never cease either, and a busy device keeps the other workers waiting.
bool DeviceWorkers::end_what_waits(Lock& lock) {
  const bool last = arriving_ + 2 == kWorkers;
  for (size_t d = 0; d < ctx_.device_set.size(); ++d) {
    DeviceState& g = ctx_.device_set[d];
    if (g.issued.empty() || (last && g.ending != 0)) continue;
    ended_last_ |= last;
    ++arriving_;
    ++g.ending;
    tier_.copy_in.end_issued(lock, static_cast<int>(d));
    --g.ending;
    --arriving_;
    return true;
  }
  return false;
}

// Brings in one batch of blocks, if one more worker may handle arrivals. Takes turns between
// devices, and between blocks from other devices and from host memory, since any of these may
// always have more. Drops and retakes the lock. Returns false if there is nothing to bring in.
bool DeviceWorkers::bring_what_is_ready(Lock& lock) {
  const size_t turns = 2 * ctx_.device_set.size();
  for (size_t i = 0; i < turns && arriving_ + 1 < kWorkers; ++i) {
    const size_t turn = (next_turn_ + i) % turns, d = turn / 2;
    const bool incoming = turn % 2 == 0;
    DeviceState& g = ctx_.device_set[d];
    if (incoming ? g.incoming.empty() || g.migrating : g.ready.empty()) continue;
    next_turn_ = turn + 1;
    ended_last_ = false;
    ++arriving_;
    if (incoming) {
      g.migrating = true;
      lock.unlock();
      tier_.peer_migrator.run_waiting(static_cast<int>(d));
      lock.lock();
      g.migrating = false;
    } else {
      Batch batch = take_batch<Batch::capacity()>(g.ready, kBatchBytes);
      lock.unlock();
      tier_.copy_in.run(batch, static_cast<int>(d));
      lock.lock();
    }
    --arriving_;
    return true;
  }
  return false;
}

// Does one piece of work. Drops and retakes the lock. Returns false if there is none.
bool DeviceWorkers::step(Lock& lock) {
  if (tier_.cpu_mapper.rescue(lock) || calls_.prefetch.serve_stream_hints(lock) || tier_.cpu_mapper.serve(lock))
    return true;
  if (tier_.staging_allocator.grow(lock)) {
    host_.page_in.serve_waiting(lock);
    return true;
  }
  // Arrivals may wait for as long as a device is busy. One worker stays free of them: CPU faults
  // and blocks that lack room wait for departures.
  if (arriving_ + 2 == kWorkers && !ended_last_ && end_what_waits(lock)) return true;
  if (arriving_ + 1 < kWorkers) {
    ++arriving_;
    const bool did = tier_.pipelined_copy.serve(lock);
    --arriving_;
    if (did) ended_last_ = false;
    if (did) return true;
  }
  if (bring_what_is_ready(lock)) return true;
  if (arriving_ + 1 < kWorkers && end_what_waits(lock)) return true;
  for (size_t d = 0; d < ctx_.device_set.size(); ++d) {
    if (tier_.device_reclaim.make(lock, static_cast<int>(d))) return true;
  }
  return calls_.prefetch.serve_demotion(lock);
}

}  // namespace vmem::pager
