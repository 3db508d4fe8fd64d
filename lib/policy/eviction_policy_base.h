// Base of the eviction policies: temperatures, pins, priorities and holds. A derived policy orders
// the blocks of one priority and is asked for one victim at a time.
//
// Order of eviction: cold, then low, normal and high priority, then hot, then pinned. Cold blocks
// that were used go before cold blocks that were read ahead and not used yet. Three rules soften
// this order:
// - A class keeps a floor of 1/16 of the memory while a higher class has more than its own floor: a
//   high-priority scan slows the others but never starves them.
// - Held blocks are in no list, so that no search has to pass them.
// - Refused blocks leave the order and come after all others. For each page that is named, a share
//   of a page goes back to its place, the longest refused first: no search passes refused blocks,
//   and blocks that still cannot leave take only that share of the victims.
#pragma once

#include <array>

#include "policy/frame_lists.h"

namespace vmem::policy {

class EvictionPolicyBase : public EvictionPolicy {
 public:
  void resize(size_t frames, uint64_t capacity_pages) override;
  void admit(const Admission& what) override;
  void touched(core::FrameId id) override;
  void remove(core::FrameId id) override;
  void advise(core::FrameId id, Temperature temperature, Priority priority, bool pinned) override;
  size_t victims(uint64_t pages, std::span<Victim> out) override;
  void hold(core::FrameId id) override;
  void unhold(core::FrameId id) override;
  uint64_t probed() const override { return probed_; }

 protected:
  static constexpr unsigned kClasses = 3;  // priorities
  static constexpr unsigned kListsPerClass = 5;

  EvictionPolicyBase() : lists_(kFirstPolicyList + kClasses * kListsPerClass) {}

  // How a block enters or returns to the order of its class.
  enum class Entry : uint8_t {
    fresh,    // never seen before
    refault,  // was in memory; `age` says how long ago
    advised,  // its advice changed, or it was refused; it was in memory all the time
    unheld,   // the last hold ended; node.used: a use was seen, node.proven: its part
  };
  virtual void insert(unsigned cls, core::FrameId id, Entry entry, uint64_t age, bool sequential) = 0;
  // A block of the class, in one of its lists, was wanted. probed: a probe showed it; otherwise the
  // use was seen in another way.
  virtual void reused(unsigned cls, core::FrameId id, bool probed) = 0;
  // The first use of a block that was read ahead: clear node.ahead.
  virtual void first_used(unsigned, core::FrameId id) { lists_[id].ahead = 0; }
  // The block is about to leave the class's lists, for any reason.
  virtual void leaving(unsigned cls, core::FrameId id) = 0;
  // Returns the next victim, still in its list; kNoFrame only if the class's lists are empty.
  // Bounded work.
  virtual core::FrameId pick(unsigned cls) = 0;
  // Takes blocks out of sight before their turn comes, by calling probe(). Called before each
  // pick(). Bounded work.
  virtual void look_ahead(unsigned cls) = 0;

  ListId list(unsigned cls, unsigned which) const {
    return static_cast<ListId>(kFirstPolicyList + cls * kListsPerClass + which);
  }
  uint64_t class_pages(unsigned cls) const { return class_pages_[cls]; }
  uint64_t capacity() const { return capacity_; }
  // Pages evicted by this policy so far: the clock for ages.
  uint64_t now() const { return evicted_pages_; }
  // Adds the block to the victims as a probe, if it may be probed and is not probed yet. Returns
  // false if this call has no room: try later.
  bool probe(core::FrameId id);

  FrameLists lists_;

 private:
  static constexpr ListId kCold = 1, kColdAhead = 2, kHot = 3, kPinned = 4, kRefused = 5, kFirstPolicyList = 6;
  static constexpr unsigned kFloorShare = 16;
  static constexpr unsigned kRetryShare = 8;  // pages named for each refused page that gets its place back

  bool in_class(const Node& n) const { return n.list >= kFirstPolicyList; }
  void place(core::FrameId id, Entry entry, uint64_t age, bool sequential);
  void take_out(core::FrameId id);
  void retry_refused();
  core::FrameId next_victim();
  unsigned class_to_shrink() const;

  uint64_t capacity_ = 0, evicted_pages_ = 0;
  uint64_t retries_ = 0;  // earned, in pages / kRetryShare
  std::array<uint64_t, kClasses> class_pages_{};
  uint64_t probed_ = 0;
  std::span<Victim> out_;  // during victims()
  size_t out_used_ = 0;
  size_t probe_room_ = 0;
};

}  // namespace vmem::policy
