// Whether a thread looks for its next completion for a while before it sleeps. To wake a sleeping
// thread takes the kernel some microseconds, as long as a fast disk takes for a page; to look costs a
// core. So the thread looks only while its waits are short, and not while other threads want its
// core. After the halt polling of Linux's KVM (Documentation/virt/kvm/halt-polling.rst).
//
// Pure, but for the look itself. Not thread-safe.
#pragma once

#include <cstdint>

#include "core/clock.h"

namespace vmem::store {

class WaitSpin {
 public:
  static constexpr uint64_t kLongest = 50000;   // ns of one look; a wait that took longer is worth none
  static constexpr uint64_t kGap = 20000;       // ns between two steps of a look: another thread had the core
  static constexpr uint64_t kPause = 10000000;  // ns without a look after a gap

  bool worth_it(uint64_t now_ns) const { return last_ns_ < kLongest && now_ns >= paused_until_ns_; }
  // Ends a wait, with a look or without.
  void waited(uint64_t ns) { last_ns_ = ns; }
  // Two steps of a look in turn. Returns false if the core is wanted: the look ends.
  bool keeps_core(uint64_t before_ns, uint64_t now_ns) {
    if (now_ns - before_ns < kGap) return true;
    paused_until_ns_ = now_ns + kPause;
    return false;
  }

  // Looks until `found` returns true. Returns false if it is time to sleep.
  template <class Found>
  bool look(uint64_t began_ns, const Found& found) {
    for (uint64_t before = began_ns;;) {
      if (found()) return true;
      const uint64_t now = core::now_ns();
      if (now - began_ns >= kLongest || !keeps_core(before, now)) return false;
      before = now;
    }
  }

 private:
  uint64_t last_ns_ = UINT64_MAX;  // how long the last wait took
  uint64_t paused_until_ns_ = 0;
};

}  // namespace vmem::store
