#include "pager/block/location.h"

#include <cerrno>

#include "vmem/vmem.h"

namespace vmem::pager {

core::Status check_location(int location, size_t devices, bool allow_ssd) {
  if (location == VMEM_HOST || (allow_ssd && location == VMEM_SSD)) return {};
  if (location >= 0 && static_cast<size_t>(location) < devices) return {};
  if (location >= 0 && devices != 0) {
    return error(ENODEV, "there is no device %d: this process has %zu", location, devices);
  }
  if (location >= 0) {
    return error(ENODEV, "there is no device %d: no device tier is in use (setting device, or no GPU and driver)",
                 location);
  }
  return error(EINVAL, "location %d is not accepted here; give a device ordinal, VMEM_HOST%s", location,
               allow_ssd ? " or VMEM_SSD" : "");
}

}  // namespace vmem::pager
