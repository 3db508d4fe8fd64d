// The registry of device backends, which setting device names. A new backend needs its own folder
// with a Backend, a row in backend.cpp and a row in docs/device-tier.md; device/units has what all
// of them share, and tests/unit/ram is the shortest one.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "core/status.h"
#include "device/device.h"

namespace vmem::device {

struct Backend {
  const char* name;  // value of setting device
  bool automatic;    // settings auto and cuda try it, in the order of the registry
  // Ok, or -ENODEV and why this library does not have the backend. Null: it has.
  core::Status (*available)();
  // Makes the devices, with units of `unit` bytes if it can. -ENODEV and the reason if the machine
  // has none for this backend: it first tries one unit. A backend of CpuView::unified installs its
  // CpuGate.
  core::Status (*make)(size_t unit, std::unique_ptr<Devices>* out);
};

// The other values of setting device.
inline constexpr std::string_view kAutomatic = "auto";  // the first automatic backend that works, or none
inline constexpr std::string_view kNone = "none";       // no device tier

// All backends, in order of preference.
std::span<const Backend* const> backends();

// Adds a backend that is not part of the library, such as a test's, at the end of the registry. No
// other thread may use the registry while an object of this class is made or destroyed.
class BackendRegistration {
 public:
  explicit BackendRegistration(const Backend& backend);
  ~BackendRegistration();
  BackendRegistration(const BackendRegistration&) = delete;
  BackendRegistration& operator=(const BackendRegistration&) = delete;
};

// Makes the devices of this setting. -EINVAL: the backend has no units of `unit` bytes.
// - auto: the preferred automatic backend, else another; *why says why not the first. If none works
//   the call succeeds, *out is null and *why says why there is no device tier.
// - cuda: the same, but the reason is an error. The name of a backend: that one, or an error.
core::Status make_devices(std::string_view setting, size_t unit, std::unique_ptr<Devices>* out, std::string* why);
// As above, from this registry.
core::Status make_devices(std::string_view setting, size_t unit, std::span<const Backend* const> registry,
                          std::unique_ptr<Devices>* out, std::string* why);

}  // namespace vmem::device
