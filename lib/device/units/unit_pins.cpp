// Pins host memory that devices copy to and from.
#include <cerrno>
#include <cstdint>
#include <iterator>
#include <mutex>
#include <new>

#include "core/outside_lock.h"
#include "core/types.h"
#include "device/units/units.h"

namespace vmem::device {

Status UnitDevices::pin(void* frames, size_t size) {
  core::must_be_outside("Devices::pin");
  const auto base = reinterpret_cast<uintptr_t>(frames);
  if (base == 0 || size == 0 || base % core::kPage != 0 || size % core::kPage != 0)
    return error(EINVAL, "pinning %#zx bytes at %p: both must be multiples of 4 KiB", size, frames);
  {
    std::lock_guard lock(pin_mutex_);
    auto next = pins_.lower_bound(base);
    if ((next != pins_.end() && next->first - base < size) ||
        (next != pins_.begin() && base - std::prev(next)->first < std::prev(next)->second))
      return error(EEXIST, "pinning %#zx bytes at %p: some are pinned already", size, frames);
    try {
      pins_[base] = size;
    } catch (const std::bad_alloc&) {
      return error(ENOMEM, "no memory to record %#zx bytes of pinned memory", size);
    }
  }
  Status status = backend_pin(frames, size);
  if (!status.ok()) {
    std::lock_guard lock(pin_mutex_);
    pins_.erase(base);
  }
  return status;
}

Status UnitDevices::unpin(void* frames) {
  core::must_be_outside("Devices::unpin");
  const auto base = reinterpret_cast<uintptr_t>(frames);
  {
    std::lock_guard lock(pin_mutex_);
    if (!pins_.contains(base)) return error(EINVAL, "unpinning %p: it is not the start of pinned memory", frames);
  }
  Status status = backend_unpin(frames);
  if (status.ok()) {
    std::lock_guard lock(pin_mutex_);
    pins_.erase(base);
  }
  return status;
}

}  // namespace vmem::device
