#include "device/cuda_device.h"

#include <errno.h>

namespace vmem::device {

core::Status make_cuda_devices(std::unique_ptr<Devices>* out) {
  out->reset();
  return core::error(ENODEV, "this libvmem was built without CUDA");
}

}  // namespace vmem::device
