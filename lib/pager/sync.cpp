// Writing on request: vmem_sync, vmem_evict, and shared files at exit.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <memory>
#include <new>
#include <thread>

#include "core/break.h"
#include "core/log.h"
#include "core/step.h"
#include "core/thread.h"
#include "pager/clock.h"
#include "pager/insist.h"
#include "pager/pager.h"

namespace vmem::pager {

using core::BlockIndex;
using core::error;
using core::State;
using core::Status;

namespace {

// A lease is in the way of writing the block: any, where it is to leave memory, else one for writing.
bool leased_against(const Region& r, BlockIndex b, bool keep) {
  const Leases* leases = r.leases.find(b);
  return leases != nullptr && (!keep || std::any_of(leases->begin(), leases->end(),
                                                    [](const Lease& l) { return (l.access & VMEM_WRITE) != 0; }));
}

}  // namespace

// Writes every block of [first, last] that the store does not have; keep: it stays where it is, else it leaves memory.
// Blocks under a live WRITE lease (keep) or any lease (!keep) are skipped, unless `all`: then what is lent to kernels
// is written, too, and not waited for.
Status Pager::write_out(Lock& lock, Region& r, BlockIndex first, BlockIndex last, bool keep, Sweep* sweep) {
  Status from_device;
  const Leave how = keep ? Leave::sync : Leave::evict;
  const uint64_t arrived = r.arrived;
  if (r.gpu && !sweep->host) {
    releases_.wait_for_region(lock, r, sweep);
    from_device = range_demoter_.run(lock, r, first, last, how, sweep);
  }
  Job job;
  job.status = from_device;  // and the rest is written all the same
  Batch batch;
  const size_t most = std::max<size_t>(1, std::min<size_t>(Batch::capacity(), (8 << 20) / r.block_size));
  const uint64_t outstanding = std::max<uint64_t>(2 * config_.io_depth, most);
  const auto flush = [&]() VMEM_LOCKED {
    if (batch.empty()) return;
    write_back_.evict_batch(lock, batch.all());
    batch.clear();
  };
  for (BlockIndex b = r.table.next_touched(first); b <= last && b < r.blocks; b = r.table.next_touched(b + 1)) {
    if (b % kTurn == 0) lock.give_way();
    const bool lent = sweep->all && keep && r.table[b].state == State::taking && map_.residents()[r.table[b].aux].lent;
    if (!lent && core::in_transition(r.table[b].state)) {
      flush();  // never wait while holding transitions of our own
      if (!map_.wait_stable(lock, r, b, sweep)) break;
    }
    // It came to a device when that had been looked through, or was on its way: what it brought is not written.
    for (uint64_t seen = arrived; !sweep->host && r.table[b].state == State::on_device && seen != r.arrived;) {
      seen = r.arrived;
      flush();
      const Status late = range_demoter_.run(lock, r, b, b, how, sweep);
      if (job.status.ok()) job.status = late;
      if (!late.ok() || !map_.wait_stable(lock, r, b, sweep)) break;
    }
    if (r.dying) break;
    core::add(counters_.swept_blocks);
    const core::Block& block = r.table[b];
    if (block.state != State::resident && block.state != State::held && !lent) continue;
    if (!sweep->all && leased_against(r, b, keep)) {
      sweep->skipped = true;
      continue;
    }
    if (keep && (!r.writable() || (block.flags & core::kProtected) != 0)) continue;
    if (!keep) map_.withdraw(block.aux);
    Move* m = isolator_.begin_take(r, b, keep, false);
    if (m == nullptr) {
      if (!lent) map_.admit(r, b, map_.clock().stamp());
      if (job.status.ok()) job.status = error(ENOMEM, "no memory, or no address space, for the image of a block");
      break;
    }
    m->job = &job;
    ++job.outstanding;
    batch.push_back(m);
    if (batch.size() >= most) flush();
    while (job.outstanding > outstanding && batch.empty()) lock.sleep(map_.changed());
  }
  flush();
  while (job.outstanding != 0) lock.sleep(map_.changed());
  return job.status;
}

namespace {

struct FlushWait {
  std::mutex mutex;
  std::condition_variable done;
  bool finished = false;
};

}  // namespace

Status Pager::flush_file(Lock& lock, Region& r) {
  FlushWait wait;
  store::Io io;
  io.op = store::Io::Op::flush;
  io.urgency = core::Urgency::acquire;
  io.file = r.file_id;
  io.user = &wait;
  io.done = [](store::Io& done) {
    FlushWait& w = *static_cast<FlushWait*>(done.user);
    std::lock_guard guard(w.mutex);
    w.finished = true;
    w.done.notify_all();
  };
  lock.unlock();
  store::Io* one = &io;
  engine_->submit({&one, 1});
  {
    std::unique_lock guard(wait.mutex);
    while (!wait.done.wait_for(guard, std::chrono::milliseconds(50), [&] { return wait.finished; })) {
      if (!core::signals_have_come()) continue;
      guard.unlock();
      core::let_signals_in();
      guard.lock();
    }
  }
  lock.lock();
  if (io.result != 0) return core::system_error(io.result, "flushing file %s failed", r.file.path.c_str());
  return {};
}

// Before all else: a device that does not answer keeps whoever waits for it, and what it has nothing to do with is in
// the files by then. What fails is tried again, and said, by flush_shared().
Status Pager::flush_host() {
  Lock lock(map_.mutex());
  Status first;
  Sweep sweep;
  sweep.all = sweep.host = true;
  sweep.wait = Sweep::Wait::never;
  uintptr_t at = 0;
  for (auto it = map_.regions().begin(); it != map_.regions().end(); it = map_.regions().lower_bound(at)) {
    at = it->first + 1;
    Region& r = *it->second;
    if (r.backing != Backing::file_shared || r.dying) continue;
    ++r.in_flight;
    Status s = write_out(lock, r, 0, r.blocks - 1, true, &sweep);
    if (first.ok()) first = std::move(s);
    --r.in_flight;
    map_.notify();
  }
  return first;
}

// Locked. Some of a region, which stays meanwhile; *skipped: blocks were left for the leases that they are under.
Status Pager::sync_blocks(Lock& lock, const SpanOf& span, bool* skipped) {
  Region& r = *span.region;
  ++r.in_flight;
  Sweep sweep;
  Status result = write_out(lock, r, span.first, span.last, true, &sweep);
  if (r.backing == Backing::file_shared &&
      !core::broken("file_flush")) {  // durable, what was written, though a block failed
    const Status flushed = flush_file(lock, r);
    if (result.ok()) result = flushed;
  }
  if (result.ok()) result = failed_.tell_lost(r, span.first, span.last, true);
  --r.in_flight;
  map_.notify();
  *skipped |= sweep.skipped;
  return result;
}

namespace {

// What a sync answers. First what the range itself met, then what was written in the background: if not now, the next
// time.
Status synced(Status result, Status earlier, bool skipped) {
  if (!result.ok()) return result;
  if (!earlier.ok()) return earlier;
  if (!skipped) return {};
  return error(EBUSY,
               "blocks of the range are under a live lease with VMEM_WRITE and were skipped; the rest is synced");
}

}  // namespace

Status Pager::sync(const void* ptr, size_t size) {
  Lock lock(map_.mutex());
  SpanOf span;
  if (Status s = map_.check_range(ptr, size, &span); !s.ok()) return s;
  bool skipped = false;
  Status result = sync_blocks(lock, span, &skipped), earlier;
  if (result.ok()) earlier = writes_.take_error();
  return synced(std::move(result), std::move(earlier), skipped);
}

// Regions come and go while one is written: each step looks up the next by address, and those that came later are left.
Status Pager::sync_all() {
  Lock lock(map_.mutex());
  const uint64_t end = sums_.next_region_id;
  bool skipped = false, any = false;
  Status first;
  uintptr_t at = 0;
  for (auto it = map_.regions().begin(); it != map_.regions().end(); it = map_.regions().lower_bound(at)) {
    at = it->first + 1;
    Region& r = *it->second;
    if (r.dying || r.id >= end) continue;
    any = true;
    Status s = sync_blocks(lock, {&r, 0, r.blocks - 1}, &skipped);
    if (first.ok()) first = std::move(s);
  }
  if (!any) return {};  // what failed went with its region
  Status earlier;
  if (first.ok()) earlier = writes_.take_error();
  return synced(std::move(first), std::move(earlier), skipped);
}

Status Pager::evict(const void* ptr, size_t size, int location) {
  Lock lock(map_.mutex());
  if (location != VMEM_HOST && location != VMEM_SSD) {
    return error(EINVAL, "location %d is not accepted here; give VMEM_HOST or VMEM_SSD", location);
  }
  SpanOf span;
  if (Status s = map_.check_range(ptr, size, &span); !s.ok()) return s;
  Region& r = *span.region;
  if (location == VMEM_HOST && !r.gpu) return failed_.tell_lost(r, span.first, span.last, true);
  forget_hints(queues_.wishes, span);
  ++r.in_flight;
  Sweep sweep;
  Status result;
  if (location == VMEM_HOST) {
    releases_.wait_for_region(lock, r);
    result = range_demoter_.run(lock, r, span.first, span.last, Leave::host, &sweep);
  } else {
    result = write_out(lock, r, span.first, span.last, false, &sweep);
  }
  if (result.ok()) result = failed_.tell_lost(r, span.first, span.last, true);
  --r.in_flight;
  map_.notify();
  return result;
}

namespace {

// A device with a live lease for writing under which a file is to get what is stored.
struct LiveDevice {
  enum class End : uint8_t { none, reached, refused };
  int device = 0;
  std::shared_ptr<std::atomic<End>> end;  // of what it had been told to do; null: nobody could be asked
  bool over = false;                      // it was reached in time
};
using LiveDevices = core::Few<LiveDevice, device::kMaxDevices>;

void find_live(const Region& r, LiveDevices& live, BlockIndex* first) {
  r.leases.visit(0, r.blocks - 1, [&](BlockIndex b, BlockIndex, const Leases& leases) {
    for (const Lease& l : leases) {
      if (l.location < 0 || l.count == 0 || (l.access & VMEM_WRITE) == 0) continue;
      *first = std::min(*first, b);
      const auto same = [&](const LiveDevice& d) { return d.device == l.location; };
      if (std::none_of(live.begin(), live.end(), same)) live.push_back({l.location, nullptr, false});
    }
    return true;
  });
}

// Unlocked. On a thread of its own, which stays behind where the device never ends.
void drain_aside(device::Devices* devices, LiveDevice* live) try {
  auto end = std::make_shared<std::atomic<LiveDevice::End>>(LiveDevice::End::none);
  std::thread thread;
  ++drains;
  const auto drain = [devices, d = live->device, end] {
    *end = devices->drain(d).ok() ? LiveDevice::End::reached : LiveDevice::End::refused;
    --drains;
  };
  if (core::start_thread("vmem-drain", drain, &thread).ok()) {
    thread.detach();
    live->end = std::move(end);
  } else {
    --drains;
  }
} catch (const std::bad_alloc&) {
}

// Unlocked. Until they are reached, or nothing has been for the time-out; all that were asked together.
void wait_for_ends(LiveDevices& live, uint64_t timeout_ms, core::Counters& counters) {
  Progress progress;
  progress.look(now_ns(), true);
  for (LiveDevice& d : live) {
    while (d.end != nullptr && *d.end == LiveDevice::End::none) {
      progress.look(now_ns(), false);
      if (progress.over(0, timeout_ms * uint64_t{1000000})) break;
      core::add(counters.swept_blocks);  // it ends by itself
      usleep(1000);
    }
    d.over = d.end != nullptr && *d.end == LiveDevice::End::reached;
    if (d.over) progress.made();
    d.end.reset();  // may be the last one's, and under the lock nothing is freed
  }
}

}  // namespace

// Locked. At exit: what devices have been told to do while there are live leases for writing is waited for, as for a
// release, and written. It is all of a device's work that is waited for: kernels that ask run on whatever stream, and
// a stream that a lease names may be gone by now, with its number another's.
Status Pager::write_under_leases(Lock& lock) {
  LiveDevices live;
  BlockIndex none = 0;
  const uint64_t timeout_ms = config_.fault_timeout_ms;
  const auto concerns = [](const Region& r) {
    return r.backing == Backing::file_shared && r.gpu && !r.dying && !r.lost && r.told_at_exit != r.granted + 1;
  };
  for (const auto& [base, r] : map_.regions()) {
    if (concerns(*r)) find_live(*r, live, &none);
  }
  if (live.empty()) return {};
  lock.unlock();
  core::step("exit.streams");
  for (LiveDevice& d : live) drain_aside(devices_.get(), &d);
  wait_for_ends(live, timeout_ms, counters_);
  lock.lock();
  Sweep sweep;
  sweep.all = true;
  sweep.wait = Sweep::Wait::while_it_goes_on;
  sweep.progress.look(now_ns(), true);
  Status result;
  uintptr_t at = 0;
  for (auto it = map_.regions().lower_bound(at); it != map_.regions().end(); it = map_.regions().lower_bound(at)) {
    at = it->first + 1;
    Region& r = *it->second;
    LiveDevices of_region;
    BlockIndex first = UINT64_MAX;
    if (concerns(r)) find_live(r, of_region, &first);
    if (of_region.empty()) continue;
    ++r.in_flight;
    Status s = write_out(lock, r, 0, r.blocks - 1, true, &sweep);
    const auto left = std::find_if(of_region.begin(), of_region.end(), [&](const LiveDevice& of) {
      lock.hold();
      const auto reached = [&](const LiveDevice& d) { return d.device == of.device && d.over; };
      // What is lost is said elsewhere.
      return !gpus_[static_cast<size_t>(of.device)].lost && std::none_of(live.begin(), live.end(), reached);
    });
    if (left != of_region.end()) {
      r.told_at_exit = r.granted + 1;
      if (s.ok()) {
        s = error(ETIMEDOUT,
                  "device %d has work under a live lease with VMEM_WRITE, whose end was not seen within %llu ms; what "
                  "it stores from now on is lost. The first such block: %s",
                  left->device, static_cast<unsigned long long>(timeout_ms), map_.where(r, first).c_str());
      }
    }
    if (result.ok()) result = std::move(s);
    --r.in_flight;
    map_.notify();
  }
  return result;
}

// What can be written without a wait for anybody comes first; then what did not come to rest, while anything goes on.
Status Pager::flush_shared() {
  Lock lock(map_.mutex());
  Status first;
  const auto tell = [&](const Status& s) VMEM_LOCKED {
    lock.unlock();
    core::log(core::Level::error, "changes of a shared file did not reach it: %.*s", static_cast<int>(s.text().size()),
              s.text().data());
    lock.lock();
    if (first.ok()) first = s;
  };
  Sweep sweep;
  sweep.all = true;
  for (const auto wait : {Sweep::Wait::never, Sweep::Wait::while_it_goes_on}) {
    const bool again = wait != Sweep::Wait::never;
    sweep.wait = wait;
    sweep.progress = {};
    sweep.progress.look(now_ns(), true);
    // Regions may be freed while we write: each step looks up the next by address.
    uintptr_t at = 0;
    for (auto it = map_.regions().lower_bound(at); it != map_.regions().end(); it = map_.regions().lower_bound(at)) {
      at = it->first + 1;
      Region& r = *it->second;
      if (r.backing != Backing::file_shared || r.dying || (again && !r.unfinished)) continue;
      ++r.in_flight;
      sweep.left = 0;
      Status s = write_out(lock, r, 0, r.blocks - 1, true, &sweep);
      r.unfinished = sweep.left != 0;
      if (s.ok() && again && r.unfinished) {
        s = error(ETIMEDOUT,
                  "%llu blocks did not come to rest for %u ms: a stream has not come to their release, or they are on "
                  "their way; what they may still become is lost. The first: %s",
                  static_cast<unsigned long long>(sweep.left), config_.fault_timeout_ms,
                  map_.where(r, sweep.first_left).c_str());
      }
      if (s.ok() && !r.unfinished) s = failed_.tell_lost(r, 0, r.blocks - 1, false);
      if (!s.ok()) tell(s);
      --r.in_flight;
      map_.notify();
    }
  }
  if (core::broken("live_streams")) return first;
  if (Status s = write_under_leases(lock); !s.ok()) tell(s);
  return first;
}

}  // namespace vmem::pager
