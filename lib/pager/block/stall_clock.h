// Decides when to stop waiting: after nothing was read, written or evicted for the whole time-out,
// and not after a fixed time. Not thread-safe: the pager's lock protects it.
#pragma once

#include <algorithm>
#include <cstdint>

namespace vmem::pager {

// Counts the time during which the library's threads looked and found no transition in flight.
// Between two looks at most kSlice counts: if the machine stood still, or was too busy to run these
// threads, that time does not end a wait.
class StallClock {
 public:
  static constexpr uint64_t kSlice = 100000000;  // ns; a waiting thread looks more often
  static constexpr uint64_t kNone = UINT64_MAX;  // no mark: no wait has begun

  // Returns the time so far: the mark of a wait that begins now. in_flight: a transition is under
  // way, whose end may free the memory that is waited for.
  uint64_t look(uint64_t now_ns, bool in_flight) {
    if (now_ns > looked_ && !in_flight) lived_ += std::min(now_ns - looked_, kSlice);
    looked_ = std::max(looked_, now_ns);
    return lived_;
  }
  // Something was read, written or evicted, or memory was given back.
  void made() { made_ = lived_; }
  // Whether a wait since `mark` is over: nothing went on for `limit_ns`.
  bool over(uint64_t mark, uint64_t limit_ns) const { return waited(std::max(mark, made_)) >= limit_ns; }
  uint64_t waited(uint64_t mark) const { return lived_ - mark; }

 private:
  uint64_t looked_ = 0, lived_ = 0, made_ = 0;
};

// Knows how long waits have lasted, and what may still end them.
class WaitClock {
 public:
  virtual uint64_t look(uint64_t now_ns) = 0;  // returns the mark of a wait that begins
  virtual bool hopeless(uint64_t mark) = 0;    // nothing went on for the whole time-out, and nothing can

 protected:
  ~WaitClock() = default;
};

}  // namespace vmem::pager
