#include "pager/calls/exit_flush.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>
#include <new>
#include <thread>

#include "core/break.h"
#include "core/clock.h"
#include "core/log.h"
#include "core/step.h"
#include "core/thread.h"
#include "pager/calls/calls.h"
#include "pager/tier/retry.h"

namespace vmem::pager {

ExitFlush::ExitFlush(PagerContext& ctx, Calls& calls) : ctx_(ctx), host_(calls.host), calls_(calls) {}

// A device with a live lease for writing, whose stores under it must reach a file.
struct ExitFlush::LiveDevice {
  enum class End : uint8_t { none, reached, refused };
  int device = 0;
  std::shared_ptr<std::atomic<End>> end;  // of its work so far; null: no thread waits for it
  bool over = false;                      // that work ended in time
};

// Comes first: a wait for a device that does not answer may never end. By then, blocks that do not
// depend on the device are in their files.
Status ExitFlush::flush_host() {
  Lock lock(ctx_.map.mutex());
  RangeFlush::Writes writes;
  RangeScan scan;
  scan.all = scan.host = true;
  scan.wait = RangeScan::Wait::never;
  uintptr_t at = 0;
  for (auto it = ctx_.map.regions().begin(); it != ctx_.map.regions().end(); it = ctx_.map.regions().lower_bound(at)) {
    at = it->first + 1;
    Region& r = *it->second;
    if (r.backing != Backing::file_shared || r.dying) continue;
    ++r.counts.in_flight;
    calls_.range_flush.begin(lock, {&r, 0, r.blocks - 1}, true, &scan, &writes);
    --r.counts.in_flight;
    ctx_.map.notify();
  }
  return calls_.range_flush.end(lock, &writes);
}

// Writes the blocks that need no wait, then those that had not come to rest, while anything goes
// on, and at last those to which the work of a device may still store.
Status ExitFlush::flush_shared() {
  Lock lock(ctx_.map.mutex());
  Status first;
  const auto tell = [&](const Status& s) VMEM_LOCKED {
    lock.unlock();
    core::log(core::Level::error, "changes of a shared file did not reach it: %.*s", static_cast<int>(s.text().size()),
              s.text().data());
    lock.lock();
    if (first.ok()) first = s;
  };
  RangeScan scan;
  scan.all = scan.at_rest = true;
  for (const auto wait : {RangeScan::Wait::never, RangeScan::Wait::while_it_goes_on}) {
    const bool again = wait != RangeScan::Wait::never;
    scan.wait = wait;
    scan.progress = {};
    scan.progress.look(now_ns(), true);
    // Regions may be freed while we write: each step looks up the next by address.
    uintptr_t at = 0;
    for (auto it = ctx_.map.regions().lower_bound(at); it != ctx_.map.regions().end();
         it = ctx_.map.regions().lower_bound(at)) {
      at = it->first + 1;
      Region& r = *it->second;
      if (r.backing != Backing::file_shared || r.dying || (again && !r.unfinished)) continue;
      ++r.counts.in_flight;
      if (Status s = write_region(lock, r, &scan, again); !s.ok()) tell(s);
      --r.counts.in_flight;
      ctx_.map.notify();
    }
  }
  if (core::broken("live_streams")) return first;
  if (Status s = write_under_leases(lock); !s.ok()) tell(s);
  return first;
}

Status ExitFlush::write_region(Lock& lock, Region& r, RangeScan* scan, bool again) {
  scan->left.clear();
  scan->more_left = false;
  Status s = calls_.range_flush.write(lock, r, 0, r.blocks - 1, true, scan);
  r.unfinished = !scan->left.empty() || scan->more_left;
  if (s.ok() && again && r.unfinished) {
    s = error(ETIMEDOUT,
              "%llu blocks did not settle for %u ms: a stream has not reached their release, or a device is at work on "
              "them; their changes are lost. The first: %s",
              static_cast<unsigned long long>(scan->left.size()), ctx_.tunables.fault_timeout_ms,
              ctx_.map.describe_locked(r, scan->left.empty() ? 0 : scan->left.begin()->first).c_str());
  }
  if (s.ok() && !r.unfinished) s = host_.failed.tell_lost(r, 0, r.blocks - 1, false);
  return s;
}

bool ExitFlush::concerns(const Region& r) {
  return r.backing == Backing::file_shared && r.gpu && !r.dying && !r.lost &&
         r.counts.told_at_exit != r.counts.granted + 1;
}

void ExitFlush::find_live(const Region& r, core::InplaceVector<LiveDevice, device::kMaxDevices>* live,
                          BlockIndex* first) {
  r.leases.visit(0, r.blocks - 1, [&](BlockIndex b, BlockIndex, const Leases& leases) {
    for (const Lease& l : leases) {
      if (l.location < 0 || l.count == 0 || (l.access & VMEM_WRITE) == 0) continue;
      *first = std::min(*first, b);
      const auto same = [&](const LiveDevice& d) { return d.device == l.location; };
      if (std::none_of(live->begin(), live->end(), same)) live->push_back({l.location, nullptr, false});
    }
    return true;
  });
}

// Drains the device on a thread of its own, which stays behind if the device never ends its work.
void ExitFlush::drain_aside(LiveDevice* live) try {
  auto end = std::make_shared<std::atomic<LiveDevice::End>>(LiveDevice::End::none);
  std::thread thread;
  ++drains;
  const auto drain = [devices = ctx_.devices, d = live->device, end] {
    *end = devices->drain(d).ok() ? LiveDevice::End::reached : LiveDevice::End::refused;
    --drains;
  };
  if (core::start_thread("vmem-exit-drain", drain, &thread).ok()) {
    thread.detach();
    live->end = std::move(end);
  } else {
    --drains;
  }
} catch (const std::bad_alloc&) {
}

// Waits until all drains have ended, or none has for the time-out.
void ExitFlush::wait_for_ends(std::span<LiveDevice> live, uint64_t timeout_ms) {
  StallClock progress;
  progress.look(now_ns(), true);
  for (LiveDevice& d : live) {
    while (d.end != nullptr && *d.end == LiveDevice::End::none) {
      progress.look(now_ns(), false);
      if (progress.over(0, timeout_ms * uint64_t{1000000})) break;
      core::add(ctx_.counters.swept_blocks);  // progress for exit: this wait has its own limit
      usleep(1000);
    }
    d.over = d.end != nullptr && *d.end == LiveDevice::End::reached;
    if (d.over) progress.made();
    d.end.reset();  // maybe the last reference: it must not be freed under the lock
  }
}

// Waits for the work of devices with live leases for writing, as for a release, and writes its
// stores. Drops the lock. It waits for all work of a device: kernels that request blocks run on any
// stream, and the stream that a lease names may be gone, with its number in use by another.
Status ExitFlush::write_under_leases(Lock& lock) {
  core::InplaceVector<LiveDevice, device::kMaxDevices> live;
  BlockIndex none = 0;
  const uint64_t timeout_ms = ctx_.tunables.fault_timeout_ms;
  for (const auto& [base, r] : ctx_.map.regions()) {
    if (concerns(*r)) find_live(*r, &live, &none);
  }
  if (live.empty()) return {};
  lock.unlock();
  core::step("exit.streams");
  for (LiveDevice& d : live) drain_aside(&d);
  wait_for_ends(live.all(), timeout_ms);
  lock.lock();
  RangeScan scan;
  scan.all = true;
  scan.wait = RangeScan::Wait::while_it_goes_on;
  scan.progress.look(now_ns(), true);
  Status result;
  uintptr_t at = 0;
  for (auto it = ctx_.map.regions().lower_bound(at); it != ctx_.map.regions().end();
       it = ctx_.map.regions().lower_bound(at)) {
    at = it->first + 1;
    Region& r = *it->second;
    if (!concerns(r)) continue;
    Status s = write_leased(lock, r, live.all(), &scan);
    if (result.ok()) result = std::move(s);
  }
  return result;
}

// known: the devices that were waited for. Drops the lock.
Status ExitFlush::write_leased(Lock& lock, Region& r, std::span<const LiveDevice> known, RangeScan* scan) {
  core::InplaceVector<LiveDevice, device::kMaxDevices> live;
  BlockIndex first = UINT64_MAX;
  find_live(r, &live, &first);
  if (live.empty()) return {};
  ++r.counts.in_flight;
  Status s = calls_.range_flush.write(lock, r, 0, r.blocks - 1, true, scan);
  const auto left = std::find_if(live.begin(), live.end(), [&](const LiveDevice& of) {
    lock.hold();
    const auto reached = [&](const LiveDevice& d) { return d.device == of.device && d.over; };
    // The loss of a device is reported elsewhere.
    return !ctx_.device_set[static_cast<size_t>(of.device)].lost && std::none_of(known.begin(), known.end(), reached);
  });
  if (left != live.end()) {
    r.counts.told_at_exit = r.counts.granted + 1;
    if (s.ok()) {
      s = error(ETIMEDOUT,
                "device %d has work under a live lease with VMEM_WRITE that did not end within %u ms; its later stores "
                "are lost. The first such block: %s",
                left->device, ctx_.tunables.fault_timeout_ms, ctx_.map.describe_locked(r, first).c_str());
    }
  }
  --r.counts.in_flight;
  ctx_.map.notify();
  return s;
}

}  // namespace vmem::pager
