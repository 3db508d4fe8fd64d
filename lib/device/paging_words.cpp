#include "device/paging_words.h"

#include <cerrno>

#include "device/device.h"

namespace vmem::device {

core::Status Devices::make_paging_words(int, uint32_t, uint32_t, std::unique_ptr<PagingWords>*) {
  return core::error(EOPNOTSUPP,
                     "kernels can ask for blocks only where libvmem maps them for the device itself: set device to "
                     "handles (VMEM_DEVICE=handles) before the first region");
}

}  // namespace vmem::device
