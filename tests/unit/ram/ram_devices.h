// The shortest backend: one device whose memory is ordinary memory of the process. Streams run their
// work at once, so every ticket has been reached. It shows what a new backend has to bring: a
// folder, a Backend, and a row in the registry, where a test uses BackendRegistration.
#pragma once

#include "device/backend.h"
#include "device/units/units.h"

namespace vmem::device::testing {

class RamDevices final : public UnitDevices {
 public:
  static constexpr uint64_t kBytes = 128 * kUnit;
  explicit RamDevices(size_t unit);
  const char* name() const override { return "ram"; }
  // Returns where the device has this byte of a range.
  std::byte* at(const void* address) const;

  core::Status health(int) override { return {}; }
  core::Status check_stream(void*, int) override { return {}; }
  core::Status order_after(const Ticket&, void*, int) override { return {}; }
  core::Status record(void*, int, Ticket* out) override;
  core::Status poll(const Ticket&, bool* done) override;
  core::Status wait(const Ticket&) override { return {}; }
  core::Status drain(int) override { return {}; }

 private:
  core::Status backend_memory(int device, Memory* out) override;
  core::Status backend_reserve(Reservation& r) override;
  void backend_release(Reservation& r) override;
  core::Status backend_back(const Span& span, int device) override;
  core::Status backend_zero(const Span& span) override;
  core::Status backend_copy(int device, Direction direction, std::span<const Copy> copies, Ticket* done) override;
  core::Status backend_pin(void*, size_t) override { return {}; }
  core::Status backend_unpin(void*) override { return {}; }
  // Only unified backends need these.
  core::Status backend_map(const Span&) override { return no(); }
  core::Status backend_populate(const Span&, int) override { return no(); }
  core::Status backend_migrate(const Span&, int) override { return no(); }
  core::Status backend_advise(Range, Advice, int, bool) override { return no(); }
  static core::Status no() { return error(EOPNOTSUPP, "this backend has no unified memory"); }
};

extern const device::Backend ram_backend;

}  // namespace vmem::device::testing
