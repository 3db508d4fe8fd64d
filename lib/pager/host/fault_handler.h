// Serves faults: takes the trap's events, says what each means in the state that its block is in, and answers at once
// what can be answered; the rest PageIn and the Installer do. Events are read on an I/O thread where the engine watches
// the trap's descriptor, else on a thread of this class.
//
//   none is forgotten: a fault is answered here; or its block is marked kFaultPending, and somebody owns its transition
//   or waits for memory for it; or it is among CpuMappings' accesses, or FailedBlocks' retries
//
// The pager's lock protects it.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <thread>

#include "core/big_lock.h"
#include "pager/account/cpu_mappings.h"
#include "pager/account/shared.h"
#include "pager/host/page_in.h"
#include "pager/host/readahead.h"
#include "pager/host/reclaim_requests.h"

namespace vmem::pager {

class FaultHandler : private Shared {
 public:
  // What is asked of those above, unlocked.
  class Above {
   public:
    virtual void tunables_changed() VMEM_UNLOCKED = 0;  // of the module

   protected:
    ~Above() = default;
  };

  // devices: wait for accesses of blocks that are there.
  FaultHandler(const Shared& shared, MemoryPressure& pressure, FailedBlocks& failed, MemoryWaits& waits,
               Installer& installer, PageIn& page_in, Readahead& read_ahead, ReclaimRequests& reclaim_requests,
               CpuMappings& cpu_mappings, core::EventCount& devices, Above& above)
      : Shared(shared),
        pressure_(pressure),
        failed_(failed),
        waits_(waits),
        installer_(installer),
        page_in_(page_in),
        read_ahead_(read_ahead),
        reclaim_requests_(reclaim_requests),
        cpu_mappings_(cpu_mappings),
        devices_(devices),
        above_(above) {}

  // Unlocked. From here on faults are served. stop_renewing() locked: the thread that renews ends soon; stop(): no
  // fault is served any more.
  core::Status start() VMEM_UNLOCKED;
  void stop_renewing() VMEM_LOCKED;
  void stop() VMEM_UNLOCKED;

  // Locked. A trap gives up accesses that are not answered for so long, unless their time begins anew; 0: it does not.
  void set_deadline(unsigned ms) VMEM_LOCKED;

 private:
  void loop() VMEM_UNLOCKED;
  void renew_loop() VMEM_UNLOCKED;
  void renew(const Region& r, core::BlockIndex b) VMEM_LOCKED;
  bool serve_events(int timeout_ms) VMEM_UNLOCKED;
  static void events_ready(void* self);
  void on_fault(const trap::Fault& fault, uint64_t now, DeferredWork& after) VMEM_LOCKED;
  void access_of_dying(Region& r, core::BlockIndex b, const trap::Fault& fault) VMEM_LOCKED;
  void note_access(Region& r, core::BlockIndex b, const trap::Fault& fault, uint64_t now) VMEM_LOCKED;
  bool slow_down(Region& r, core::BlockIndex b, const trap::Fault& fault, uint64_t now) VMEM_LOCKED;
  void met_absent(Region& r, core::BlockIndex b, const trap::Fault& fault, uint16_t wanted,
                  DeferredWork& after) VMEM_LOCKED;
  void met_resident(Region& r, core::BlockIndex b, const trap::Fault& fault) VMEM_LOCKED;
  void met_shut(Region& r, core::BlockIndex b, const core::Status& why) VMEM_LOCKED;
  void met_failed(Region& r, core::BlockIndex b, const trap::Fault& fault) VMEM_LOCKED;
  void fill_hole(Frame& frame, const trap::Fault& fault) VMEM_LOCKED;
  bool met_before(uintptr_t address) VMEM_LOCKED;

  MemoryPressure& pressure_;
  FailedBlocks& failed_;
  MemoryWaits& waits_;
  Installer& installer_;
  PageIn& page_in_;
  Readahead& read_ahead_;
  ReclaimRequests& reclaim_requests_;
  CpuMappings& cpu_mappings_;
  core::EventCount& devices_;
  Above& above_;

  std::thread reads_, renews_;
  std::condition_variable deadline_changed_;
  unsigned deadline_ms_ VMEM_GUARDED_BY(core::big_lock) = 0;
  bool stop_renewing_ VMEM_GUARDED_BY(core::big_lock) = false;
  std::atomic<bool> stop_{false};
  bool watching_ = false;  // the engine's threads serve faults, and there is no thread for them
  // Pages that were reported though nothing was to be done, by a hash of their addresses.
  std::array<uintptr_t, 64> spurious_ VMEM_GUARDED_BY(core::big_lock){};
};

}  // namespace vmem::pager
