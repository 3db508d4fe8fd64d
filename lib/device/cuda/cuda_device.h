// The CUDA backends, on the stock driver: its unified memory, and physical handles. Only with the CUDA toolkit at build
// time.
#pragma once

#include <memory>

#include "device/device.h"

namespace vmem::device {

// -ENODEV with the reason: no driver, no device, a driver on which a destroyed part of a managed
// range cannot be made again. One at a time: -EBUSY.
core::Status make_cuda_devices(std::unique_ptr<Devices>* out);
// On physical handles: CpuView::split, in units of kUnit to kLargestUnit bytes, a power of two. -ENODEV also: a
// driver, or devices, without virtual memory management.
core::Status make_cuda_handles(size_t unit, std::unique_ptr<Devices>* out);

}  // namespace vmem::device
