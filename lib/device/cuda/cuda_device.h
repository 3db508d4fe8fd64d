// Makes the CUDA backend on physical handles, with the stock driver. Needs the CUDA toolkit at build
// time.
#pragma once

#include <memory>

#include "device/device.h"

namespace vmem::device {

// CpuView::split, units of kUnit to kLargestUnit bytes, a power of two. -ENODEV with the reason: no
// driver, no device, or the driver or every device lacks virtual memory management. -EBUSY: the
// process has CUDA devices already.
core::Status make_cuda_handles(size_t unit, std::unique_ptr<Devices>* out);

}  // namespace vmem::device
