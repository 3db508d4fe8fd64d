// The gate of unified memory: fault_gate.h parks accesses, pagemap.h finds them.
#include <utility>

#include "device/managed/fault_gate.h"
#include "device/managed/pagemap.h"

namespace vmem::device::fault_gate {

namespace {

class ManagedGate final : public CpuGate {
 public:
  core::Status install() override { return fault_gate::install(); }
  void uninstall() override { fault_gate::uninstall(); }
  core::Status check() override { return fault_gate::check(); }
  core::Status add(void* base, size_t size) override { return fault_gate::add(base, size); }
  void remove(void* base) override { fault_gate::remove(base); }
  bool set(uintptr_t address, size_t size, Gate gate) override { return fault_gate::set(address, size, gate); }
  Gate gate(uintptr_t address) override { return fault_gate::gate(address); }
  core::Status set_hook(Hook hook) override { return fault_gate::set_hook(std::move(hook)); }
  core::Status mapped_pages(uintptr_t address, size_t size, bool first_only, uint64_t* count) override {
    return device::mapped_pages(address, size, first_only, count);
  }
};

constinit ManagedGate gate_of_process;

}  // namespace

CpuGate& cpu_gate() {
  return gate_of_process;
}

}  // namespace vmem::device::fault_gate
