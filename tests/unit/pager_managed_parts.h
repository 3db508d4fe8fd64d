// For classes that change mappings of a region on managed memory: devices that share the CPU's page
// tables, and a trap that counts calls and answers as the test says.
#pragma once

#include <algorithm>
#include <cerrno>
#include <vector>

#include "device/managed/fault_gate.h"
#include "pager_device_parts.h"

namespace vmem::pager::test {

class ManagedDevices : public FakeDevices {
 public:
  device::CpuGate* cpu_gate() const override {
    return view == device::CpuView::unified ? &device::fault_gate::cpu_gate() : nullptr;
  }
  device::CpuView view = device::CpuView::unified;
  core::Status punch(std::span<const device::Range>) override {
    ++punches;
    if (punch_failures == 0) return {};
    --punch_failures;
    return core::error(punch_error, "as the test wants it");
  }
  core::Status rearm(std::span<const device::Range> ranges) override {
    settled += ranges.size();
    return {};
  }
  size_t punches = 0, punch_failures = 0, settled = 0;
  int punch_error = 0;
};

class CountingTrap : public FakeTrap {
 public:
  core::Status attach_at(void* at, size_t size, trap::Transfer) override {
    if (attach_failures != 0) {
      --attach_failures;
      return core::error(ENOMEM, "as the test wants it");
    }
    attached.push_back({reinterpret_cast<uintptr_t>(at), size});
    return {};
  }
  core::Status drop(std::span<const trap::Range> ranges) override {
    dropped.insert(dropped.end(), ranges.begin(), ranges.end());
    return {};
  }
  core::Status map_file(void*, size_t, int, uint64_t, bool) override {
    ++mapped;
    return map_error != 0 ? core::error(map_error, "as the test wants it") : core::Status();
  }
  core::Status unmap_file(void*, size_t) override {
    ++unmapped;
    return unmap_error != 0 ? core::error(unmap_error, "as the test wants it") : core::Status();
  }
  core::Status wake(void*, size_t) override {
    ++woken;
    return {};
  }
  std::vector<trap::Range> attached, dropped;
  size_t attach_failures = 0, mapped = 0, unmapped = 0, woken = 0;
  int map_error = 0, unmap_error = 0;
};

class ManagedParts : public DeviceParts {
 protected:
  ManagedParts() : DeviceParts(std::make_unique<ManagedDevices>(), std::make_unique<CountingTrap>()) {}
  ManagedDevices& managed = static_cast<ManagedDevices&>(devices);
  CountingTrap& counting = static_cast<CountingTrap&>(trap);
};

}  // namespace vmem::pager::test
