#include "device/backend.h"

#include <errno.h>

#include <algorithm>
#include <utility>

#include "core/fatal.h"
#include "core/options.h"

namespace vmem::device {

// The registry: a new backend adds a declaration and a row. The order is the order of preference.
extern const Backend handles_backend, managed_backend;  // CUDA (no_cuda.cpp: built without it)
extern const Backend sim_backend, sim_handles_backend;  // simulated (sim/no_sim.cpp: built without it)

namespace {

constexpr size_t kMostBackends = 16;
constinit const Backend* registry_of_process[kMostBackends] = {&handles_backend, &managed_backend, &sim_backend,
                                                               &sim_handles_backend};
size_t count_of_process() {
  return static_cast<size_t>(std::find(registry_of_process, registry_of_process + kMostBackends, nullptr) -
                             registry_of_process);
}

Status make(const Backend& backend, size_t unit, std::unique_ptr<Devices>* out) {
  if (backend.available != nullptr)
    if (Status s = backend.available(); !s.ok()) return s;
  return backend.make(unit, out);
}

// Destroys the devices and returns -EINVAL unless they have units of this size.
Status fits(size_t unit, std::unique_ptr<Devices>* out) {
  const size_t has = (*out)->unit();
  if (has == unit) return {};
  const std::string name = (*out)->name();
  out->reset();
  return error(EINVAL,
               "device_block_size is %s, but the device tier here (%s) has blocks of %s; set device_block_size to that",
               core::human_bytes(unit).c_str(), name.c_str(), core::human_bytes(has).c_str());
}

Status make_named(const Backend& backend, size_t unit, std::unique_ptr<Devices>* out) {
  Status s = make(backend, unit, out);
  if (s.ok()) return fits(unit, out);
  if (!backend.automatic) return s;
  return error(-s.code(),
               "setting device is %s, which is not available here: %.*s; with auto libvmem takes what is available",
               backend.name, static_cast<int>(s.text().size()), s.text().data());
}

}  // namespace

std::span<const Backend* const> backends() {
  return {registry_of_process, count_of_process()};
}

BackendRegistration::BackendRegistration(const Backend& backend) {
  const size_t count = count_of_process();
  if (count + 1 >= kMostBackends) core::fatal("more than %zu device backends", kMostBackends - 1);
  registry_of_process[count] = &backend;
}

BackendRegistration::~BackendRegistration() {
  registry_of_process[count_of_process() - 1] = nullptr;
}

Status make_devices(std::string_view setting, size_t unit, std::span<const Backend* const> registry,
                    std::unique_ptr<Devices>* out, std::string* why) {
  out->reset();
  why->clear();
  if (setting == kNone) {
    *why = "the device tier is switched off (setting device)";
    return {};
  }
  for (const Backend* backend : registry)
    if (setting == backend->name) return make_named(*backend, unit, out);
  if (setting != kAutomatic)
    return error(EINVAL, "there is no device backend \"%.*s\"", static_cast<int>(setting.size()), setting.data());
  Status last;
  std::string each;
  bool differ = false;
  for (const Backend* backend : registry) {
    if (!backend->automatic) continue;
    Status s = make(*backend, unit, out);
    if (s.ok()) {
      *why = std::move(each);
      return fits(unit, out);
    }
    out->reset();
    differ |= !last.ok() && last.text() != s.text();
    each += std::string(each.empty() ? "" : "; ") + backend->name + ": " + std::string(s.text());
    last = std::move(s);
  }
  *why = differ ? std::move(each) : std::string(last.text());  // "no GPU" only once
  return {};
}

Status make_devices(std::string_view setting, size_t unit, std::unique_ptr<Devices>* out, std::string* why) {
  // CUDA's driver loads libraries and opens files that the environment names, also if another user
  // has set it: CUDA_INJECTION64_PATH, NVTX_INJECTION64_PATH and CUDA_CACHE_PATH were seen to work
  // in a set-user-ID program.
  if (setting == kAutomatic && core::has_more_rights()) {
    out->reset();
    *why =
        "this program runs with more rights than the user who started it (AT_SECURE), and CUDA would load code that "
        "the "
        "environment names; clear the environment and set device to handles or managed to use CUDA";
    return {};
  }
  return make_devices(setting, unit, backends(), out, why);
}

}  // namespace vmem::device

namespace vmem::core {

std::string device_choices() {
  std::string names(device::kAutomatic);
  const auto add = [&](std::string_view name) { names.append("|").append(name); };
  for (const device::Backend* backend : device::backends())
    if (backend->automatic) add(backend->name);
  for (const device::Backend* backend : device::backends())
    if (!backend->automatic) add(backend->name);
  add(device::kNone);
  return names;
}

}  // namespace vmem::core
