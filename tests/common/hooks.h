// Hooks by which a test changes the next runtime that is built.
#pragma once

#include <functional>
#include <memory>

#include "api/test_hooks.h"

namespace vmem::api {

struct TestHooks {
  std::function<std::unique_ptr<store::Engine>(std::unique_ptr<store::Engine>)> wrap_engine;
  std::function<void(trap::UserfaultOptions&)> adjust_trap;
  std::function<core::Status(size_t unit, std::unique_ptr<device::Devices>*)> make_devices;  // replaces setting device
};
TestHooks& test_hooks();

}  // namespace vmem::api
