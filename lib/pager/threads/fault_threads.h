// The threads that serve faults. With a trap that can, these are the threads that make them. Otherwise
// an I/O thread reads the trap's events if the engine watches the trap's descriptor, else the fault
// thread does. The renewing thread keeps a trap that has a deadline from giving accesses up.
#pragma once

#include <atomic>
#include <thread>

#include "pager/account/context.h"
#include "pager/host/fault_handler.h"

namespace vmem::pager {

class FaultThreads {
 public:
  FaultThreads(PagerContext& ctx, FaultHandler& faults);

  // start() begins to serve faults. stop_renewing() tells the renewing thread to end. stop()
  // returns when faults are no longer served.
  core::Status start() VMEM_UNLOCKED;
  void stop_renewing() VMEM_LOCKED;
  void stop() VMEM_UNLOCKED;

 private:
  void loop() VMEM_UNLOCKED;
  void renew_loop() VMEM_UNLOCKED;
  static void events_ready(void* self);
  static bool fault_here(const trap::Fault& fault, void* self);

  PagerContext& ctx_;
  FaultHandler& faults_;
  std::thread reads_, renews_;
  bool stop_renewing_ VMEM_GUARDED_BY(core::big_lock) = false;
  std::atomic<bool> stop_{false};
  bool watching_ = false;  // the engine's threads serve faults, and there is no thread for them
};

}  // namespace vmem::pager
