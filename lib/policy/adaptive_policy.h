// The default evictor. docs/decisions/0002-eviction-policy.md has the reasons and the figures.
//
// Each class has a window, through which newcomers pass, and a main part, which changes only for a reason. The oldest
// of each are out of sight (probed), so that a touch of them is seen. Times are in pages evicted (now()).
//
// - While memory fills, what the window cannot hold goes to the main part. So what came first stays, and a loop larger
//   than memory finds a part of itself there.
// - A contest decides who gets into a full main part: a block that was idle for so long, against what of the main part
//   was idle longest. Both must be told apart clearly, so in a loop, where all are idle equally long, nobody wins and
//   the part that is there stays. When the load moves on nobody touches the old part, and newcomers win.
// - How fast the main part is probed follows from what probes show: a part that is alive is left alone.
// - Blocks that may not be probed cannot be contested with; see young_enough().
#pragma once

#include "policy/eviction_policy_base.h"

namespace vmem::policy {

class AdaptivePolicy final : public EvictionPolicyBase {
 public:
  const char* name() const override { return "adaptive"; }

 private:
  // kWindow and kMain: in sight, newest first. The Outs: out of sight, `stamp` says since when. kWeak: of the main
  // part, in sight, last seen to be wanted after an unusually long wait; `stamp` is that wait.
  enum Part : unsigned { kWindow, kWindowOut, kMain, kMainOut, kWeak };

  // The block table remembers when a block left, not how long it had been idle then. This does, about.
  struct Epoch {
    uint64_t number = UINT64_MAX, pages = 0, idle = 0;  // idle: sum over the pages
  };
  static constexpr uint64_t kEpochs = 64, kEpochsPerFill = 8;

  struct Class {
    std::array<Epoch, kEpochs> epochs;
    uint64_t full = 0;                     // pages of the class when it was last shrunk; 0: never
    uint64_t ahead = 0;                    // pages read ahead that nobody has come for yet
    uint64_t most_ahead = 0;               // the most of late; falls by a page for every 16 admitted
    uint64_t hinted = 0, most_hinted = 0;  // the same of what the program itself asked for
    uint64_t strangers = 0;                // pages admitted in a row that were new here, or away for unusually long
    uint64_t mean_age = 0;                 // of what comes back, running mean
    // Probes of the main part.
    uint64_t credit_at = 0;         // now() up to which evictions have earned probes
    uint64_t credit = 0;            // earned, in 1/64 pages
    unsigned rarity = 0;            // a page evicted earns 2^-rarity pages of probes
    uint64_t against = 0, pro = 0;  // pages that spoke against and for more probes since `rarity` was set
    bool weak_turn = false;         // probe the weak next
    uint64_t mean_wait = 0;         // pages evicted between a probe and its touch, running mean
    uint64_t last_touch = 0;        // now() when one was last touched
    uint64_t gap_now = 0, gap_before = 0, gap_until = 0;  // longest pause between touches, in this period and the last
    // Probes of the window.
    uint64_t window_probed = 0, window_touched = 0;  // pages, since `window_rare` was set
    bool window_rare = false;                        // they show nothing: one block in eight will do
    unsigned window_turn = 0;
    // Blocks without probes.
    uint64_t thrash = 0;  // pages that came back soon, less those that did not
    bool frozen = false;
    uint64_t refused = 0;  // pages
    uint64_t renew = 0;    // pages still to be let in whatever their age
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
  uint64_t dice_ = 0x9e3779b97f4a7c15;  // same calls, same throws
};

}  // namespace vmem::policy
