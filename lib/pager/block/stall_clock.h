// When to stop waiting: not when a clock says so, but when for the whole time-out nothing was read, written or evicted.
// Not thread-safe: the pager's lock protects it.
#pragma once

#include <algorithm>
#include <cstdint>

namespace vmem::pager {

// Time that passed while somebody of the library looked and found no move in flight. Between two looks at most kSlice
// counts: while the machine was stopped, or too busy to run the library's threads, nobody lived through more.
class StallClock {
 public:
  static constexpr uint64_t kSlice = 100000000;  // ns; whoever waits looks more often
  static constexpr uint64_t kNone = UINT64_MAX;  // no mark: nobody waits yet

  // in_flight: a transition is under way, whose end may be the memory that is waited for. Returns the time so far, a
  // wait's mark.
  uint64_t look(uint64_t now_ns, bool in_flight) {
    if (now_ns > looked_ && !in_flight) lived_ += std::min(now_ns - looked_, kSlice);
    looked_ = std::max(looked_, now_ns);
    return lived_;
  }
  // Something was read, written or evicted, or memory was given back.
  void made() { made_ = lived_; }
  // A wait since `mark` is over: for that long nothing went on.
  bool over(uint64_t mark, uint64_t limit_ns) const { return waited(std::max(mark, made_)) >= limit_ns; }
  uint64_t waited(uint64_t mark) const { return lived_ - mark; }

 private:
  uint64_t looked_ = 0, lived_ = 0, made_ = 0;
};

// Who knows how long waits have lasted, and what may still end them.
class WaitClock {
 public:
  virtual uint64_t look(uint64_t now_ns) = 0;  // a wait that begins has this mark
  virtual bool hopeless(uint64_t mark) = 0;    // for the whole time-out nothing went on, and nothing can

 protected:
  ~WaitClock() = default;
};

}  // namespace vmem::pager
