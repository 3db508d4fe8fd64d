// For classes that change mappings of a region on managed memory: devices that share the CPU's page
// tables, and a trap that counts calls and answers as the test says.
#pragma once

#include <algorithm>
#include <cerrno>
#include <vector>

#include "pager_device_parts.h"

namespace vmem::pager::test {

class ManagedDevices : public FakeDevices {
 public:
  device::CpuView cpu_view() const override { return device::CpuView::unified; }
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

class CountingTrap : public trap::Trap {
 public:
  const trap::Caps& caps() const override { return caps_; }
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

  core::Status attach(size_t, size_t, trap::Transfer, void**) override { return no(); }
  core::Status detach(void*, size_t) override { return no(); }
  core::Status unmap(void*, size_t) override { return no(); }
  core::Status wait(std::span<trap::Event>, int, size_t*) override { return no(); }
  void interrupt() override { no().ignore(); }
  core::Status fill(void*, size_t, void*, trap::Transfer, trap::Protect) override { return no(); }
  core::Status fill_zero(void*, size_t) override { return no(); }
  core::Status take(void*, size_t, void*, trap::Transfer, trap::PinWait) override { return no(); }
  core::Status protect(void*, size_t) override { return no(); }
  core::Status unprotect(void*, size_t) override { return no(); }
  core::Status fail(void*, size_t) override { return no(); }
  core::Status unfail(void*, size_t) override { return no(); }
  core::Status reserve_frames(size_t, bool, void**) override { return no(); }

 private:
  static core::Status no() {
    ADD_FAILURE() << "a call that is none of its business";
    return core::error(EIO, "none of its business");
  }
  trap::Caps caps_;
};

class ManagedParts : public DeviceParts {
 protected:
  ManagedDevices managed;
  CountingTrap counting;
  DeviceSet managed_gpus{&managed, map, config};
  Shared with_counting{counting, engine, space,  config, counters, budget, frames,
                       staging,  map,    writes, clock,  reserve,  tables};
};

}  // namespace vmem::pager::test
