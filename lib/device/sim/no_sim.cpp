// Replaces sim_*.cpp in a library without the simulated device, which is for tests.
#include <errno.h>

#include "core/status.h"
#include "device/backend.h"

namespace vmem::device {

namespace {

core::Status missing(const char* name) {
  return core::error(ENODEV,
                     "setting device is %s, but this libvmem was built without the simulated device (make SIM=yes has "
                     "it, and so has the Python wheel)",
                     name);
}

}  // namespace

extern const Backend sim_backend, sim_handles_backend;
const Backend sim_backend = {"sim", false, [] { return missing("sim"); }, nullptr};
const Backend sim_handles_backend = {"sim-handles", false, [] { return missing("sim-handles"); }, nullptr};

}  // namespace vmem::device
