// Decides when more staging frames of one size are made: how much of the host budget the frames of
// all sizes may have, whether a block found none, and when that is tried again. Making frames takes
// long, and is done without the pager's lock.
//
// - One thread at a time makes frames, at most as many as the share of the budget has room for.
// - Frames that were refused stay refused until some have been made. The next try is due after
//   kAgain, or after kLater if there was no memory.
//
// Not thread-safe: the pager's lock protects it. Needs no memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "memory/host_budget.h"
#include "memory/staging.h"

namespace vmem::pager {

// The frames of other sizes, as far as they concern those of one size.
class StagingOthers {
 public:
  virtual uint64_t kept(const memory::Staging& from) const = 0;  // bytes of the share that `from` leaves to the others
  virtual uint64_t unused(const memory::Staging& by) const = 0;  // bytes that the others give back when `by` needs them

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

  // Frames that are kept for demotion. Otherwise promotions could wait for room that only
  // demotion can make.
  size_t reserve() const;
  uint64_t most() const;  // most bytes of frames of all sizes
  // has_room(): the share has room for a few more frames, once unused frames of other sizes
  // have gone. fits(): it has room now. grows(): it has room and none were refused, or some are
  // being made, which are charged already and may be the last.
  bool has_room() const;
  bool fits() const;
  bool grows() const { return growing_ || (has_room() && !refused_); }
  // Whether too few frames are free, with `leaving` bytes that will be, and no more are made soon.
  bool blocks_must_leave(uint64_t leaving) const;

  // A block found no free frame.
  void want() { wanted_ = true; }
  // Frames were refused a while ago, and there may be memory by now: a block that finds none may
  // call want().
  bool may_try_again(uint64_t now_ns) const { return has_room() && refused_ && now_ns >= again_ns_; }
  // Whether a thread should make frames now.
  bool due(uint64_t now_ns) const { return wanted_ && has_room() && !growing_ && now_ns >= again_ns_; }

  // Returns how many frames to make, or 0 if there is no room or a thread makes some already. Takes
  // back want().
  size_t take(size_t at_most);
  // The budget has no room for more frames beside blocks. Until the next try, blocks leave the
  // frames that there are.
  void no_room(uint64_t now_ns);
  // The caller makes frames from begin() to end().
  void begin() { growing_ = true; }
  void end(bool made, uint64_t now_ns);
  bool growing() const { return growing_; }

  // For tests: returns what is wrong, or an empty string.
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
