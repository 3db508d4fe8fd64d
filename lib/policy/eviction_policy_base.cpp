#include "policy/eviction_policy_base.h"

#include <algorithm>

namespace vmem::policy {

using core::FrameId;
using core::kNoFrame;

void EvictionPolicyBase::resize(size_t frames, uint64_t capacity_pages) {
  lists_.resize(frames);
  capacity_ = capacity_pages;
}

void EvictionPolicyBase::place(FrameId id, Entry entry, uint64_t age, bool sequential) {
  const Node& n = lists_[id];
  if (n.temperature == kPinnedTemperature) {
    lists_.push_head(kPinned, id);
  } else if (n.temperature == static_cast<unsigned>(Temperature::cold)) {
    lists_.push_head(n.ahead ? kColdAhead : kCold, id);
  } else if (n.temperature == static_cast<unsigned>(Temperature::hot)) {
    lists_.push_head(kHot, id);
  } else {
    class_pages_[n.priority] += n.weight();
    insert(n.priority, id, entry, age, sequential);
  }
}

void EvictionPolicyBase::take_out(FrameId id) {
  const Node& n = lists_[id];
  if (in_class(n)) {
    leaving(n.priority, id);
    class_pages_[n.priority] -= n.weight();
  }
  lists_.unlink(id);
}

void EvictionPolicyBase::admit(const Admission& what) {
  if (what.id >= lists_.frames() || lists_[what.id].known) return;
  Node& n = lists_[what.id];
  n = Node{};
  n.known = 1;
  n.set_weight(what.weight);
  n.probes = what.probes;
  n.ahead = what.ahead;
  n.hinted = what.ahead && what.hinted;
  n.priority = static_cast<unsigned>(what.priority) & 3;
  n.temperature = what.pinned ? kPinnedTemperature : static_cast<unsigned>(what.temperature) & 3;
  if (what.refused) return lists_.push_head(kRefused, what.id);
  place(what.id, what.age ? Entry::refault : Entry::fresh, what.age.value_or(0), what.sequential);
}

void EvictionPolicyBase::touched(FrameId id) {
  if (id >= lists_.frames() || !lists_[id].known) return;
  Node& n = lists_[id];
  const bool probed = n.probed;
  n.probed = 0;
  if (n.held) {
    if (!n.ahead) n.used = 1;
    n.ahead = 0;
  } else if (in_class(n) && n.ahead) {
    first_used(n.priority, id);
  } else if (in_class(n)) {
    reused(n.priority, id, probed);
  } else {
    n.ahead = 0;
    lists_.move_to_head(n.list == kColdAhead ? kCold : static_cast<ListId>(n.list), id);
  }
}

void EvictionPolicyBase::remove(FrameId id) {
  if (id >= lists_.frames() || !lists_[id].known) return;
  if (!lists_[id].held) take_out(id);
  lists_[id] = Node{};
}

void EvictionPolicyBase::advise(FrameId id, Temperature temperature, Priority priority, bool pinned) {
  if (id >= lists_.frames() || !lists_[id].known) return;
  Node& n = lists_[id];
  const unsigned t = pinned ? kPinnedTemperature : static_cast<unsigned>(temperature) & 3;
  const unsigned p = static_cast<unsigned>(priority) & 3;
  if (n.temperature == t && n.priority == p) return;  // it keeps its place
  if (!n.held) take_out(id);
  n.temperature = t;
  n.priority = p;
  if (!n.held) place(id, Entry::advised, 0, false);
}

void EvictionPolicyBase::hold(FrameId id) {
  if (id >= lists_.frames() || !lists_[id].known) return;
  Node& n = lists_[id];
  if (!n.held) {
    take_out(id);
    n.held = 1;
    n.used = 0;
    n.older = 0;
  }
  ++n.older;
}

void EvictionPolicyBase::unhold(FrameId id) {
  if (id >= lists_.frames() || !lists_[id].held) return;
  Node& n = lists_[id];
  if (--n.older != 0) return;
  n.held = 0;
  n.older = kNoFrame;
  place(id, Entry::unheld, 0, false);
}

bool EvictionPolicyBase::probe(FrameId id) {
  Node& n = lists_[id];
  if (!n.probes || n.probed) return true;
  if (probe_room_ == 0 || out_used_ + 1 >= out_.size()) return false;
  --probe_room_;
  n.probed = 1;
  n.just_probed = 1;
  out_[out_used_++] = {id, true};
  ++probed_;
  return true;
}

// Returns the lowest class that is above its floor; kClasses if all are empty.
unsigned EvictionPolicyBase::class_to_shrink() const {
  uint64_t total = 0;
  for (const uint64_t p : class_pages_) total += p;
  if (total == 0) return kClasses;
  for (unsigned c = 0; c < kClasses; ++c) {
    if (class_pages_[c] > total / kFloorShare) return c;
  }
  return kClasses;  // not reached: three shares of at most 1/16 do not make a whole
}

FrameId EvictionPolicyBase::next_victim() {
  if (!lists_.empty(kCold)) return lists_.tail(kCold);
  if (!lists_.empty(kColdAhead)) return lists_.tail(kColdAhead);
  const unsigned cls = class_to_shrink();
  if (cls != kClasses) {
    look_ahead(cls);
    return pick(cls);
  }
  for (const ListId last : {kHot, kPinned}) {
    if (!lists_.empty(last)) return lists_.tail(last);
  }
  return lists_.tail(kRefused);
}

// Gives refused blocks their places back, as far as the victims have earned it.
void EvictionPolicyBase::retry_refused() {
  constexpr int kMost = 32;  // in one call
  for (int i = 0; i < kMost && !lists_.empty(kRefused); ++i) {
    const FrameId id = lists_.tail(kRefused);
    const uint64_t price = uint64_t{lists_[id].weight()} * kRetryShare;
    if (retries_ < price) return;
    retries_ -= price;
    lists_.unlink(id);
    place(id, Entry::advised, 0, false);
  }
  if (lists_.empty(kRefused)) retries_ = 0;
}

size_t EvictionPolicyBase::victims(uint64_t pages, std::span<Victim> out) {
  out_ = out;
  out_used_ = 0;
  probe_room_ = out.size() / 2;  // a call that only probes would free nothing
  retry_refused();
  bool used_up = false;
  for (uint64_t freed = 0; freed < pages && out_used_ < out.size();) {
    if (freed != 0 && used_up && lists_.empty(kCold)) break;
    used_up = !lists_.empty(kCold);
    const FrameId id = next_victim();
    if (id == kNoFrame) break;
    const ListId from = lists_[id].list;
    const bool refused = from == kRefused;
    if (refused && freed != 0 && !out[out_used_ - 1].refused) break;
    const uint64_t weight = lists_[id].weight();
    // Blocks that are to stay go only if refused ones still cannot: try those sooner.
    if (!refused) retries_ += from == kHot || from == kPinned ? weight * kRetryShare / 2 : weight;
    const bool listed = lists_[id].just_probed;
    take_out(id);
    lists_[id] = Node{};
    if (listed) {  // little is left, and the look-ahead meets the eviction: list each id once
      std::find_if(out.begin(), out.end(), [id](const Victim& v) { return v.id == id; })->probe = false;
    } else {
      out[out_used_++] = {id, false, refused};
    }
    freed += weight;
    evicted_pages_ += weight;
  }
  for (size_t i = 0; i < out_used_; ++i) lists_[out[i].id].just_probed = 0;
  out_ = {};
  return out_used_;
}

}  // namespace vmem::policy
