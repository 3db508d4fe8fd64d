// Where a test program puts parts of its own into a runtime that is built. The library's own functions (test_hooks.cpp)
// change nothing; a test program is linked with tests/common/hooks.cpp, whose functions stand before them.
#pragma once

#include <memory>

#include "core/status.h"
#include "device/device.h"
#include "store/io.h"
#include "trap/trap.h"

namespace vmem::api {

void adjust_trap(trap::UserfaultOptions* options);
std::unique_ptr<store::Engine> wrap_engine(std::unique_ptr<store::Engine> engine);
// In place of settings device and device_block_size: true when it has answered, with *out or *status.
bool replace_devices(size_t unit, std::unique_ptr<device::Devices>* out, core::Status* status);

}  // namespace vmem::api
