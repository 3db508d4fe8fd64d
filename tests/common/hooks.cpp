#include "common/hooks.h"

#include <utility>

namespace vmem::api {

TestHooks& test_hooks() {
  static TestHooks* hooks = new TestHooks;
  return *hooks;
}

// Replaces the library's own (lib/api/test_hooks.cpp).
void adjust_trap(trap::UserfaultOptions* options) {
  if (test_hooks().adjust_trap) test_hooks().adjust_trap(*options);
}

std::unique_ptr<store::Engine> wrap_engine(std::unique_ptr<store::Engine> engine) {
  if (!test_hooks().wrap_engine) return engine;
  return test_hooks().wrap_engine(std::move(engine));
}

bool replace_devices(size_t unit, std::unique_ptr<device::Devices>* out, core::Status* status) {
  if (!test_hooks().make_devices) return false;
  *status = test_hooks().make_devices(unit, out);
  return true;
}

}  // namespace vmem::api
