// Published policies, as far as they work without accessed bits: yardsticks for the adaptive
// policy. A probe ahead of the block's turn replaces the "touched" bit.
#pragma once

#include <algorithm>
#include <array>
#include <memory>

#include "policy/adaptive_policy.h"
#include "policy/eviction_policy_base.h"

namespace vmem::replay {

using core::FrameId;
using core::kNoFrame;
using policy::ListId;
using policy::Node;

inline constexpr int kMostSteps = 64;  // of any loop in one pick or look ahead

// First in, first out. Never probes.
class FifoPolicy final : public policy::EvictionPolicyBase {
 public:
  const char* name() const override { return "fifo"; }

 private:
  void insert(unsigned cls, FrameId id, Entry, uint64_t, bool) override { lists_.push_head(list(cls, 0), id); }
  void reused(unsigned, FrameId, bool) override {}
  void leaving(unsigned, FrameId) override {}
  FrameId pick(unsigned cls) override { return lists_.tail(list(cls, 0)); }
  void look_ahead(unsigned) override {}
};

// SIEVE (Zhang et al., NSDI'24): a hand sweeps from old to new and evicts blocks that were not
// touched; touched blocks stay in place. Here a scout runs up to 1/8 of the memory ahead of the
// hand and probes.
class SievePolicy final : public policy::EvictionPolicyBase {
 public:
  const char* name() const override { return "sieve"; }

 private:
  struct Sweep {
    FrameId hand = kNoFrame, scout = kNoFrame;
    uint64_t gap = 0;  // pages that the scout has passed and the hand has not: their stamp is 1
  };
  void insert(unsigned cls, FrameId id, Entry entry, uint64_t, bool) override {
    Node& n = lists_[id];
    n.stamp = 0;
    if (entry != Entry::unheld) n.used = 0;
    lists_.push_head(list(cls, 0), id);
  }
  void reused(unsigned, FrameId id, bool) override { lists_[id].used = 1; }
  void leaving(unsigned cls, FrameId id) override { pass(sweeps_[cls], id); }
  FrameId pick(unsigned cls) override {
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
  void look_ahead(unsigned cls) override {
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
  // The hand goes past the block, or the block leaves.
  void pass(Sweep& s, FrameId id) {
    Node& n = lists_[id];
    if (s.scout == id) s.scout = n.newer;
    if (s.hand == id) s.hand = n.newer;
    if (n.stamp == 1) s.gap -= n.weight();
    n.stamp = 0;
  }
  std::array<Sweep, kClasses> sweeps_;
};

// Two queues, each with a tail out of sight: a block touched there gets another round. S3-FIFO and
// 2Q differ in these shares.
struct TwoQueueShares {
  const char* name;
  unsigned small, main_out;  // of the class, in 1/64
  bool probe_small;
  // A block enters the main queue at once if at most so many percent of the class were evicted
  // since it left.
  unsigned ghost_percent;
};
// S3-FIFO (Yang et al., SOSP'23): a small queue of 10 %, a main queue with second chances, and a
// ghost of the main queue's size.
inline constexpr TwoQueueShares kS3Fifo{"s3fifo", 6, 8, true, 90};
// 2Q (Johnson and Shasha, VLDB'94): 25 % A1in, a ghost of 50 %, the rest near-LRU: its last quarter
// is out of sight.
inline constexpr TwoQueueShares kTwoQ{"twoq", 16, 16, false, 50};

template <const TwoQueueShares& kShares>
class TwoQueuePolicy final : public policy::EvictionPolicyBase {
 public:
  const char* name() const override { return kShares.name; }

 private:
  enum Part : unsigned { kSmall, kSmallOut, kMain, kMainOut };
  uint64_t pages(unsigned cls, Part in, Part out) const {
    return lists_.pages(list(cls, in)) + lists_.pages(list(cls, out));
  }
  bool evict_small(unsigned cls) const {
    const uint64_t small = pages(cls, kSmall, kSmallOut);
    return small == class_pages(cls) || (small != 0 && small * 64 >= class_pages(cls) * kShares.small);
  }
  void insert(unsigned cls, FrameId id, Entry entry, uint64_t age, bool) override {
    Node& n = lists_[id];
    const bool was_main = entry == Entry::unheld && (n.proven || n.used);
    n.proven = was_main || (entry == Entry::refault && age <= class_pages(cls) * kShares.ghost_percent / 100);
    n.used = 0;
    lists_.push_head(list(cls, n.proven ? kMain : kSmall), id);
  }
  void reused(unsigned cls, FrameId id, bool) override {
    Node& n = lists_[id];
    if (!n.proven && !kShares.probe_small) return;
    n.proven = 1;
    lists_.move_to_head(list(cls, kMain), id);
  }
  void leaving(unsigned, FrameId) override {}
  FrameId pick(unsigned cls) override {
    const unsigned first = evict_small(cls) ? kSmall : kMain;
    const FrameId out = lists_.tail(list(cls, first + 1));
    return out != kNoFrame ? out : lists_.tail(list(cls, first));
  }
  void look_ahead(unsigned cls) override {
    if (!evict_small(cls)) {
      move_out(cls, kMain, kMainOut, pages(cls, kMain, kMainOut) * kShares.main_out / 64);
    } else if (kShares.probe_small) {
      const uint64_t share = class_pages(cls) * kShares.small / 64;
      move_out(cls, kSmall, kSmallOut, std::min(pages(cls, kSmall, kSmallOut), share) / 2);
    }
  }
  // Takes the oldest blocks of `from` out of sight until `want` pages of the part are.
  void move_out(unsigned cls, Part from, Part to, uint64_t want) {
    for (int i = 0; i < kMostSteps / 4 && lists_.pages(list(cls, to)) < want; ++i) {
      const FrameId id = lists_.tail(list(cls, from));
      if (id == kNoFrame || !probe(id)) return;
      lists_.move_to_head(list(cls, to), id);
    }
  }
};

using MakePolicy = std::unique_ptr<policy::EvictionPolicy> (*)();
template <typename Policy>
std::unique_ptr<policy::EvictionPolicy> make() {
  return std::make_unique<Policy>();
}
inline constexpr MakePolicy kAdaptive = make<policy::AdaptivePolicy>;
inline constexpr std::array kSimple = {MakePolicy{make<FifoPolicy>}, MakePolicy{make<SievePolicy>},
                                       MakePolicy{make<TwoQueuePolicy<kS3Fifo>>},
                                       MakePolicy{make<TwoQueuePolicy<kTwoQ>>}};
inline constexpr std::array kPolicies = {kAdaptive, kSimple[0], kSimple[1], kSimple[2], kSimple[3]};

}  // namespace vmem::replay
