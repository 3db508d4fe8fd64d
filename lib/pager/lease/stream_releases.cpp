#include "pager/lease/stream_releases.h"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <bitset>
#include <cerrno>
#include <chrono>
#include <utility>

#include "core/break.h"
#include "core/clock.h"
#include "core/process/at_exit.h"
#include "core/step.h"
#include "pager/lease/lease_room.h"

namespace vmem::pager {

bool StreamReleaseQueue::any(const Region& r) const {
  return std::any_of(pending_.begin(), pending_.end(), [&](const PendingRelease& e) {
    return std::any_of(e.spans.begin(), e.spans.end(), [&](const BlockSpan& s) { return s.region == &r; });
  });
}

bool StreamReleaseQueue::any(const BlockSpan& span, uint64_t id) const {
  const auto meets = [&](const BlockSpan& s) {
    return s.region == span.region && s.first <= span.last && span.first <= s.last;
  };
  return std::any_of(pending_.begin(), pending_.end(), [&](const PendingRelease& e) {
    return e.id <= id && std::any_of(e.spans.begin(), e.spans.end(), meets);
  });
}

size_t StreamReleaseQueue::count(uint64_t id) const {
  return static_cast<size_t>(
      std::count_if(pending_.begin(), pending_.end(), [&](const PendingRelease& e) { return e.id <= id; }));
}

// Returns the link to the oldest release of the lane. For an empty lane that is the last link,
// which is null.
PendingRelease** StreamReleaseQueue::lane_of(const PendingRelease& release) {
  PendingRelease** at = &oldest_;
  while (*at != nullptr && !(*at)->same_lane(release)) at = &(*at)->next_oldest;
  return at;
}

void StreamReleaseQueue::add(std::list<PendingRelease>& from, std::list<PendingRelease>::iterator release) {
  PendingRelease& r = *release;
  r.id = ++last_;
  r.self = release;
  PendingRelease** const lane = lane_of(r);
  r.oldest = *lane == nullptr;
  if (r.oldest) {
    *lane = r.last_in_lane = &r;
  } else {
    (*lane)->last_in_lane->next_in_lane = &r;
    (*lane)->last_in_lane = &r;
  }
  pending_.splice(pending_.end(), from, release);
}

size_t StreamReleaseQueue::oldest(uint64_t after, std::span<const PendingRelease*> out) const {
  size_t count = 0;
  for (const PendingRelease* e = oldest_; e != nullptr && count < out.size(); e = e->next_oldest) {
    if (e->id > after && e->recorded) out[count++] = e;
  }
  return count;
}

const PendingRelease* StreamReleaseQueue::find(uint64_t id) const {
  for (const PendingRelease* e = oldest_; e != nullptr; e = e->next_oldest)
    if (e->id == id) return e;
  const auto e = std::find_if(pending_.begin(), pending_.end(), [&](const PendingRelease& x) { return x.id == id; });
  return e != pending_.end() ? &*e : nullptr;
}

void StreamReleaseQueue::end(const PendingRelease& release, std::list<PendingRelease>* to) {
  const auto e = release.self;
  PendingRelease** const lane = lane_of(*e);
  PendingRelease* const first = *lane;
  PendingRelease* const next = e->next_in_lane;
  if (first == &*e) {
    *lane = e->next_oldest;
    if (next != nullptr) {
      next->oldest = true;
      next->last_in_lane = e->last_in_lane;
      PendingRelease** at = lane;  // all before it are older
      while (*at != nullptr && (*at)->id < next->id) at = &(*at)->next_oldest;
      next->next_oldest = *at;
      *at = next;
    }
  } else {
    PendingRelease* before = first;
    while (before->next_in_lane != &*e) before = before->next_in_lane;
    before->next_in_lane = next;
    if (first->last_in_lane == &*e) first->last_in_lane = before;
  }
  to->splice(to->end(), pending_, e);
}

void StreamReleaseQueue::forget(const Region& r) {
  for (PendingRelease& e : pending_) std::erase_if(e.spans, [&](const BlockSpan& s) { return s.region == &r; });
}

std::string StreamReleaseQueue::check() const {
  uint64_t before = 0;
  for (auto e = pending_.begin(); e != pending_.end(); ++e) {
    if (e->id <= before || e->id > last_) return "releases at devices are not in the order of their numbers";
    before = e->id;
    const bool first = std::none_of(pending_.begin(), e, [&](const PendingRelease& x) { return x.same_lane(*e); });
    if (first != e->oldest) return first ? "the oldest release of a lane is not marked" : "a lane has two oldest";
  }
  // The links must say the same.
  size_t linked = 0;
  before = 0;
  for (const PendingRelease* first = oldest_; first != nullptr; first = first->next_oldest) {
    if (!first->oldest || first->id <= before) return "the oldest releases of lanes are not linked in their order";
    before = first->id;
    const PendingRelease* last = nullptr;
    for (const PendingRelease* e = first; e != nullptr && linked <= pending_.size(); e = e->next_in_lane, ++linked) {
      if (!e->same_lane(*first) || (last != nullptr && e->id <= last->id)) return "a lane is not linked in its order";
      last = e;
    }
    if (first->last_in_lane != last) return "a lane does not know its last release";
  }
  return linked == pending_.size() ? "" : "some releases are in no lane";
}

namespace {

// Returns where the stream's leases of these ranges are: a bit for each device, and the last bit
// for the host. Empty if a block has no lease of the stream.
std::bitset<device::kMaxDevices + 1> locations_of(std::span<const BlockSpan> spans, void* stream) {
  std::bitset<device::kMaxDevices + 1> at;
  for (const BlockSpan& s : spans) {
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

StreamReleases::StreamReleases(PagerContext& ctx, LeaseRoom& leases) : ctx_(ctx), host_(leases.host), leases_(leases) {}

// At exit, a stream has taken the release: kernels may have stored since the files were written.
void StreamReleases::forget_saved(const PendingRelease& ending) {
  for (const BlockSpan& s : ending.spans) {
    for (BlockIndex b = s.first; b <= s.last; ++b) {
      const Block& block = s.region->table[b];
      if (core::on_a_device(block.state)) ctx_.map.frame_table()[block.aux].dev.saved = false;
    }
  }
}

bool StreamReleases::end_soon(int d, uint64_t now_ns) const {
  std::array<const PendingRelease*, 16> oldest;
  uint64_t after = 0;
  while (const size_t count = pending_.oldest(after, oldest)) {
    for (const PendingRelease* e : std::span(oldest.data(), count)) {
      if (e->device == d && now_ns < std::max(e->since_ns, ended_ns_[static_cast<size_t>(d)]) + kSoon) return true;
      after = e->id;
    }
  }
  return false;
}

// Each thread polls the oldest release of every lane. The answer counts if that release has not
// ended since.
void StreamReleases::reap(Lock& lock) {
  struct Look {
    uint64_t id = 0;
    int device = 0;
    device::Ticket ticket;
    bool over = false;
    Status health;
  };
  std::array<Look, 16> looks;
  std::array<const PendingRelease*, 16> oldest;
  // Cleared without the lock, since tickets end with them. Their regions are in flight until
  // match_holds() is done.
  std::list<PendingRelease> over;
  for (uint64_t after = 0;;) {
    const size_t count = pending_.oldest(after, oldest);
    for (size_t i = 0; i < count; ++i) looks[i] = {oldest[i]->id, oldest[i]->device, oldest[i]->ticket, false, {}};
    if (count == 0 && over.empty()) return;
    lock.unlock();
    over.clear();
    core::step("reap.looking");
    for (size_t i = 0; i < count; ++i) {
      Look& look = looks[i];
      // A lost device never answers: the work of its kernels is lost with it, and so is the lease.
      // A device that is well, and does not answer now, does so later.
      if (!ctx_.devices->poll(look.ticket, &look.over).ok()) {
        look.health = ctx_.devices->health(look.device);
        look.over = !look.health.ok();
      }
      if (core::broken("release_event")) look.over = true;
      look.ticket.reset();
    }
    lock.lock();
    if (count == 0) continue;
    after = looks[count - 1].id;
    for (const Look& look : std::span(looks.data(), count)) {
      const PendingRelease* const e = pending_.find(look.id);
      if (!look.over || e == nullptr) continue;
      if (!look.health.ok()) ctx_.device_set.saw_loss(look.device, look.health);
      for (const BlockSpan& s : e->spans) ++s.region->counts.in_flight;
      ended_ns_[static_cast<size_t>(e->device)] = now_ns();
      leases_.lease_manager.end(*e);
      pending_.end(*e, &over);
      after = 0;  // the next of its lane may be over too
    }
    for (const PendingRelease& e : over) {
      for (const BlockSpan& s : e.spans) {
        ctx_.map.match_holds(lock, s);
        --s.region->counts.in_flight;
      }
    }
    if (!over.empty()) ctx_.map.notify();
  }
}

namespace {

// A stream passes a release without notice: polls often at first, then less often.
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

// Sets *wait if ending leases keep the ranges at another location. Returns -EBUSY if live leases
// do.
Status StreamReleases::check_pending(std::span<const BlockSpan> spans, int location, bool* wait) {
  for (const BlockSpan& s : spans) {
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
      return error(EBUSY, "%s is leased at location %d; release it there first",
                   ctx_.map.describe_locked(*s.region, at).c_str(), live->location);
    }
  }
  return {};
}

// Sets *wait if ending leases have the room that the spans need. Returns -ENOMEM if live leases do.
Status StreamReleases::check_room(std::span<const BlockSpan> spans, int d, bool* wait) {
  const DeviceBudget& budget = ctx_.device_set[static_cast<size_t>(d)].budget;
  uint64_t need = 0;
  size_t largest = 0;
  for (const BlockSpan& s : spans) {
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
        leases_.lease_manager.holders().c_str());
  }
  *wait = true;
  return {};
}

Status StreamReleases::wait_for_turn(Lock& lock, std::span<const BlockSpan> spans, std::span<const BlockSpan> apart,
                                     int location, const AcquireRequest* ask) {
  Patience patience;
  const uint64_t begun = now_ns();
  for (;;) {
    reap(lock);
    bool wait = false, room = false;
    if (Status s = AcquireRequest::check(ask); !s.ok()) return s;
    if (Status s = check_pending(spans, location, &wait); !s.ok()) return s;
    if (Status s = check_device_stale(spans, &wait); !s.ok()) return s;
    if (!wait && location >= 0) {
      if (Status s = check_room(apart, location, &wait); !s.ok()) return s;
      room = wait;
    }
    if (!wait) return {};
    if (ask != nullptr && now_ns() - begun > ask->patience_ns)
      return error(room ? EAGAIN : EALREADY, "leases are in the way whose streams have not reached the release");
    patience.wait(lock, ctx_.map.changed());
  }
}

// Waits for the releases of the span that are pending now. Releases made later do not count as
// progress: they may come and end for ever. writes: the span is one block, and only releases for
// writing matter. Returns false if the scan gives up before.
bool StreamReleases::wait_for_span(Lock& lock, const BlockSpan& span, bool writes, RangeScan* scan) {
  const uint64_t newest = pending_.newest();
  size_t before = 0;
  for (reap(lock); !span.region->dying && pending_.any(span, newest); reap(lock)) {
    if (writes && !awaits_writes(*span.region, span.first)) break;
    const size_t count = pending_.count(newest);
    if (count < std::exchange(before, count)) scan->progress.made();
    if (!ctx_.map.wait_on(lock, scan, ctx_.map.changed())) return false;
  }
  return true;
}

bool StreamReleases::wait_for_block(Lock& lock, Region& r, BlockIndex b, RangeScan* scan) {
  return wait_for_span(lock, {&r, b, b}, true, scan);
}

void StreamReleases::wait_for_region(Lock& lock, Region& r, RangeScan* scan) {
  if (!r.gpu) return;
  if (scan != nullptr && scan->wait != RangeScan::Wait::always) {
    wait_for_span(lock, {&r, 0, r.blocks - 1}, false, scan);
    return;
  }
  Patience patience;
  for (reap(lock); pending_.any(r) && !r.dying; reap(lock)) patience.wait(lock, ctx_.map.changed());
}

Status StreamReleases::check_device_stale(std::span<const BlockSpan> spans, bool* wait) {
  for (const BlockSpan& s : spans) {
    const Region& r = *s.region;
    if (r.counts.device_stale == 0) continue;
    for (BlockIndex b = r.table.next_populated(s.first); b <= s.last && b < r.blocks;
         b = r.table.next_populated(b + 1)) {
      if (!core::on_a_device(r.table[b].state) || !ctx_.map.frame_table()[r.table[b].aux].dev.stale)
        continue;  // stale also while a sync demotes it
      const Leases* leases = r.leases.find(b);
      if (leases != nullptr && std::any_of(leases->begin(), leases->end(), [](const Lease& l) { return l.count != 0; }))
        return core::error(EBUSY,
                           "%s: the CPU stored to it, and a READ lease keeps its former contents; release that lease",
                           ctx_.map.describe_locked(r, b).c_str());
      *wait = true;
    }
  }
  return {};
}

// The leases of a release are ending. Queues those at devices; record() marks the point on their
// stream next.
void StreamReleases::add(Lock& lock, std::span<const BlockSpan> spans, void* end, std::list<PendingRelease>* made,
                         std::vector<PendingRelease*>* mine) {
  for (auto e = made->begin(); e != made->end();) {
    const auto next = std::next(e);
    if (!e->spans.empty()) {
      e->end = end;
      e->thread = pthread_self();
      e->since_ns = now_ns();
      mine->push_back(&*e);
      pending_.add(*made, e);
    }
    e = next;
  }
  for (const BlockSpan& s : spans) ++s.region->counts.in_flight;
  for (const BlockSpan& s : spans) ctx_.map.match_holds(lock, s);
  for (const BlockSpan& s : spans) --s.region->counts.in_flight;
  ctx_.map.notify();
  // If no memory is short, reclaim threads sleep, and a release gives them nothing to do.
  if (host_.waits.must_evict() || !host_.waits.queue().empty() || ctx_.upcalls.short_of_staging(kStagingPools))
    host_.pressure.wake_all_reclaim();
}

// Marks the release on its stream. On error the leases are live again, and the release is in
// `over`.
Status StreamReleases::record(PendingRelease& ending, std::list<PendingRelease>* over) {
  device::Ticket ticket;
  Status recorded = ctx_.devices->record(ending.end, ending.device, &ticket);
  Status health = recorded.ok() ? Status() : ctx_.devices->health(ending.device);
  if (!recorded.ok() && health.ok() && recorded.code() != -EBUSY && recorded.code() != -ENOMEM) {
    // A destroyed stream takes no mark: wait for all work of the device instead.
    core::step("release.draining");
    recorded = ctx_.devices->drain(ending.device);
    if (!recorded.ok()) health = ctx_.devices->health(ending.device);
    if (!recorded.ok() && health.ok()) {
      recorded = error(EBUSY, "the stream %p takes no event, and device %d cannot be waited for instead: %.*s",
                       ending.end, ending.device, static_cast<int>(recorded.text().size()), recorded.text().data());
    }
  }
  Lock lock(ctx_.map.mutex());
  if (!recorded.ok() && health.ok()) {
    leases_.lease_manager.revive(ending);
    pending_.end(ending, over);
    ctx_.map.notify();
    return recorded;
  }
  // If the device is lost, or was drained for a destroyed stream, the empty ticket ends the release
  // at once.
  if (!health.ok()) ctx_.device_set.saw_loss(ending.device, health);
  if (recorded.ok() && core::exiting()) forget_saved(ending);
  ending.ticket = std::move(ticket);
  ending.recorded = true;
  return {};
}

// Marking the point on the stream may block for as long as the stream is held, if its launch queue
// is full. Only the leases are kept until then, and they are ending.
Status StreamReleases::release(std::span<const vmem_range> ranges, void* stream, void* end, bool knows_access) {
  std::vector<BlockSpan> spans(ranges.size());
  std::list<PendingRelease> made;
  std::vector<PendingRelease*> mine;
  size_t devices = 1, room = ranges.size();  // nothing grows under the lock
  Status result(ENOBUFS, "");
  bool asked = false;
  while (result.code() == -ENOBUFS) {
    while (made.size() < devices) made.emplace_back();
    for (PendingRelease& e : made) e.spans.reserve(room);
    mine.reserve(devices);
    ++devices, room *= 2;  // for the next try
    Lock lock(ctx_.map.mutex());
    for (size_t i = 0; i < ranges.size(); ++i) {
      if (Status s = ctx_.map.check_range(ranges[i].ptr, ranges[i].size, &spans[i]); !s.ok()) return s;
    }
    // A lease at the host ends at once, one at a device when the stream has taken a mark. If there
    // are both, or several devices, check that the stream takes marks before any lease ends.
    if (const auto at = locations_of(spans, stream); !asked && at.count() > 1) {
      lock.unlock();
      asked = true;
      for (size_t d = 0; d < device::kMaxDevices; ++d) {
        if (!at[d]) continue;
        if (Status s = ctx_.devices->check_stream(end, static_cast<int>(d)); s.code() == -EBUSY) return s;
      }
      continue;
    }
    result = leases_.lease_manager.release(lock, spans, knows_access ? ranges.data() : nullptr, stream, &made);
    if (!result.ok()) continue;
    add(lock, spans, end, &made, &mine);
  }
  if (mine.empty() || !result.ok()) return result;
  core::step("release.recording");
  for (PendingRelease* e : mine) {
    if (Status s = record(*e, &made); !s.ok()) result = std::move(s);
  }
  Lock lock(ctx_.map.mutex());
  reap(lock);
  if (a_worker_waits()) ctx_.device_set.work().notify_one();
  return result;
}

// Whether a worker may have work that leases kept from being done. To wake one for nothing costs
// more than the rest of a release.
bool StreamReleases::a_worker_waits() {
  if (!ctx_.queues.promotion_requests.empty() || !ctx_.queues.demotion_requests.empty() || ctx_.cpu_mappings.waits())
    return true;
  for (size_t d = 0; d < ctx_.device_set.size(); ++d) {
    if (ctx_.device_set[d].budget.missing() != 0) return true;
    if (ctx_.map.spilled().bytes(d) != 0 && ctx_.map.spilled().over(d, ctx_.device_set[d].budget, now_ns()) != 0)
      return true;
  }
  return false;
}

}  // namespace vmem::pager
