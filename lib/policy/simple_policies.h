// Published policies, as far as they work without accessed bits: references for the adaptive
// policy, and choices for users who know their load. A probe ahead of the block's turn replaces the
// "touched" bit.
#pragma once

#include "policy/eviction_policy_base.h"

namespace vmem::policy {

// First in, first out. Never probes.
class FifoPolicy final : public EvictionPolicyBase {
 public:
  const char* name() const override { return "fifo"; }

 private:
  void insert(unsigned cls, core::FrameId id, Entry entry, uint64_t age, bool sequential) override;
  void reused(unsigned, core::FrameId, bool) override {}
  void leaving(unsigned, core::FrameId) override {}
  core::FrameId pick(unsigned cls) override { return lists_.tail(list(cls, 0)); }
  void look_ahead(unsigned) override {}
};

// SIEVE (Zhang et al., NSDI'24): a hand sweeps from old to new and evicts blocks that were not
// touched; touched blocks stay in place. Here a scout runs up to 1/8 of the memory ahead of the
// hand and probes.
class SievePolicy final : public EvictionPolicyBase {
 public:
  const char* name() const override { return "sieve"; }

 private:
  struct Sweep {
    core::FrameId hand = core::kNoFrame, scout = core::kNoFrame;
    uint64_t gap = 0;  // pages that the scout has passed and the hand has not: their stamp is 1
  };
  void insert(unsigned cls, core::FrameId id, Entry entry, uint64_t age, bool sequential) override;
  void reused(unsigned cls, core::FrameId id, bool probed) override;
  void leaving(unsigned cls, core::FrameId id) override;
  core::FrameId pick(unsigned cls) override;
  void look_ahead(unsigned cls) override;
  void pass(Sweep& s, core::FrameId id);
  std::array<Sweep, kClasses> sweeps_;
};

// Two queues, each with a tail out of sight: a block touched there gets another round. Shared by
// S3-FIFO and 2Q.
class TwoQueuePolicy : public EvictionPolicyBase {
 protected:
  enum Part : unsigned { kSmall, kSmallOut, kMain, kMainOut };
  void insert(unsigned cls, core::FrameId id, Entry entry, uint64_t age, bool sequential) override;
  void reused(unsigned cls, core::FrameId id, bool probed) override;
  void leaving(unsigned, core::FrameId) override {}
  core::FrameId pick(unsigned cls) override;
  void look_ahead(unsigned cls) override;
  // Shares of the class in 1/64.
  virtual unsigned small_share() const = 0;
  virtual unsigned main_out_share() const = 0;
  virtual bool probe_small() const = 0;
  // A block enters the main queue at once if at most so many pages were evicted since it left.
  virtual uint64_t ghost_pages(unsigned cls) const = 0;

 private:
  bool evict_small(unsigned cls) const;
  void move_out(unsigned cls, unsigned from, unsigned to, uint64_t want);
};

// S3-FIFO (Yang et al., SOSP'23): a small queue of 10 %, a main queue with second chances, and a
// ghost of the main queue's size.
class S3FifoPolicy final : public TwoQueuePolicy {
 public:
  const char* name() const override { return "s3fifo"; }

 private:
  unsigned small_share() const override { return 6; }
  unsigned main_out_share() const override { return 8; }
  bool probe_small() const override { return true; }
  uint64_t ghost_pages(unsigned cls) const override { return class_pages(cls) * 9 / 10; }
};

// 2Q (Johnson and Shasha, VLDB'94): 25 % A1in, a ghost of 50 %, the rest near-LRU: its last quarter
// is out of sight.
class TwoQPolicy final : public TwoQueuePolicy {
 public:
  const char* name() const override { return "twoq"; }

 private:
  unsigned small_share() const override { return 16; }
  unsigned main_out_share() const override { return 16; }
  bool probe_small() const override { return false; }
  uint64_t ghost_pages(unsigned cls) const override { return class_pages(cls) / 2; }
};

}  // namespace vmem::policy
