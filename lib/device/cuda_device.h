// The CUDA body: unified memory of the stock driver. Without the CUDA toolkit at build time make_cuda_devices() says
// so.
#pragma once

#include <memory>

#include "device/device.h"

namespace vmem::device {

// -ENODEV with the reason: no driver, no device, a driver on which a destroyed part of a managed
// range cannot be made again. One at a time: -EBUSY.
core::Status make_cuda_devices(std::unique_ptr<Devices>* out);
// On physical handles: CpuView::separate. No setting asks for it.
core::Status make_cuda_handles(std::unique_ptr<Devices>* out);

}  // namespace vmem::device
