// Acquires that somebody asks for and does not wait in: what is checked on the asker's thread, and what keeps their
// regions until the acquire begins.
//
//   Region::asked counts the ranges in it of asks that were not withdrawn
//
#pragma once

#include "pager/account/device_set.h"
#include "pager/account/shared.h"
#include "pager/lease/acquire_request.h"

namespace vmem::pager {

class AcquireRequests : private Shared {
 public:
  // devices: null: there is no device tier.
  AcquireRequests(const Shared& shared, const device::Devices* devices, DeviceSet& gpus)
      : Shared(shared), devices_(devices), device_set_(gpus) {}

  // May work of the device be ordered with the stream? There is none at the host.
  Status check_stream(int location, void* stream) VMEM_UNLOCKED;
  // On the thread that names the stream: what "the default stream" is may depend on it.
  Status ask(std::span<const vmem_range> ranges, int location, void* stream, AcquireRequest* ask) VMEM_UNLOCKED;
  // Of ask() with the same ranges. The regions may be freed, and so they may have been by shutdown.
  void withdraw(std::span<const vmem_range> ranges, AcquireRequest* ask) VMEM_UNLOCKED;
  // Whoever waits looks whether it was cancelled.
  void wake() VMEM_UNLOCKED;

 private:
  const device::Devices* const devices_;
  DeviceSet& device_set_;
};

}  // namespace vmem::pager
