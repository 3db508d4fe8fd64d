// Prefetches blocks to a location when there is time, now or when a stream gets there. The device's
// workers carry out what concerns blocks on a device.
//
// - No call relies on a hint. A hint is dropped if its queue is full, and one that fails has begun
//   nothing.
// - A hint that sends blocks elsewhere takes them out of older hints that want them on a device.
// - The ticket of a hint is destroyed without the lock, whatever becomes of its region.
#pragma once

#include "pager/tier/demoter.h"
#include "pager/tier/promoter.h"

namespace vmem::pager {

struct Calls;
struct DeviceTier;
struct HostTier;
struct LeaseRoom;

class Prefetch final {
 public:
  Prefetch(PagerContext& ctx, Calls& calls);

  // stream: prefetch when it gets there; null: now.
  core::Status prefetch(const void* ptr, size_t size, int location, void* stream) VMEM_UNLOCKED;

  // For the workers.
  bool serve_stream_hints(Lock& lock) VMEM_LOCKED;
  bool serve_demotion(Lock& lock) VMEM_LOCKED;
  bool hints_wait_for_streams() VMEM_LOCKED { return !ctx_.queues.stream_hints.empty(); }

 private:
  core::Status mark_stream(void* stream, int location, device::Ticket* out) VMEM_UNLOCKED;
  core::Status start(const BlockSpan& span, int location, DeferredWork& after) VMEM_LOCKED;
  core::Status start_to_device(const BlockSpan& span, int device, DeferredWork& after) VMEM_LOCKED;

  PagerContext& ctx_;
  HostTier& host_;
  LeaseRoom& leases_;
  DeviceTier& tier_;
};

}  // namespace vmem::pager
