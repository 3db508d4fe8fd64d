#include "api/test_hooks.h"

namespace vmem::api {

void adjust_trap(trap::UserfaultOptions*) {}

std::unique_ptr<store::Engine> wrap_engine(std::unique_ptr<store::Engine> engine) {
  return engine;
}

bool replace_devices(size_t, std::unique_ptr<device::Devices>*, core::Status*) {
  return false;
}

}  // namespace vmem::api
