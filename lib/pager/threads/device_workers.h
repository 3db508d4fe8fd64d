// The workers of the device tier: threads that make the calls of devices which wait, each one piece of work after the
// other, and sleep while there is none. Which work there is the classes below them know; here is its order.
//
//   what arrives may wait for as long as a device is busy: never all of them are at it, nor the last but one twice in a
//   row, for the CPU and those that lack room wait for what leaves
//   one that sleeps was told of nothing since it looked, or looks again by itself: at what streams and drivers do
//   nobody tells
//
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
  static constexpr size_t kLook = 128;   // blocks that a driver is asked about at a time, 5 to 10 us each
  static constexpr size_t kPass = 8192;  // .. and passed over under the lock, most of them elsewhere

  // What hints ask of them. Locked on entry and on return, and not meanwhile; false: there is nothing to be done.
  class Above {
   public:
    virtual bool serve_stream_hints(Lock& lock) VMEM_LOCKED = 0;
    virtual bool serve_demotion(Lock& lock) VMEM_LOCKED = 0;
    virtual bool hints_wait_for_streams() VMEM_LOCKED = 0;

   protected:
    ~Above() = default;
  };

  // devices: null: there is no device tier, and there are no workers. requests: for promotion; under the lock.
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
  unsigned arriving_ VMEM_GUARDED_BY(core::big_lock) = 0;  // at what arrives
  // .. the last that may be at it has ended something, and begins something next
  bool ended_last_ VMEM_GUARDED_BY(core::big_lock) = false;
  size_t next_turn_ VMEM_GUARDED_BY(core::big_lock) = 0;  // whose it is to arrive: of two a device
  // For host pages of the driver: when last, from where.
  uint64_t looked_ns_ VMEM_GUARDED_BY(core::big_lock) = 0;
  unsigned unused_looks_ VMEM_GUARDED_BY(core::big_lock) = 0;  // how often staging frames were found that none needs
  uint64_t look_at_ VMEM_GUARDED_BY(core::big_lock) = 0;
};

}  // namespace vmem::pager
