// Asynchronous acquires: the checks on the asking thread, and what keeps their regions until the
// acquire returns.
//
// - Region::asked counts the region's ranges of asks that were not withdrawn.
#pragma once

#include "pager/account/context.h"
#include "pager/account/device_set.h"
#include "pager/lease/acquire_request.h"

namespace vmem::pager {

class AcquireRequests {
 public:
  explicit AcquireRequests(PagerContext& ctx);

  // Checks that work of the device may be ordered with the stream. The host has no streams.
  Status check_stream(int location, void* stream) VMEM_UNLOCKED;
  // Call on the thread that names the stream: the meaning of "the default stream" may depend on it.
  Status ask(std::span<const vmem_range> ranges, int location, void* stream, AcquireRequest* ask) VMEM_UNLOCKED;
  // Undoes ask() with the same ranges. Their regions may be freed from here on. Shutdown may have
  // freed them before.
  void withdraw(std::span<const vmem_range> ranges, AcquireRequest* ask) VMEM_UNLOCKED;
  // Wakes the acquires that wait: they check whether they were cancelled.
  void wake() VMEM_UNLOCKED;

 private:
  PagerContext& ctx_;
};

}  // namespace vmem::pager
