// Prefetches blocks to a location when there is time, now or when a stream gets there. The device's
// workers carry out what concerns blocks on a device.
//
// - No call relies on a hint. A hint is dropped if its queue is full, and one that fails has begun
//   nothing.
// - A hint that sends blocks elsewhere takes them out of older hints that want them on a device.
// - The ticket of a hint is destroyed without the lock, whatever becomes of its region.
#pragma once

#include "pager/account/device_queues.h"
#include "pager/threads/device_workers.h"

namespace vmem::pager {

class Prefetch final : private Shared, public DeviceWorkers::Above {
 public:
  // devices: null if there is no device tier. queues, reclaim_requests: under the lock.
  Prefetch(const Shared& shared, device::Devices* devices, DeviceQueues& queues, ReclaimRequests& reclaim_requests,
           DeviceSet& gpus, MemoryPressure& pressure, PageIn& page_in, Readahead& read_ahead, StreamReleases& releases,
           Demoter& demoter, Promoter& promoter)
      : Shared(shared),
        devices_(devices),
        queues_(queues),
        reclaim_requests_(reclaim_requests),
        device_set_(gpus),
        pressure_(pressure),
        page_in_(page_in),
        read_ahead_(read_ahead),
        releases_(releases),
        demoter_(demoter),
        promoter_(promoter) {}

  // stream: prefetch when it gets there; null: now.
  core::Status prefetch(const void* ptr, size_t size, int location, void* stream) VMEM_UNLOCKED;

  // For the workers.
  bool serve_stream_hints(Lock& lock) VMEM_LOCKED override;
  bool serve_demotion(Lock& lock) VMEM_LOCKED override;
  bool hints_wait_for_streams() VMEM_LOCKED override { return !queues_.stream_hints.empty(); }

 private:
  core::Status mark_stream(void* stream, int location, device::Ticket* out) VMEM_UNLOCKED;
  core::Status start(const BlockSpan& span, int location, DeferredWork& after) VMEM_LOCKED;
  core::Status start_to_device(const BlockSpan& span, int device, DeferredWork& after) VMEM_LOCKED;

  device::Devices* const devices_;
  DeviceQueues& queues_;
  ReclaimRequests& reclaim_requests_;
  DeviceSet& device_set_;
  MemoryPressure& pressure_;
  PageIn& page_in_;
  Readahead& read_ahead_;
  StreamReleases& releases_;
  Demoter& demoter_;
  Promoter& promoter_;
};

}  // namespace vmem::pager
