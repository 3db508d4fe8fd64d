// Replaces lib/device/cuda and the CUDA part of lib/device/managed in a library that is built without
// the CUDA toolkit.
#include <errno.h>

#include "core/status.h"
#include "device/backend.h"

namespace vmem::device {

namespace {

core::Status missing() {
  return core::error(ENODEV, "this libvmem was built without the CUDA toolkit");
}

}  // namespace

extern const Backend handles_backend, managed_backend;
const Backend handles_backend = {"handles", true, missing, nullptr};
const Backend managed_backend = {"managed", true, missing, nullptr};

}  // namespace vmem::device
