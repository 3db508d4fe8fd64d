// A miniature pager: blocks of one size, instant I/O, one policy. It counts the costs of a real
// pager.
#pragma once

#include <algorithm>
#include <list>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "policy/fault_around.h"
#include "policy/readahead.h"
#include "replay/generate.h"
#include "replay/simple_policies.h"

namespace vmem::replay {

struct Result {
  std::string policy;
  uint64_t touches = 0, hits = 0, misses = 0, evictions = 0;
  uint64_t probes = 0, soft_faults = 0;              // blocks isolated as a probe; those that were then touched
  uint64_t read_ahead = 0, covered = 0, wasted = 0;  // blocks: read ahead; touched in time; evicted unused
  uint64_t beside = 0;                               // blocks read in the same read as a missed one
  uint64_t transfers = 0;                            // read-ahead reads of adjacent blocks
  double hit_rate() const { return touches == 0 ? 0 : static_cast<double>(hits) / static_cast<double>(touches); }
};

struct Setup {
  MakePolicy make = kAdaptive;
  uint64_t capacity = 1024;  // blocks
  uint32_t weight = 512;     // pages a block
  bool probes = true;
  uint64_t batch = 1;   // victims requested from the policy at a time
  uint32_t window = 0;  // read-ahead blocks; 0: none
  uint32_t group = 0;   // adjacent blocks that a miss may read together; 0: each is read alone
  policy::Access access = policy::Access::normal;
};

class Pager {
 public:
  Pager(const Setup& setup, uint64_t blocks)
      : setup_(setup),
        blocks_(blocks),
        policy_(setup.make()),
        readahead_(blocks, setup.window),
        fault_around_(blocks, setup.group) {
    owner_.resize(setup.capacity + 1);
    for (uint64_t i = owner_.size(); i-- > 0;) free_.push_back(static_cast<core::FrameId>(i));
    policy_->resize(owner_.size(), setup.capacity * setup.weight);
    readahead_.set_access(setup.access);
    result_.policy = policy_->name();
  }

  void touch(uint64_t block, bool counts = true) {
    Block& b = blocks_[block];
    const bool marker = b.marker;
    const uint64_t misses = result_.misses, soft = result_.soft_faults;
    if (!b.present) {
      ++result_.misses;
      bring(block);
    } else if (b.hidden) {
      b.hidden = false;
      ++result_.soft_faults;
      policy_->touched(b.id);
    }
    if (counts) {
      ++result_.touches;
      if (misses == result_.misses) ++result_.hits;
    }
    if (b.ahead) ++result_.covered;
    const bool trapped = misses != result_.misses || soft != result_.soft_faults;
    if (trapped && b.ahead) used_up_to(block);
    b.ahead = b.marker = false;
    if (misses == result_.misses && !marker) return;
    if (const auto w = readahead_.on_fault(block, marker)) read_ahead(*w);
    if (setup_.group != 0 && misses != result_.misses && !readahead_.streams()) read_beside(block);
  }
  Result result() {
    result_.probes = policy_->probed();
    return result_;
  }
  bool present(uint64_t block) const { return blocks_[block].present; }
  policy::EvictionPolicy& policy() { return *policy_; }

 private:
  struct Block {
    bool present = false, hidden = false, ahead = false, marker = false, reported_ahead = false;
    int64_t stride = 1;
    core::FrameId id = 0;
    uint64_t left_at = 0;  // 0: never
  };
  // The pager sees the use of a read-ahead block only if the touch traps; earlier blocks of its
  // stream are presumed used.
  void used_up_to(uint64_t block) {
    const int64_t stride = blocks_[block].stride;
    for (auto at = static_cast<int64_t>(block); at >= 0 && at < static_cast<int64_t>(blocks_.size()); at -= stride) {
      Block& b = blocks_[static_cast<uint64_t>(at)];
      if (!b.present || !b.reported_ahead) break;
      b.reported_ahead = false;
      if (static_cast<uint64_t>(at) != block) policy_->touched(b.id);
    }
  }
  void bring(uint64_t block, bool ahead = false) {
    if (free_.empty() || owner_.size() - free_.size() >= setup_.capacity) evict();
    Block& b = blocks_[block];
    b.present = true;
    b.hidden = false;
    b.id = free_.back();
    free_.pop_back();
    owner_[b.id] = block;
    policy::Admission a;
    a.id = b.id;
    a.weight = setup_.weight;
    a.probes = setup_.probes;
    a.sequential = setup_.access == policy::Access::sequential;
    if (b.left_at != 0) a.age = evicted_ - b.left_at;
    a.ahead = b.ahead = b.reported_ahead = ahead;
    policy_->admit(a);
  }
  void evict() {
    std::vector<policy::Victim> out(2 * setup_.batch + 14);
    const size_t n = policy_->victims(setup_.batch * setup_.weight, out);
    for (size_t i = 0; i < n; ++i) {
      Block& b = blocks_[owner_[out[i].id]];
      if (out[i].probe) {
        b.hidden = true;
        continue;
      }
      b.present = false;
      evicted_ += setup_.weight;
      b.left_at = evicted_;
      free_.push_back(b.id);
      ++result_.evictions;
      if (b.ahead) {
        ++result_.wasted;
        readahead_.on_waste(owner_[out[i].id]);
      }
      b.ahead = b.marker = false;
    }
  }
  void read_beside(uint64_t block) {
    uint64_t present = 0;
    const uint64_t first = fault_around_.first(block);
    for (uint32_t i = 0; i < fault_around_.count(block); ++i) present |= uint64_t{blocks_[first + i].present} << i;
    const policy::Run run = fault_around_.around(block, present);
    for (uint64_t i = 1; i < run.count; ++i) {
      bring(static_cast<uint64_t>(static_cast<int64_t>(block) + static_cast<int64_t>(i) * run.stride));
      ++result_.beside;
    }
    readahead_.presume(run);
  }
  void read_ahead(const policy::Window& w) {
    // As in the real pager, at most a quarter of memory is read ahead at a time.
    const uint64_t count = std::min<uint64_t>(w.count, std::max<uint64_t>(setup_.capacity / 4, 1));
    if (count < w.count) readahead_.on_dropped(static_cast<uint32_t>(w.count - count));
    uint64_t blocks = 0;
    for (uint64_t i = 0; i < count; ++i) {
      const auto at = static_cast<uint64_t>(static_cast<int64_t>(w.first) + static_cast<int64_t>(i) * w.stride);
      if (blocks_[at].present) continue;
      bring(at, true);
      blocks_[at].stride = w.stride;
      blocks_[at].marker = blocks_[at].hidden = at == w.marker;
      ++result_.read_ahead;
      ++blocks;
    }
    result_.transfers += (blocks + kMerged - 1) / kMerged;
  }

  static constexpr uint64_t kMerged = 16;  // blocks that one transfer reads ahead

  Setup setup_;
  std::vector<Block> blocks_;
  std::vector<uint64_t> owner_;
  std::vector<core::FrameId> free_;
  std::unique_ptr<policy::EvictionPolicy> policy_;
  policy::ReadAhead readahead_;
  policy::FaultAround fault_around_;
  uint64_t evicted_ = 0;  // pages
  Result result_;
};

inline uint64_t blocks_of(const Trace& trace) {
  uint64_t last = 0;
  for (const Touch& t : trace) last = std::max(last, t.block);
  if (last == UINT64_MAX) throw std::length_error("the trace names block 18446744073709551615, or one beyond it");
  return trace.empty() ? 0 : last + 1;
}

// Does not count the first `warmup` touches.
inline Result simulate(const Trace& trace, const Setup& setup, uint64_t warmup = 0) {
  Pager pager(setup, blocks_of(trace));
  for (uint64_t i = 0; i < trace.size(); ++i) pager.touch(trace[i].block, i >= warmup);
  return pager.result();
}

// Reference policies with knowledge that a pager lacks: every touch (LRU, SIEVE), or the future
// (OPT, Belady).
inline Result simulate_lru(const Trace& trace, uint64_t capacity, uint64_t warmup = 0) {
  Result r;
  r.policy = "lru*";
  std::list<uint64_t> order;
  std::unordered_map<uint64_t, std::list<uint64_t>::iterator> where;
  for (uint64_t i = 0; i < trace.size(); ++i) {
    const auto it = where.find(trace[i].block);
    if (i >= warmup) ++r.touches, r.hits += it != where.end();
    if (it != where.end()) {
      order.splice(order.begin(), order, it->second);
      continue;
    }
    ++r.misses;
    if (where.size() == capacity) {
      where.erase(order.back());
      order.pop_back();
    }
    order.push_front(trace[i].block);
    where[trace[i].block] = order.begin();
  }
  return r;
}

inline Result simulate_sieve(const Trace& trace, uint64_t capacity, uint64_t warmup = 0) {
  struct Entry {
    uint64_t block;
    bool visited;
  };
  Result r;
  r.policy = "sieve*";
  std::list<Entry> order;
  std::unordered_map<uint64_t, std::list<Entry>::iterator> where;
  auto hand = order.end();
  for (uint64_t i = 0; i < trace.size(); ++i) {
    const auto it = where.find(trace[i].block);
    if (i >= warmup) ++r.touches, r.hits += it != where.end();
    if (it != where.end()) {
      it->second->visited = true;
      continue;
    }
    ++r.misses;
    if (where.size() == capacity) {
      auto at = hand == order.end() ? std::prev(order.end()) : hand;
      while (at->visited) {
        at->visited = false;
        at = at == order.begin() ? std::prev(order.end()) : std::prev(at);
      }
      hand = at == order.begin() ? order.end() : std::prev(at);
      where.erase(at->block);
      order.erase(at);
    }
    order.push_front({trace[i].block, false});
    where[trace[i].block] = order.begin();
  }
  return r;
}

inline Result simulate_opt(const Trace& trace, uint64_t capacity, uint64_t warmup = 0) {
  Result r;
  r.policy = "opt*";
  std::vector<uint64_t> next(trace.size(), UINT64_MAX), last(blocks_of(trace), UINT64_MAX);
  for (uint64_t i = trace.size(); i-- > 0;) {
    next[i] = last[trace[i].block];
    last[trace[i].block] = i;
  }
  std::set<std::pair<uint64_t, uint64_t>> by_next;  // (next touch, block) of what is in memory
  std::vector<uint64_t> key(last.size(), 0);
  std::vector<bool> in(last.size(), false);
  for (uint64_t i = 0; i < trace.size(); ++i) {
    const uint64_t b = trace[i].block;
    if (i >= warmup) ++r.touches, r.hits += in[b];
    if (in[b]) {
      by_next.erase({key[b], b});
    } else {
      ++r.misses;
      if (by_next.size() == capacity) {
        const auto far = std::prev(by_next.end());
        in[far->second] = false;
        by_next.erase(far);
      }
    }
    in[b] = true;
    key[b] = next[i];
    by_next.insert({next[i], b});
  }
  return r;
}

}  // namespace vmem::replay
