#include "pager/lease/stream_release_queue.h"

#include <algorithm>

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

}  // namespace vmem::pager
