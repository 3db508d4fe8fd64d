// The default eviction policy. docs/decisions/0002-eviction-policy.md has the reasons and the
// figures.
//
// Each class has a window, through which new blocks pass, and a main part, which changes only for a
// reason. The oldest blocks of each are out of sight (probed), so that a touch of them is seen.
// Times are in pages evicted (now()).
//
// - While memory fills, blocks that the window cannot hold go to the main part. So the blocks that
//   came first stay, and a loop larger than memory finds some of its blocks there.
// - A contest decides whether a block enters a full main part: its idle time must be clearly
//   shorter than the longest idle time in the main part. In a loop all blocks are idle equally
//   long, so no block wins and the main part stays. When the load moves on, no thread touches the
//   old part, and new blocks win.
// - The results of probes set how fast the main part is probed: a part that is alive is left alone.
// - Blocks that may not be probed cannot take part in contests; see young_enough().
#pragma once

#include "policy/eviction_policy_base.h"

namespace vmem::policy {

class AdaptivePolicy final : public EvictionPolicyBase {
 public:
  const char* name() const override { return "adaptive"; }

 private:
  // - kWindow and kMain: in sight, newest first.
  // - kWindowOut and kMainOut: out of sight; `stamp` says since when.
  // - kWeak: blocks of the main part, in sight, last wanted after an unusually long wait; `stamp`
  //   is that wait.
  enum Part : unsigned { kWindow, kWindowOut, kMain, kMainOut, kWeak };

  // The block table remembers when a block left, not how long it had been idle. Epochs remember
  // that, approximately.
  struct Epoch {
    uint64_t number = UINT64_MAX, pages = 0, idle = 0;  // idle: sum over the pages
  };
  static constexpr uint64_t kEpochs = 64, kEpochsPerFill = 8;

  struct Class {
    std::array<Epoch, kEpochs> epochs;
    uint64_t full = 0;                     // pages of the class when it was last shrunk; 0: never
    uint64_t ahead = 0;                    // pages read ahead and not used yet
    uint64_t most_ahead = 0;               // the recent maximum; falls by a page for every 16 admitted
    uint64_t hinted = 0, most_hinted = 0;  // the same for pages that the program asked for
    uint64_t strangers = 0;                // pages admitted in a row that were new or away for unusually long
    uint64_t mean_age = 0;                 // running mean over blocks that come back
    // Probes of the main part.
    uint64_t credit_at = 0;         // now() up to which evictions have earned probes
    uint64_t credit = 0;            // earned, in 1/64 pages
    unsigned rarity = 0;            // a page evicted earns 2^-rarity pages of probes
    uint64_t against = 0, pro = 0;  // pages that spoke against and for more probes since `rarity` was set
    bool weak_turn = false;         // probe the weak next
    uint64_t mean_wait = 0;         // pages evicted between a probe and its touch, running mean
    uint64_t last_touch = 0;        // now() when a probed block was last touched
    uint64_t gap_now = 0, gap_before = 0, gap_until = 0;  // longest pause between touches, in this period and the last
    // Probes of the window.
    uint64_t window_probed = 0, window_touched = 0;  // pages, since `window_rare` was set
    bool window_rare = false;                        // they show nothing: probe one block in eight
    unsigned window_turn = 0;
    // Blocks without probes.
    uint64_t thrash = 0;  // pages that came back soon, minus those that did not
    bool frozen = false;
    uint64_t refused = 0;  // pages
    uint64_t renew = 0;    // pages still to be let in at any age
  };

  void insert(unsigned cls, core::FrameId id, Entry entry, uint64_t age, bool sequential) override;
  void reused(unsigned cls, core::FrameId id, bool probed) override;
  void first_used(unsigned cls, core::FrameId id) override;
  void leaving(unsigned cls, core::FrameId id) override;
  core::FrameId pick(unsigned cls) override;
  void look_ahead(unsigned cls) override;

  uint32_t stamp_now() const { return static_cast<uint32_t>(now()); }
  uint64_t since(uint32_t stamp) const { return static_cast<uint32_t>(stamp_now() - stamp); }
  uint64_t window_pages(unsigned cls) const {
    return lists_.pages(list(cls, kWindow)) + lists_.pages(list(cls, kWindowOut));
  }
  uint64_t main_pages(unsigned cls) const { return class_pages(cls) - window_pages(cls); }
  uint64_t window_target(const Class& c, uint64_t total) const;
  uint64_t epoch_length() const { return capacity() / kEpochsPerFill + 1; }
  core::FrameId oldest(unsigned cls, unsigned part) const;

  void put(unsigned cls, core::FrameId id, bool proven);
  void fill_main(unsigned cls);
  core::FrameId worst(unsigned cls, uint64_t* idle) const;
  core::FrameId any_of_main(unsigned cls);
  void note_idle(Class& c, uint64_t idle, uint64_t weight);
  uint64_t idle_when_left(const Class& c, uint64_t age) const;
  bool main_alive(const Class& c, uint64_t total) const;
  bool wins(unsigned cls, uint64_t idle, uint64_t weight);
  bool young_enough(unsigned cls, uint64_t age, uint64_t weight);
  static bool trickle(Class& c, uint64_t weight);
  static void meet(Class& c, std::optional<uint64_t> age, uint64_t weight, uint64_t total);
  static void judge(Class& c, uint64_t total);
  void found_alive(Class& c, uint64_t wait, uint64_t weight, uint64_t total);
  void probe_main(unsigned cls);
  void probe_window(unsigned cls);

  std::array<Class, kClasses> classes_{};
  uint64_t dice_ = 0x9e3779b97f4a7c15;  // the same calls get the same numbers
};

}  // namespace vmem::policy
