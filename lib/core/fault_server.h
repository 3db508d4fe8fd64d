// Marks the thread that serves faults, which must never wait for a fault.
//
// The program may drop a page of a region at any moment. Another library thread that reads the page
// only waits; this one would stop for good, and every fault with it. So it never reads the memory
// of a region, nor lets the kernel read it on its behalf. may_wait_for_a_fault() stands before each
// such read, so a test that gets there on the wrong thread fails even if the pages are present.
#pragma once

namespace vmem::core {

inline constinit thread_local bool serves_faults = false;

// Marks this thread during its scope.
class ServesFaults {
 public:
  ServesFaults() { serves_faults = true; }
  ~ServesFaults() { serves_faults = false; }
  ServesFaults(const ServesFaults&) = delete;
  ServesFaults& operator=(const ServesFaults&) = delete;
};

// Reports such a read, as called_under_big_lock() does: aborts if strict (core/outside_lock.h),
// otherwise logs it once.
void would_wait_for_itself(const char* what);

inline void may_wait_for_a_fault(const char* what) {
  if (serves_faults) [[unlikely]]
    would_wait_for_itself(what);
}

}  // namespace vmem::core
