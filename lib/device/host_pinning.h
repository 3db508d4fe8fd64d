// Pins host memory for devices. device.h has the rules for callers.
#pragma once

#include <cstddef>

#include "core/status.h"

namespace vmem::device {

class HostPinning {
 public:
  // Pins host memory for copies at full speed, for all devices. kPage-aligned; stays the caller's.
  // Blocks. If unpin() fails the memory stays pinned: do not give its addresses to others.
  virtual core::Status pin(void* frames, size_t size) = 0;
  virtual core::Status unpin(void* frames) = 0;

 protected:
  ~HostPinning() = default;
};

}  // namespace vmem::device
