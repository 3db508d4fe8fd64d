// Chooses the backend.
#include <errno.h>

#include <utility>

#include "core/options.h"
#include "device/cuda/cuda_device.h"
#include "device/device.h"
#include "device/sim/sim_device.h"

namespace vmem::device {

namespace {

// auto and cuda take the first of these that works.
constexpr Kind kAutomatic[] = {Kind::handles, Kind::managed};

constexpr std::pair<const char*, Kind> kNames[] = {
    {"auto", Kind::automatic}, {"cuda", Kind::cuda}, {"handles", Kind::handles},         {"managed", Kind::managed},
    {"none", Kind::none},      {"sim", Kind::sim},   {"sim-handles", Kind::sim_handles},
};

const char* name_of(Kind kind) {
  for (const auto& [name, is] : kNames)
    if (is == kind) return name;
  return "?";
}

#ifndef VMEM_HAVE_CUDA
Status no_cuda(std::unique_ptr<Devices>*) {
  return error(ENODEV, "this libvmem was built without the CUDA toolkit");
}
Status no_handles(size_t, std::unique_ptr<Devices>* out) {
  return no_cuda(out);
}
#endif

Status sim(std::unique_ptr<Devices>* out) {
  return make_sim_devices(false, kUnit, out);
}

Status sim_handles(size_t unit, std::unique_ptr<Devices>* out) {
  return make_sim_devices(true, unit, out);
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

}  // namespace

Kind kind_of(std::string_view setting) {
  for (const auto& [name, kind] : kNames)
    if (setting == name) return kind;
  return Kind::automatic;
}

Status make_devices(Kind kind, size_t unit, std::span<const Kind> automatic, const Makers& makers,
                    std::unique_ptr<Devices>* out, std::string* why) {
  out->reset();
  why->clear();
  switch (kind) {
    case Kind::none:
      *why = "the device tier is switched off (setting device)";
      return {};
    case Kind::sim:
    case Kind::sim_handles: {
      Status s = kind == Kind::sim ? makers.sim(out) : makers.sim_handles(unit, out);
      return s.ok() ? fits(unit, out) : std::move(s);
    }
    case Kind::handles:
    case Kind::managed: {
      const bool handles = kind == Kind::handles;
      const Status s = handles ? makers.handles(unit, out) : makers.managed(out);
      if (s.ok()) return fits(unit, out);
      return error(-s.code(),
                   "setting device is %s, which is not available here: %.*s; with auto libvmem takes what is available",
                   name_of(kind), static_cast<int>(s.text().size()), s.text().data());
    }
    case Kind::cuda:
    case Kind::automatic:
      break;
  }
  Status last;
  std::string each;
  bool differ = false;
  for (const Kind backend : automatic) {
    Status s = backend == Kind::handles ? makers.handles(unit, out) : makers.managed(out);
    if (s.ok()) {
      *why = std::move(each);
      return fits(unit, out);
    }
    out->reset();
    differ |= !last.ok() && last.text() != s.text();
    each += std::string(each.empty() ? "" : "; ") + name_of(backend) + ": " + std::string(s.text());
    last = std::move(s);
  }
  *why = differ ? std::move(each) : std::string(last.text());  // "no GPU" only once
  if (kind == Kind::automatic) return {};
  return error(-last.code(), "setting device is cuda, which is not available here: %s", why->c_str());
}

Status make_devices(Kind kind, size_t unit, std::unique_ptr<Devices>* out, std::string* why) {
  // CUDA's driver loads libraries and opens files that the environment names, also if another user
  // has set it: CUDA_INJECTION64_PATH, NVTX_INJECTION64_PATH and CUDA_CACHE_PATH were seen to work
  // in a set-user-ID program.
  if (kind == Kind::automatic && core::has_more_rights()) {
    out->reset();
    *why =
        "this program runs with more rights than the user who started it (AT_SECURE), and CUDA would load code that "
        "the environment names; clear the environment and set device to cuda to use CUDA";
    return {};
  }
#ifdef VMEM_HAVE_CUDA
  return make_devices(kind, unit, kAutomatic, {make_cuda_handles, make_cuda_devices, sim, sim_handles}, out, why);
#else
  return make_devices(kind, unit, kAutomatic, {no_handles, no_cuda, sim, sim_handles}, out, why);
#endif
}

}  // namespace vmem::device
