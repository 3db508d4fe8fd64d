#include "ram_devices.h"

#include <sys/mman.h>

#include <cstring>

namespace vmem::device::testing {

RamDevices::RamDevices(size_t unit) : UnitDevices(nullptr, unit) {
  infos_.push_back({0, "memory of this process", "", -1, kBytes, {Link::self}});
}

std::byte* RamDevices::at(const void* address) const {
  const ReservationPtr r = find(reinterpret_cast<uintptr_t>(address));
  return reinterpret_cast<std::byte*>(reinterpret_cast<uintptr_t>(address) + r->size);
}

core::Status RamDevices::record(void*, int, Ticket* out) {
  *out = nullptr;
  return {};
}

core::Status RamDevices::poll(const Ticket&, bool* done) {
  *done = true;
  return {};
}

core::Status RamDevices::backend_memory(int device, Memory* out) {
  *out = {kBytes - used(device), kBytes, used(device)};
  return {};
}

// One mapping: the range, without access, and behind it the device's memory.
core::Status RamDevices::backend_reserve(Reservation& r) {
  r.backend_size = 2 * r.size + r.unit;
  void* const got = mmap(nullptr, r.backend_size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (got == MAP_FAILED) return core::system_error(errno, "no address space for %zu bytes", r.size);
  r.backend = got;
  r.base = core::round_up(reinterpret_cast<uintptr_t>(got), r.unit);
  if (mprotect(reinterpret_cast<void*>(r.base + r.size), r.size, PROT_READ | PROT_WRITE) == 0) return {};
  return core::system_error(errno, "no memory for %zu bytes", r.size);
}

void RamDevices::backend_release(Reservation& r) {
  munmap(r.backend, r.backend_size);
}

core::Status RamDevices::backend_back(const Span&, int device) {
  if (used(device) > kBytes) return error(ENOMEM, "the device is full");
  return {};
}

core::Status RamDevices::backend_zero(const Span& span) {
  memset(at(reinterpret_cast<const void*>(span.address())), 0, span.size());
  return {};
}

core::Status RamDevices::backend_copy(int, Direction direction, std::span<const Copy> copies, Ticket* done) {
  for (const Copy& copy : copies) {
    std::byte* const there = at(reinterpret_cast<const void*>(copy.block));
    if (copy.frame == nullptr)
      memset(there, 0, copy.size);
    else if (direction == Direction::in)
      memcpy(there, copy.frame, copy.size);
    else
      memcpy(copy.frame, there, copy.size);
  }
  *done = nullptr;
  return {};
}

const device::Backend ram_backend = {"ram", false, nullptr, [](size_t unit, std::unique_ptr<Devices>* out) {
                                       *out = std::make_unique<RamDevices>(unit);
                                       return core::Status();
                                     }};

}  // namespace vmem::device::testing
