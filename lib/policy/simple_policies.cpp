#include "policy/simple_policies.h"

#include <algorithm>

namespace vmem::policy {

using core::FrameId;
using core::kNoFrame;

namespace {
constexpr int kMostSteps = 64;  // of any loop in one pick or look ahead
}

void FifoPolicy::insert(unsigned cls, FrameId id, Entry, uint64_t, bool) {
  lists_.push_head(list(cls, 0), id);
}

void SievePolicy::insert(unsigned cls, FrameId id, Entry entry, uint64_t, bool) {
  Node& n = lists_[id];
  n.stamp = 0;
  if (entry != Entry::unheld) n.used = 0;
  lists_.push_head(list(cls, 0), id);
}

void SievePolicy::reused(unsigned, FrameId id, bool) {
  lists_[id].used = 1;
}

// The hand goes past the block, or the block leaves.
void SievePolicy::pass(Sweep& s, FrameId id) {
  Node& n = lists_[id];
  if (s.scout == id) s.scout = n.newer;
  if (s.hand == id) s.hand = n.newer;
  if (n.stamp == 1) s.gap -= n.weight();
  n.stamp = 0;
}

void SievePolicy::leaving(unsigned cls, FrameId id) {
  pass(sweeps_[cls], id);
}

void SievePolicy::look_ahead(unsigned cls) {
  Sweep& s = sweeps_[cls];
  const ListId l = list(cls, 0);
  for (int i = 0; i < kMostSteps / 4 && s.gap < class_pages(cls) / 8; ++i) {
    if (s.scout == kNoFrame) s.scout = s.gap == 0 && s.hand != kNoFrame ? s.hand : lists_.tail(l);
    Node& n = lists_[s.scout];
    if (n.stamp == 1 || !probe(s.scout)) return;
    n.stamp = 1;
    s.gap += n.weight();
    s.scout = n.newer;
  }
}

FrameId SievePolicy::pick(unsigned cls) {
  Sweep& s = sweeps_[cls];
  const ListId l = list(cls, 0);
  for (int i = 0;; ++i) {
    if (s.hand == kNoFrame) s.hand = lists_.tail(l);
    const FrameId id = s.hand;
    if (id == kNoFrame || lists_[id].used == 0 || i == kMostSteps) return id;
    lists_[id].used = 0;
    pass(s, id);
    s.hand = lists_[id].newer;
  }
}

bool TwoQueuePolicy::evict_small(unsigned cls) const {
  const uint64_t small = lists_.pages(list(cls, kSmall)) + lists_.pages(list(cls, kSmallOut));
  const uint64_t main = class_pages(cls) - small;
  return main == 0 || (small != 0 && small * 64 >= class_pages(cls) * small_share());
}

void TwoQueuePolicy::insert(unsigned cls, FrameId id, Entry entry, uint64_t age, bool) {
  Node& n = lists_[id];
  const bool was_main = entry == Entry::unheld && (n.proven || n.used);
  n.proven = was_main || (entry == Entry::refault && age <= ghost_pages(cls));
  n.used = 0;
  lists_.push_head(list(cls, n.proven ? kMain : kSmall), id);
}

void TwoQueuePolicy::reused(unsigned cls, FrameId id, bool) {
  Node& n = lists_[id];
  if (!n.proven && !probe_small()) return;
  n.proven = 1;
  lists_.move_to_head(list(cls, kMain), id);
}

// Takes the oldest blocks of `from` out of sight until `want` pages of the part are.
void TwoQueuePolicy::move_out(unsigned cls, unsigned from, unsigned to, uint64_t want) {
  for (int i = 0; i < kMostSteps / 4 && lists_.pages(list(cls, to)) < want; ++i) {
    const FrameId id = lists_.tail(list(cls, from));
    if (id == kNoFrame || !probe(id)) return;
    lists_.move_to_head(list(cls, to), id);
  }
}

void TwoQueuePolicy::look_ahead(unsigned cls) {
  if (evict_small(cls)) {
    if (!probe_small()) return;
    const uint64_t small = lists_.pages(list(cls, kSmall)) + lists_.pages(list(cls, kSmallOut));
    const uint64_t share = class_pages(cls) * small_share() / 64;
    move_out(cls, kSmall, kSmallOut, std::min(small, share) / 2);
  } else {
    const uint64_t main = lists_.pages(list(cls, kMain)) + lists_.pages(list(cls, kMainOut));
    move_out(cls, kMain, kMainOut, main * main_out_share() / 64);
  }
}

FrameId TwoQueuePolicy::pick(unsigned cls) {
  const unsigned first = evict_small(cls) ? kSmall : kMain;
  const FrameId out = lists_.tail(list(cls, first + 1));
  return out != kNoFrame ? out : lists_.tail(list(cls, first));
}

}  // namespace vmem::policy
