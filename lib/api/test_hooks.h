// Lets a test program put parts of its own into the runtime. The library's functions
// (test_hooks.cpp) change nothing; tests/common/hooks.cpp replaces them when a test program is
// linked.
#pragma once

#include <memory>

#include "core/status.h"
#include "device/device.h"
#include "store/engine.h"
#include "trap/trap.h"

namespace vmem::api {

void adjust_trap(trap::UserfaultOptions* options);
std::unique_ptr<store::Engine> wrap_engine(std::unique_ptr<store::Engine> engine);
// Replaces the settings device and device_block_size. Returns true if it did, with *out or *status
// set.
bool replace_devices(size_t unit, std::unique_ptr<device::Devices>* out, core::Status* status);

}  // namespace vmem::api
