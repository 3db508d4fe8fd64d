// Which body there is.
#include <errno.h>

#include "device/cuda_device.h"
#include "device/device.h"
#include "device/sim_device.h"

namespace vmem::device {

core::Status make_devices(Kind kind, std::unique_ptr<Devices>* out, std::string* why) {
  out->reset();
  why->clear();
  switch (kind) {
    case Kind::none:
      *why = "the device tier is switched off (setting device)";
      return {};
    case Kind::sim:
      return make_sim_devices(out);
    case Kind::cuda:
    case Kind::automatic:
      break;
  }
#ifdef VMEM_HAVE_CUDA
  core::Status status = make_cuda_devices(out);
#else
  core::Status status = core::error(ENODEV, "this libvmem was built without the CUDA toolkit");
#endif
  if (status.ok()) return {};
  *why = status.text();
  if (kind == Kind::cuda) return status;
  return {};
}

}  // namespace vmem::device
