// Worker threads of the device tier. They make the device calls that wait, one piece of work after
// the other, and sleep while there is none. The classes below know which work there is. This class
// decides the order.
//
// - A worker that handles arrivals may wait for as long as a device is busy. At least one worker
//   stays free of them, since CPU faults and blocks that lack room wait for departures. The last
//   worker that may handle arrivals alternates between ending copies and beginning copies.
// - A sleeping worker has had no notification since its last look, or it polls: streams and drivers
//   send none.
#pragma once

#include <thread>
#include <vector>

#include "pager/calls/calls.h"

namespace vmem::pager {

struct Calls;
struct DeviceTier;
struct HostTier;
struct LeaseRoom;

class DeviceWorkers {
 public:
  DeviceWorkers(PagerContext& ctx, Calls& calls);

  core::Status start() VMEM_UNLOCKED;
  void stop() VMEM_UNLOCKED;

 private:
  void loop() VMEM_UNLOCKED;
  bool step(Lock& lock) VMEM_LOCKED;
  bool bring_what_is_ready(Lock& lock) VMEM_LOCKED;
  bool end_what_waits(Lock& lock) VMEM_LOCKED;
  void reclaim_host_pages(Lock& lock) VMEM_LOCKED;
  void look_at_memory(Lock& lock) VMEM_LOCKED;
  bool on_touch(uintptr_t address, bool store) VMEM_UNLOCKED;

  PagerContext& ctx_;
  Calls& calls_;
  HostTier& host_;
  LeaseRoom& leases_;
  DeviceTier& tier_;
  std::vector<std::thread> threads_;
  bool stop_ VMEM_GUARDED_BY(core::big_lock) = false;
  unsigned arriving_ VMEM_GUARDED_BY(core::big_lock) = 0;  // workers that handle arrivals
  // The last worker that may handle arrivals has ended a copy, so it begins one next.
  bool ended_last_ VMEM_GUARDED_BY(core::big_lock) = false;
  size_t next_turn_ VMEM_GUARDED_BY(core::big_lock) = 0;       // next source of arrivals; each device has two
  uint64_t looked_ns_ VMEM_GUARDED_BY(core::big_lock) = 0;     // when loop() last looked around
  unsigned unused_looks_ VMEM_GUARDED_BY(core::big_lock) = 0;  // looks in a row that found unused staging frames
  uint64_t look_at_ VMEM_GUARDED_BY(core::big_lock) = 0;       // address where the scan for host pages goes on
};

}  // namespace vmem::pager
