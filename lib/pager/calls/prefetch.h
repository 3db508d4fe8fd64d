// Prefetch: where blocks are to be, when there is time for it. Now, or when a stream gets there; what is asked of a
// device's blocks its workers do.
//
//   a hint does nothing that anybody relies on: one that finds its queue full is dropped, and one that fails has begun
//   nothing
//   what asks blocks elsewhere takes them out of older hints that want them on a device
//   the ticket of a hint ends without the lock, whatever becomes of its region
//
#pragma once

#include "pager/account/device_queues.h"
#include "pager/threads/device_workers.h"

namespace vmem::pager {

class Prefetch final : private Shared, public DeviceWorkers::Above {
 public:
  // devices: null: there is no device tier. queues, evict_requests: under the lock.
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

  // stream: when it gets there; null: now.
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
