// Makes the CUDA backends on the stock driver: unified memory, and physical handles. Needs the CUDA
// toolkit at build time.
#pragma once

#include <memory>

#include "device/device.h"

namespace vmem::device {

// -ENODEV with the reason: no driver, no device, or a driver on which a destroyed part of a managed
// range cannot be made again. -EBUSY: the process has CUDA devices already.
core::Status make_cuda_devices(std::unique_ptr<Devices>* out);
// The same on physical handles: CpuView::split, units of kUnit to kLargestUnit bytes, a power of
// two. -ENODEV also if the driver, or every device, lacks virtual memory management.
core::Status make_cuda_handles(size_t unit, std::unique_ptr<Devices>* out);

}  // namespace vmem::device
