// When more staging frames of one size are made: how much of the host budget those of all sizes may have, who has found
// none, and when that is tried again. Making them takes long, and is done without the pager's lock.
//
//   one thread at a time makes frames, no more than the share of the budget has room for; what was refused is refused
//   until frames have been made, and is due again kAgain later, kLater where there was no memory for them
//
// Not thread-safe: the pager's lock protects it. Needs no memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "memory/host_budget.h"
#include "memory/staging.h"

namespace vmem::pager {

// What frames of other sizes mean for those of one.
class StagingOthers {
 public:
  virtual uint64_t kept(const memory::Staging& from) const = 0;  // bytes of the share that it leaves to them
  virtual uint64_t unused(const memory::Staging& by) const = 0;  // bytes that they give back when it needs them

 protected:
  ~StagingOthers() = default;
};

class StagingGrowth {
 public:
  static constexpr uint64_t kAgain = 50000000, kLater = 100 * kAgain;  // ns

  StagingGrowth(const memory::Staging& staging, const memory::HostBudget& budget, unsigned share,
                const StagingOthers* others = nullptr)
      : staging_(staging), budget_(budget), share_(share), others_(others) {}
  unsigned share() const { return share_; }  // percent of the budget, at most
  void set_share(unsigned percent) { share_ = percent; }

  // Frames that are kept for the way out: otherwise blocks on their way in could wait for room that only the way out
  // can make.
  size_t reserve() const;
  uint64_t most() const;  // bytes, of frames of all sizes
  // The share has room for a few more, once frames of other sizes that nobody uses have gone; fits(): as it is.
  // grows(): and nobody was refused them; or some are being made, which are charged already and may be the last.
  bool has_room() const;
  bool fits() const;
  bool grows() const { return growing_ || (has_room() && !refused_); }
  // Too few are free, counting `leaving` bytes that will be, and no more are made soon.
  bool blocks_must_leave(uint64_t leaving) const;

  // Somebody found no frame.
  void want() { wanted_ = true; }
  // They were refused a while ago, and there may be memory by now: whoever finds no frame may want some.
  bool may_try_again(uint64_t now_ns) const { return has_room() && refused_ && now_ns >= again_ns_; }
  // Somebody is to make some now.
  bool due(uint64_t now_ns) const { return wanted_ && has_room() && !growing_ && now_ns >= again_ns_; }

  // How many are to be made; 0: there is no room, or somebody is at it. Nobody wants any from here on.
  size_t take(size_t at_most);
  // The budget has no room for them beside blocks. Until then the pool gives up what it has.
  void no_room(uint64_t now_ns);
  // They are being made, by the caller, until end().
  void begin() { growing_ = true; }
  void end(bool made, uint64_t now_ns);
  bool growing() const { return growing_; }

  // Tests: what is wrong; empty: nothing.
  std::string check(uint64_t now_ns) const;

 private:
  uint64_t held() const, kept() const;

  const memory::Staging& staging_;
  const memory::HostBudget& budget_;
  unsigned share_;
  const StagingOthers* others_;  // null: there are none
  bool wanted_ = false, growing_ = false, refused_ = false;
  uint64_t again_ns_ = 0;
};

}  // namespace vmem::pager
