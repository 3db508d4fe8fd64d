// The thread that serves faults: it must wait for none itself. What another thread of ours would merely wait for, a
// page of a region that the program has dropped just then, would stop this one for good, and every fault with it. So it
// never reads the memory of a region, nor has the kernel read it in its name; may_wait_for_a_fault() stands wherever
// that is done, so that any test that comes by on the wrong thread shows it, whatever the program does with its pages.
#pragma once

namespace vmem::core {

inline constinit thread_local bool serves_faults = false;

// For as long as it lives, this thread is the one.
class ServesFaults {
 public:
  ServesFaults() { serves_faults = true; }
  ~ServesFaults() { serves_faults = false; }
  ServesFaults(const ServesFaults&) = delete;
  ServesFaults& operator=(const ServesFaults&) = delete;
};

// As of calls under a big lock: ends the process with a message where that is asked for (core/big_lock.h), and is named
// in the log, once, in production.
void would_wait_for_itself(const char* what);

inline void may_wait_for_a_fault(const char* what) {
  if (serves_faults) [[unlikely]]
    would_wait_for_itself(what);
}

}  // namespace vmem::core
