#include "device/paging_words.h"

#include <cerrno>

#include "device/device.h"

namespace vmem::device {

core::Status no_paging_words() {
  return core::error(EOPNOTSUPP,
                     "kernels can ask for blocks only where libvmem maps them for the device itself: set device to "
                     "handles (VMEM_DEVICE=handles) before the first region");
}

core::Status Devices::make_paging_words(int, uint32_t, uint32_t, std::unique_ptr<PagingWords>*) {
  return no_paging_words();
}

}  // namespace vmem::device
