// Leases at devices, and what ends them: a release ends its lease when the stream gets there.
#include <pthread.h>

#include <algorithm>
#include <array>
#include <bitset>
#include <cerrno>
#include <chrono>

#include "core/at_exit.h"
#include "core/break.h"
#include "core/on_exit.h"
#include "core/step.h"
#include "device/park.h"
#include "pager/clock.h"
#include "pager/pager.h"

namespace vmem::pager {

using core::Block;
using core::BlockIndex;
using core::error;
using core::State;
using core::Status;

namespace {

// Where the stream's leases of these ranges are: a device, or, last, the host. Empty where it does not have them all.
std::bitset<device::kMaxDevices + 1> locations_of(std::span<const SpanOf> spans, void* stream) {
  std::bitset<device::kMaxDevices + 1> at;
  for (const SpanOf& s : spans) {
    const LeaseMap& leases = s.region->leases;
    if (leases.unleased(s.first, s.last, stream) <= s.last) return {};
    each_leased_run(leases, s.first, s.last + 1, [&](BlockIndex, BlockIndex, int location) {
      at.set(location >= 0 ? static_cast<size_t>(location) : device::kMaxDevices);
      return true;
    });
  }
  return at;
}

}  // namespace

// Locked. At exit, of a release that its stream has taken: kernels may have stored since the files were written.
void Pager::forget_saved(const Ending& ending) {
  for (const SpanOf& s : ending.spans) {
    for (BlockIndex b = s.first; b <= s.last; ++b) {
      const Block& block = s.region->table[b];
      if (core::on_a_device(block.state)) map_.residents()[block.aux].saved = false;
    }
  }
}

// Locked on entry and on return, and not meanwhile: a driver may take its time to answer. Ends the releases whose
// streams have got there. Any number of threads may be here at once, and one that does not come back keeps nobody: each
// looks at the oldest release of every lane, and what it learned counts if that release has not ended meanwhile.
void Pager::reap(Lock& lock) {
  struct Look {
    uint64_t id = 0;
    int device = 0;
    device::Ticket ticket;
    bool over = false;
    Status health;
  };
  std::array<Look, 16> looks;
  std::array<const Ending*, 16> oldest;
  std::list<Ending> over;  // a ticket ends without the lock too; their regions are in flight
  for (uint64_t after = 0;;) {
    const size_t count = queues_.endings.oldest(after, oldest);
    for (size_t i = 0; i < count; ++i) looks[i] = {oldest[i]->id, oldest[i]->device, oldest[i]->ticket, false, {}};
    if (count == 0 && over.empty()) return;
    lock.unlock();
    over.clear();
    core::step("reap.looking");
    for (size_t i = 0; i < count; ++i) {
      Look& look = looks[i];
      // A lost device never tells; what its kernels did is lost with it, and the lease too. What one that is well does
      // not tell now it tells later.
      if (!devices_->poll(look.ticket, &look.over).ok()) {
        look.health = devices_->health(look.device);
        look.over = !look.health.ok();
      }
      if (core::broken("release_event")) look.over = true;
      look.ticket.reset();
    }
    lock.lock();
    if (count == 0) continue;
    after = looks[count - 1].id;
    for (const Look& look : std::span(looks.data(), count)) {
      const Ending* const e = queues_.endings.find(look.id);
      if (!look.over || e == nullptr) continue;
      if (!look.health.ok()) gpus_.saw_loss(look.device, look.health);
      for (const SpanOf& s : e->spans) ++s.region->in_flight;
      grants_.end(*e);
      queues_.endings.end(*e, &over);
      after = 0;  // the next of its lane may be over too
    }
    for (const Ending& e : over) {
      for (const SpanOf& s : e.spans) {
        map_.match_holds(lock, s);
        --s.region->in_flight;
      }
    }
    if (!over.empty()) map_.notify();
  }
}

namespace {

// A stream passes a release without telling anybody: looked at often at first, then less.
class Patience {
 public:
  void wait(core::BigLock& lock, std::condition_variable& changed) VMEM_LOCKED {
    lock.sleep_for(changed, std::chrono::microseconds(pause_));
    pause_ = std::min(pause_ * 2, 1000u);
  }

 private:
  unsigned pause_ = 20;
};

}  // namespace

// Locked. Nothing but leases that are ending keeps the ranges at another location: *wait. -EBUSY: live leases do.
Status Pager::check_endings(std::span<const SpanOf> spans, int location, bool* wait) {
  for (const SpanOf& s : spans) {
    if (s.region->dying) return error(EINVAL, "the region was freed meanwhile");
    const Lease* live = nullptr;
    BlockIndex at = 0;
    s.region->leases.visit(s.first, s.last, [&](BlockIndex first, BlockIndex, const Leases& leases) {
      if (leases.front().location == location) return true;
      const auto found = std::find_if(leases.begin(), leases.end(), [](const Lease& l) { return l.count != 0; });
      if (found != leases.end()) live = &*found;
      at = first;
      *wait = true;
      return live == nullptr;
    });
    if (live != nullptr) {
      return error(EBUSY, "%s is leased at location %d; release it there first", map_.where(*s.region, at).c_str(),
                   live->location);
    }
  }
  return {};
}

// Locked. Leases that are ending have the room that these need: *wait. -ENOMEM: live ones do.
Status Pager::check_room(std::span<const SpanOf> spans, int d, bool* wait) {
  const DeviceBudget& budget = gpus_[static_cast<size_t>(d)].budget;
  uint64_t need = 0;
  size_t largest = 0;
  for (const SpanOf& s : spans) {
    largest = std::max(largest, s.region->block_size);
    need += (s.last - s.first + 1 - s.region->leases.leased(s.first, s.last)) * s.region->block_size;
  }
  if (budget.room_for_lease(need)) return {};
  if (!budget.room_once_ended(need)) {
    return error(
        ENOMEM,
        "the lease of %s, in whole blocks of %s%s, does not fit device %d: device_budget %s, %s leased already; "
        "holders: %s",
        core::human_bytes(need).c_str(), spans.size() == 1 ? "" : "up to ", core::human_bytes(largest).c_str(), d,
        core::human_bytes(budget.budget()).c_str(), core::human_bytes(budget.live()).c_str(),
        grants_.holders().c_str());
  }
  *wait = true;
  return {};
}

// Until nobody else's lease is in the way of one at `location`, and there is room for it (devices; `apart`: each block
// once). Both are found under one hold of the lock, in which the caller takes the lease: what was found before it was
// dropped is worth nothing.
Status Pager::wait_for_turn(Lock& lock, std::span<const SpanOf> spans, std::span<const SpanOf> apart, int location,
                            const Ask* ask) {
  Patience patience;
  const uint64_t begun = now_ns();
  for (;;) {
    reap(lock);
    bool wait = false, room = false;
    if (Status s = Ask::check(ask); !s.ok()) return s;
    if (Status s = check_endings(spans, location, &wait); !s.ok()) return s;
    if (Status s = check_stale(spans, &wait); !s.ok()) return s;
    if (!wait && location >= 0) {
      if (Status s = check_room(apart, location, &wait); !s.ok()) return s;
      room = wait;
    }
    if (!wait) return {};
    if (ask != nullptr && now_ns() - begun > ask->patience_ns)
      return error(room ? EAGAIN : EALREADY, "releases are in the way whose streams have not got there");
    patience.wait(lock, map_.changed());
  }
}

// Waits until no release of the region's leases is under way; does not wait for live ones.
void Pager::wait_for_region_endings(Lock& lock, Region& r, Sweep* sweep) {
  if (!r.gpu) return;
  Patience patience;
  size_t before = 0;
  for (reap(lock); queues_.endings.any(r) && !r.dying; reap(lock)) {
    if (sweep == nullptr || sweep->wait == Sweep::Wait::always) {
      patience.wait(lock, map_.changed());
      continue;
    }
    if (queues_.endings.size() < before) sweep->progress.made();
    before = queues_.endings.size();
    if (!map_.wait_on(lock, sweep, map_.changed())) return;
  }
}

// A lease at a device ends when the stream gets to here. What marks that point on the stream may block for as long as
// the stream is held, if its launch queue is full: nothing of ours is kept meanwhile but the leases, which end.
Status Pager::release(std::span<const vmem_range> ranges, void* stream, void* end, bool knows_access) {
  std::vector<SpanOf> spans(ranges.size());
  std::list<Ending> made;
  std::vector<Ending*> mine;
  size_t devices = 1, room = ranges.size();  // nothing grows under the lock
  Status result(ENOBUFS, "");
  bool asked = false;
  while (result.code() == -ENOBUFS) {
    while (made.size() < devices) made.emplace_back();
    for (Ending& e : made) e.spans.reserve(room);
    mine.reserve(devices);
    ++devices, room *= 2;  // for the next try
    Lock lock(map_.mutex());
    for (size_t i = 0; i < ranges.size(); ++i) {
      if (Status s = map_.check_range(ranges[i].ptr, ranges[i].size, &spans[i]); !s.ok()) return s;
    }
    // A lease at the host ends at once, one at a device once the stream has taken a mark: where there are both, or
    // several devices, a stream that takes none is found out before anything ends.
    if (const auto at = locations_of(spans, stream); !asked && at.count() > 1) {
      lock.unlock();
      asked = true;
      for (size_t d = 0; d < device::kMaxDevices; ++d) {
        if (!at[d]) continue;
        if (Status s = devices_->check_stream(end, static_cast<int>(d)); s.code() == -EBUSY) return s;
      }
      continue;
    }
    result = grants_.release(lock, spans, knows_access ? ranges.data() : nullptr, stream, &made);
    if (!result.ok()) continue;
    for (auto e = made.begin(); e != made.end();) {
      const auto next = std::next(e);
      if (!e->spans.empty()) {
        e->end = end;
        e->thread = pthread_self();
        mine.push_back(&*e);
        queues_.endings.add(made, e);
      }
      e = next;
    }
    for (const SpanOf& s : spans) ++s.region->in_flight;
    for (const SpanOf& s : spans) map_.match_holds(lock, s);
    for (const SpanOf& s : spans) --s.region->in_flight;
    map_.notify();
    // Evictors that lack nothing sleep, and a release gives them nothing to do.
    if (waits_.must_evict() || !waits_.queue().empty() || supply_.is_short()) pressure_.call_evictors();
  }
  if (mine.empty() || !result.ok()) return result;
  core::step("release.recording");
  for (Ending* e : mine) {
    device::Ticket ticket;
    Status recorded = devices_->record(end, e->device, &ticket);
    Status health = recorded.ok() ? Status() : devices_->health(e->device);
    if (!recorded.ok() && health.ok() && recorded.code() != -EBUSY && recorded.code() != -ENOMEM) {
      // Of a stream that is no more nobody can ask for a point.
      core::step("release.draining");
      recorded = devices_->drain(e->device);
      if (!recorded.ok()) health = devices_->health(e->device);
      if (!recorded.ok() && health.ok()) {
        recorded = error(EBUSY, "the stream %p takes no mark, and device %d cannot be waited for instead: %.*s", end,
                         e->device, static_cast<int>(recorded.text().size()), recorded.text().data());
      }
    }
    Lock lock(map_.mutex());
    if (!recorded.ok() && health.ok()) {
      grants_.revive(*e);
      queues_.endings.end(*e, &made);
      result = std::move(recorded);
      map_.notify();
      continue;
    }
    // A device that is lost ends everything at once, and so does a stream that is no more.
    if (!health.ok()) gpus_.saw_loss(e->device, health);
    if (recorded.ok() && core::exiting()) forget_saved(*e);
    e->ticket = std::move(ticket);
    e->recorded = true;
  }
  Lock lock(map_.mutex());
  reap(lock);
  gpus_.work().notify_one();
  return result;
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
      pump_devices(after);
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

}  // namespace vmem::pager
