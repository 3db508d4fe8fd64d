// Releases: of leases at devices, which end when the stream gets to where they were released, and of those at the host,
// which end at once. And who waits for that: an acquire that they are in the way of, a call that wants a region quiet.
//
//   a lease at a device is ending from its release until its stream was seen to have got there, its device is lost, or
//   its region goes; until then StreamReleaseQueue has the release, and the regions' tables have what it ends
//   nothing of ours is kept while a driver is asked: streams may be held for as long as their owner likes
//
// Called under the pager's lock, which is dropped while a driver is asked, but for what says otherwise.
#pragma once

#include <array>
#include <list>
#include <span>
#include <string>

#include "device/device.h"
#include "pager/account/cpu_mappings.h"
#include "pager/account/device_queues.h"
#include "pager/lease/acquire_request.h"
#include "pager/lease/lease_manager.h"
#include "pager/lease/stream_release_queue.h"
#include "pager/tier/staging_allocator.h"

namespace vmem::pager {

class StreamReleases : private Shared {
 public:
  static constexpr uint64_t kSoon = 250'000'000;  // ns

  // queues, shown: who may wait for leases to end; under the lock.
  StreamReleases(const Shared& shared, device::Devices* devices, const DeviceQueues& queues,
                 const CpuMappings& cpu_mappings, DeviceSet& gpus, LeaseManager& grants, MemoryPressure& pressure,
                 MemoryWaits& waits, StagingAllocator& supply)
      : Shared(shared),
        devices_(devices),
        queues_(queues),
        cpu_mappings_(cpu_mappings),
        device_set_(gpus),
        grants_(grants),
        pressure_(pressure),
        waits_(waits),
        supply_(supply) {}

  // Unlocked. Leases of `stream`, each of the ranges once; those at devices end when `end` gets to here.
  // knows_access: the ranges have that of the acquires which are ended.
  core::Status release(std::span<const vmem_range> ranges, void* stream, void* end, bool knows_access) VMEM_UNLOCKED;

  // Ends the releases whose streams have got there. Any number of threads may be here at once, and one that does not
  // come back keeps nobody.
  void reap(Lock& lock) VMEM_LOCKED;
  // Until nobody else's lease is in the way of one at `location`, and there is room for it (devices; `apart`: each
  // block once). Both are found under one hold of the lock, in which the caller takes the lease: what was found before
  // it was dropped is worth nothing.
  core::Status wait_for_turn(Lock& lock, std::span<const BlockSpan> spans, std::span<const BlockSpan> apart,
                             int location, const AcquireRequest* ask) VMEM_LOCKED;
  // Until no release of the region's leases is under way; does not wait for live ones.
  void wait_for_region(Lock& lock, Region& r, RangeScan* scan = nullptr) VMEM_LOCKED;
  // *wait: blocks of the spans are stale at their device, and are about to leave it. -EBUSY: live leases keep one.
  core::Status check_device_stale(std::span<const BlockSpan> spans, bool* wait) VMEM_LOCKED;

  bool empty() const VMEM_LOCKED { return pending_.empty(); }
  // Some of device d are under way, and its streams get to them: the last one ended, or the oldest was made, less than
  // kSoon ago. Who can wait for their room does not take what is to stay.
  bool end_soon(int d, uint64_t now_ns) const VMEM_LOCKED;
  // The region goes.
  void forget(const Region& r) VMEM_LOCKED { pending_.forget(r); }
  // Tests: what is wrong; empty: nothing.
  std::string check() const VMEM_LOCKED { return pending_.check(); }

 private:
  void add(Lock& lock, std::span<const BlockSpan> spans, void* end, std::list<PendingRelease>* made,
           std::vector<PendingRelease*>* mine) VMEM_LOCKED;
  core::Status record(PendingRelease& ending, std::list<PendingRelease>* over) VMEM_UNLOCKED;
  bool a_worker_waits() VMEM_LOCKED;
  void forget_saved(const PendingRelease& ending) VMEM_LOCKED;
  core::Status check_pending(std::span<const BlockSpan> spans, int location, bool* wait) VMEM_LOCKED;
  core::Status check_room(std::span<const BlockSpan> spans, int d, bool* wait) VMEM_LOCKED;

  device::Devices* const devices_;
  const DeviceQueues& queues_;
  const CpuMappings& cpu_mappings_;
  DeviceSet& device_set_;
  LeaseManager& grants_;
  MemoryPressure& pressure_;
  MemoryWaits& waits_;
  StagingAllocator& supply_;
  StreamReleaseQueue pending_ VMEM_GUARDED_BY(core::big_lock);
  std::array<uint64_t, device::kMaxDevices> ended_ns_ VMEM_GUARDED_BY(core::big_lock) = {};  // the last one
};

}  // namespace vmem::pager
