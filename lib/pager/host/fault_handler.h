// Serves faults: reads the trap's events, decides what a fault means in the state of its block, and
// answers at once what it can. PageIn and Installer do the rest. FaultThreads makes the calls.
//
// No fault is forgotten. Each of them
// - is answered here,
// - marks its block kFaultPending, while a transition of the block has an owner or the block waits
//   for memory, or
// - is in CpuMappings or in FailedBlocks' retries.
//
// The pager's lock protects this class.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>

#include "core/big_lock.h"
#include "pager/account/context.h"
#include "pager/account/cpu_mappings.h"
#include "pager/host/page_in.h"
#include "pager/host/readahead.h"

namespace vmem::pager {

struct HostTier;

class FaultHandler {
 public:
  FaultHandler(PagerContext& ctx, HostTier& host);

  // Serves one round of the trap's events, on one thread at a time. Returns true if there may be
  // more.
  bool serve_events(int timeout_ms) VMEM_UNLOCKED;
  // Serves a fault on the thread that made it, in a signal handler. Returns false if the address is
  // in no region.
  bool serve_here(const trap::Fault& fault) VMEM_UNLOCKED;

  // Sets the time after which the trap gives up an access that is not answered, unless
  // renew_waits() restarts the time. 0: it never gives up.
  void set_deadline(unsigned ms) VMEM_LOCKED;
  unsigned deadline_ms() const VMEM_LOCKED { return deadline_ms_; }
  std::condition_variable& deadline_changed() { return deadline_changed_; }
  // Wakes the threads that wait: they report their accesses again, which restarts their time.
  void renew_waits() VMEM_LOCKED;

 private:
  void renew(const Region& r, core::BlockIndex b) VMEM_LOCKED;
  void on_fault(const trap::Fault& fault, uint64_t now, DeferredWork& after) VMEM_LOCKED;
  void access_of_dying(Region& r, core::BlockIndex b, const trap::Fault& fault) VMEM_LOCKED;
  void note_access(Region& r, core::BlockIndex b, const trap::Fault& fault, uint64_t now) VMEM_LOCKED;
  bool slow_down(Region& r, core::BlockIndex b, const trap::Fault& fault, uint64_t now) VMEM_LOCKED;
  void met_absent(Region& r, core::BlockIndex b, const trap::Fault& fault, uint16_t wanted,
                  DeferredWork& after) VMEM_LOCKED;
  void met_resident(Region& r, core::BlockIndex b, const trap::Fault& fault) VMEM_LOCKED;
  void met_forbidden_ioctl(Region& r, core::BlockIndex b, const core::Status& why) VMEM_LOCKED;
  void met_failed(Region& r, core::BlockIndex b, const trap::Fault& fault) VMEM_LOCKED;
  void fill_hole(Frame& frame, const trap::Fault& fault) VMEM_LOCKED;
  bool met_before(uintptr_t address) VMEM_LOCKED;

  PagerContext& ctx_;
  HostTier& host_;
  std::condition_variable deadline_changed_;
  unsigned deadline_ms_ VMEM_GUARDED_BY(core::big_lock) = 0;
  // Pages that were reported although nothing had to be done, by a hash of their addresses.
  std::array<uintptr_t, 64> spurious_ VMEM_GUARDED_BY(core::big_lock){};
};

}  // namespace vmem::pager
