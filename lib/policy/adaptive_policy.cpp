#include "policy/adaptive_policy.h"

#include <algorithm>

namespace vmem::policy {

using core::FrameId;
using core::kNoFrame;

namespace {
constexpr int kMostSteps = 16;  // of any loop in one call
// The window is 1/16 of its class, plus room for blocks read ahead. Guesses get at most a quarter
// of the class. Blocks that the program announced get three quarters, the most that it may announce
// at a time.
constexpr uint64_t kWindowShare = 16;
constexpr unsigned kRarest = 6;
constexpr uint64_t kTrickle = 64;  // of refused blocks, one in so many is let in anyway

// Updates a running mean over about `n` values.
void lean(uint64_t* mean, uint64_t value, int64_t n) {
  *mean += static_cast<uint64_t>((static_cast<int64_t>(value) - static_cast<int64_t>(*mean)) / n);
}
}  // namespace

uint64_t AdaptivePolicy::window_target(const Class& c, uint64_t total) const {
  return total / kWindowShare + std::min(std::min(c.most_ahead, total / 4) + c.most_hinted, total / 4 * 3);
}

FrameId AdaptivePolicy::oldest(unsigned cls, unsigned part) const {
  const FrameId out = lists_.tail(list(cls, part + 1));
  return out != kNoFrame ? out : lists_.tail(list(cls, part));
}

void AdaptivePolicy::put(unsigned cls, FrameId id, bool proven) {
  lists_[id].proven = proven;
  lists_[id].stamp = stamp_now();
  lists_.move_to_head(list(cls, proven ? kMain : kWindow), id);
}

// Moves blocks that the window cannot hold to the main part while that has room: at first without
// limit, later up to the size that the class had when it was last shrunk.
void AdaptivePolicy::fill_main(unsigned cls) {
  const Class& c = classes_[cls];
  const uint64_t total = c.full == 0 ? class_pages(cls) : c.full;
  const uint64_t target = window_target(c, total);
  for (int i = 0; i < 2; ++i) {
    const FrameId id = oldest(cls, kWindow);
    if (id == kNoFrame || window_pages(cls) <= target + lists_[id].weight()) return;
    if (c.full != 0 && main_pages(cls) + lists_[id].weight() + target > total) return;
    if (lists_[id].used) return;  // from a one-time scan: it stays first in line
    lists_[id].proven = 1;
    lists_[id].stamp = stamp_now();
    lists_.move_to_head(list(cls, lists_[id].probed ? kMainOut : kMain), id);
  }
}

void AdaptivePolicy::note_idle(Class& c, uint64_t idle, uint64_t weight) {
  const uint64_t number = now() / epoch_length();
  Epoch& e = c.epochs[number % kEpochs];
  if (e.number != number) e = {number, 0, 0};
  e.pages += weight;
  e.idle += idle * weight;
}

uint64_t AdaptivePolicy::idle_when_left(const Class& c, uint64_t age) const {
  const uint64_t number = (now() - std::min(age, now())) / epoch_length();
  const Epoch& e = c.epochs[number % kEpochs];
  return e.number == number ? e.idle / e.pages : 0;
}

// Returns the block of the main part with the longest known idle time; kNoFrame if none is known.
FrameId AdaptivePolicy::worst(unsigned cls, uint64_t* idle) const {
  const FrameId out = lists_.tail(list(cls, kMainOut)), weak = lists_.tail(list(cls, kWeak));
  *idle = out == kNoFrame ? 0 : since(lists_[out].stamp);
  if (weak == kNoFrame || (out != kNoFrame && lists_[weak].stamp <= *idle)) return out;
  *idle = lists_[weak].stamp;
  return weak;
}

// Returns a block of the main part in an order that no load can be in step with. A loop wants the
// oldest of a queue next, so evicting that one would lead to evicting all after it.
FrameId AdaptivePolicy::any_of_main(unsigned cls) {
  for (int i = 0; i < kMostSteps; ++i) {
    dice_ ^= dice_ << 13;
    dice_ ^= dice_ >> 7;
    dice_ ^= dice_ << 17;
    const auto id = static_cast<FrameId>(dice_ % lists_.frames());
    if (lists_[id].list == list(cls, kMain) || lists_[id].list == list(cls, kMainOut)) return id;
  }
  return oldest(cls, kMain);
}

// A main part is presumed dead when no probe of it was touched for clearly longer than the longest
// pause so far. A loop passes through the main part once a round, and touches none of it in
// between.
bool AdaptivePolicy::main_alive(const Class& c, uint64_t total) const {
  const uint64_t gap = std::max(c.gap_now, c.gap_before);
  return now() - c.last_touch <= gap + gap / 4 + total / 16;
}

// Returns whether a block that was idle for `idle` deserves the place of the main part's worst. The
// worst's idle time is only a lower bound, and one short interval proves little, so a live part
// must be beaten by a factor of two.
bool AdaptivePolicy::wins(unsigned cls, uint64_t idle, uint64_t weight) {
  Class& c = classes_[cls];
  uint64_t its = 0;
  const FrameId rival = worst(cls, &its);
  if (rival != kNoFrame && its >= idle + (main_alive(c, class_pages(cls)) ? idle : idle / 4)) return true;
  if (idle < c.mean_wait) c.pro += weight;  // it might have won with more probes of the main part
  return false;
}

// Without probes there is no contest, so a block that comes back soon enough is let in. The main
// part is frozen when nearly all evicted blocks come back soon, for longer than it takes to turn it
// over: then the load is larger than memory, and letting blocks in helps none of them.
bool AdaptivePolicy::young_enough(unsigned cls, uint64_t age, uint64_t weight) {
  Class& c = classes_[cls];
  const uint64_t total = class_pages(cls);
  if (age > main_pages(cls)) {
    c.thrash -= std::min(c.thrash, 16 * weight);
    if (c.thrash < total) c.frozen = false;
    return trickle(c, weight);
  }
  c.thrash = std::min(c.thrash + weight, total * 3 / 2);
  if (c.thrash > total * 5 / 4) c.frozen = true;
  return !c.frozen || trickle(c, weight);
}

bool AdaptivePolicy::trickle(Class& c, uint64_t weight) {
  if (c.renew != 0) {
    c.renew -= std::min(c.renew, weight);
    return true;
  }
  c.refused += weight;
  if (c.refused < kTrickle * weight) return false;
  c.refused = 0;
  return true;
}

// A run of strangers means that the load moves on: test whether the main part is still of use.
void AdaptivePolicy::meet(Class& c, std::optional<uint64_t> age, uint64_t weight, uint64_t total) {
  if (age && c.mean_age == 0) c.mean_age = *age;
  const bool strange = !age || *age > 2 * c.mean_age + total;
  if (age) {
    const auto slow = static_cast<int64_t>(std::clamp<uint64_t>(total / weight / 4, 16, 256));
    lean(&c.mean_age, *age, strange ? 16 * slow : slow);
  }
  if (!strange) {
    c.strangers = 0;
    return;
  }
  c.strangers += weight;
  if (c.strangers > total / 16) c.rarity = 0;
  if (c.strangers > total / 2) c.renew = total;
}

void AdaptivePolicy::insert(unsigned cls, FrameId id, Entry entry, uint64_t age, bool sequential) {
  Class& c = classes_[cls];
  Node& n = lists_[id];
  const uint64_t total = class_pages(cls);
  const bool was_used = n.used;
  n.used = 0;
  if (n.ahead) (n.hinted ? c.hinted : c.ahead) += n.weight();
  c.most_ahead = std::max(c.ahead, c.most_ahead - std::min<uint64_t>(c.most_ahead, (n.weight() + 15) / 16));
  c.most_hinted = std::max(c.hinted, c.most_hinted - std::min<uint64_t>(c.most_hinted, (n.weight() + 15) / 16));
  switch (entry) {
    case Entry::fresh:
      meet(c, std::nullopt, n.weight(), total);
      c.thrash -= std::min<uint64_t>(c.thrash, 16 * n.weight());
      if (c.thrash < total) c.frozen = false;
      put(cls, id, false);
      n.used = sequential;
      break;
    case Entry::refault: {
      meet(c, age, n.weight(), total);
      const bool deserves = age == 0 || (n.probes ? wins(cls, age + idle_when_left(c, age), n.weight())
                                                  : young_enough(cls, age, n.weight()));
      put(cls, id, deserves);
      break;
    }
    case Entry::advised:
      put(cls, id, n.proven);
      break;
    case Entry::unheld:
      put(cls, id, n.proven || was_used);
      break;
  }
  fill_main(cls);
}

void AdaptivePolicy::leaving(unsigned cls, FrameId id) {
  const Node& n = lists_[id];
  if (n.ahead) (n.hinted ? classes_[cls].hinted : classes_[cls].ahead) -= n.weight();
}

void AdaptivePolicy::first_used(unsigned cls, FrameId id) {
  Node& n = lists_[id];
  (n.hinted ? classes_[cls].hinted : classes_[cls].ahead) -= n.weight();
  n.ahead = 0;
  // Leave it in its place, so that a window of used and unused blocks empties in the order of the
  // reads.
  if (n.list == list(cls, kMainOut) || n.list == list(cls, kWindowOut)) put(cls, id, n.proven);
}

void AdaptivePolicy::judge(Class& c, uint64_t total) {
  if (c.against + c.pro < total / 16) return;
  if (c.pro * 2 < c.against) {
    c.rarity = std::min(c.rarity + 1, kRarest);
  } else if (c.pro > c.against && c.rarity > 0) {
    --c.rarity;
  }
  c.against = c.pro = 0;
}

void AdaptivePolicy::found_alive(Class& c, uint64_t wait, uint64_t weight, uint64_t total) {
  const uint64_t gap = now() - c.last_touch;
  c.last_touch = now();
  if (now() >= c.gap_until) {
    c.gap_before = c.gap_now;
    c.gap_now = 0;
    c.gap_until = now() + 4 * std::max({total, gap, c.gap_before});
  }
  c.gap_now = std::max(c.gap_now, gap);
  lean(&c.mean_wait, wait, 64);
  c.against += weight;
  judge(c, total);
}

void AdaptivePolicy::reused(unsigned cls, FrameId id, bool probed) {
  Class& c = classes_[cls];
  Node& n = lists_[id];
  n.used = 0;
  const bool out = n.list == list(cls, kMainOut);
  const uint64_t wait = since(n.stamp);
  if (!n.proven) {
    if (probed) c.window_touched += n.weight();
    put(cls, id, wins(cls, wait, n.weight()));
    return;
  }
  if (out && probed) found_alive(c, wait, n.weight(), class_pages(cls));
  put(cls, id, true);
  if (!out || wait * 2 <= c.mean_wait * 3) return;
  n.stamp = static_cast<uint32_t>(wait);
  lists_.move_to_head(list(cls, kWeak), id);
}

void AdaptivePolicy::probe_main(unsigned cls) {
  Class& c = classes_[cls];
  c.credit += (now() - c.credit_at) * 64 >> c.rarity;
  c.credit = std::min(c.credit, class_pages(cls) * 64 / 8);
  c.credit_at = now();
  for (int i = 0; i < kMostSteps; ++i) {
    FrameId id = lists_.tail(list(cls, c.weak_turn ? kWeak : kMain));
    if (id == kNoFrame) id = lists_.tail(list(cls, c.weak_turn ? kMain : kWeak));
    if (id == kNoFrame || c.credit < lists_[id].weight() * uint64_t{64} || !probe(id)) return;
    c.weak_turn = !c.weak_turn;
    c.credit -= lists_[id].weight() * uint64_t{64};
    lists_[id].stamp = stamp_now();
    lists_.move_to_head(list(cls, kMainOut), id);
  }
}

// Probes the older half of the window, which is about to be evicted anyway.
void AdaptivePolicy::probe_window(unsigned cls) {
  Class& c = classes_[cls];
  for (int i = 0; i < kMostSteps && lists_.pages(list(cls, kWindowOut)) * 2 < window_pages(cls); ++i) {
    const FrameId id = lists_.tail(list(cls, kWindow));
    if (id == kNoFrame) return;
    if (!c.window_rare || c.window_turn % 8 == 0) {
      if (!probe(id)) return;
      c.window_probed += lists_[id].weight();
    }
    ++c.window_turn;
    lists_.move_to_head(list(cls, kWindowOut), id);
  }
  if (c.window_probed * 16 < class_pages(cls) || c.window_probed == 0) return;
  c.window_rare = c.window_touched * 64 < c.window_probed;
  c.window_probed = c.window_touched = 0;
}

void AdaptivePolicy::look_ahead(unsigned cls) {
  probe_main(cls);
  probe_window(cls);
}

FrameId AdaptivePolicy::pick(unsigned cls) {
  Class& c = classes_[cls];
  c.full = class_pages(cls);
  uint64_t idle = 0;
  const FrameId window = oldest(cls, kWindow);
  FrameId main = worst(cls, &idle);
  if (main == kNoFrame) main = lists_.tail(list(cls, kMain));
  if (main == kNoFrame || (window != kNoFrame && main_pages(cls) + window_target(c, c.full) <= c.full)) {
    note_idle(c, since(lists_[window].stamp), lists_[window].weight());
    return window;
  }
  if (!lists_[main].probes) {
    if (c.renew == 0) main = any_of_main(cls);
    return main;
  }
  note_idle(c, idle, lists_[main].weight());
  c.pro += lists_[main].weight();
  judge(c, c.full);
  return main;
}

}  // namespace vmem::policy
