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

#include "pager/tier/copy_in.h"
#include "pager/tier/cpu_mapper.h"
#include "pager/tier/device_reclaim.h"
#include "pager/tier/pipelined_copy.h"
#include "pager/tier/promoter.h"

namespace vmem::pager {

class DeviceWorkers : private Shared {
 public:
  static constexpr size_t kLook = 128;   // blocks in one round of queries to the driver, some microseconds each
  static constexpr size_t kPass = 8192;  // blocks passed over under one hold of the lock; most are elsewhere

  // Work for the workers that Prefetch knows of. The serve functions drop and retake the lock. They
  // return false if there is nothing to do.
  class Above {
   public:
    virtual bool serve_stream_hints(Lock& lock) VMEM_LOCKED = 0;
    virtual bool serve_demotion(Lock& lock) VMEM_LOCKED = 0;
    virtual bool hints_wait_for_streams() VMEM_LOCKED = 0;

   protected:
    ~Above() = default;
  };

  // devices: null if there is no device tier; then there are no workers. requests: promotion
  // requests, protected by the lock.
  DeviceWorkers(const Shared& shared, device::Devices* devices, const PooledList<PromotionRequest>& requests,
                DeviceSet& gpus, CpuMappings& cpu_mappings, DeviceBlocks& blocks, PageIn& page_in,
                StagingAllocator& supply, StreamReleases& releases, PeerMigrator& migrator, Demoter& demoter,
                PipelinedCopy& pipelined_copy, Promoter& promoter, CopyIn& copy_in, CpuMapper& views,
                DeviceReclaim& device_reclaim, Above& above)
      : Shared(shared),
        devices_(devices),
        requests_(requests),
        device_set_(gpus),
        cpu_mappings_(cpu_mappings),
        blocks_(blocks),
        page_in_(page_in),
        supply_(supply),
        releases_(releases),
        peer_migrator_(migrator),
        demoter_(demoter),
        pipelined_copy_(pipelined_copy),
        promoter_(promoter),
        copy_in_(copy_in),
        cpu_mapper_(views),
        device_reclaim_(device_reclaim),
        above_(above) {}

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

  device::Devices* const devices_;
  const PooledList<PromotionRequest>& requests_;
  DeviceSet& device_set_;
  CpuMappings& cpu_mappings_;
  DeviceBlocks& blocks_;
  PageIn& page_in_;
  StagingAllocator& supply_;
  StreamReleases& releases_;
  PeerMigrator& peer_migrator_;
  Demoter& demoter_;
  PipelinedCopy& pipelined_copy_;
  Promoter& promoter_;
  CopyIn& copy_in_;
  CpuMapper& cpu_mapper_;
  DeviceReclaim& device_reclaim_;
  Above& above_;

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
