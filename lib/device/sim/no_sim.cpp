// Replaces sim_device.cpp in a library without the simulated device, which is for tests.
#include <errno.h>

#include "device/sim/sim_device.h"

namespace vmem::device {

core::Status make_sim_devices(bool handles, size_t, std::unique_ptr<Devices>*) {
  return core::error(ENODEV,
                     "setting device is %s, but this libvmem was built without the simulated device (make SIM=yes has "
                     "it, and so has the Python wheel)",
                     handles ? "sim-handles" : "sim");
}

}  // namespace vmem::device
