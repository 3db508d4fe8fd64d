// The CPU's side of unified memory: parks CPU accesses to a unit while it moves, and tells whether
// the CPU has touched one. A backend with CpuView::unified has one (device/managed/fault_gate.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "core/status.h"

namespace vmem::device {

enum class Gate : uint8_t {
  open,     // nothing moves here
  writers,  // stores park, loads go on
  shut,     // every access parks
};

class CpuGate {
 public:
  // Decides about a CPU access that the page's protection forbids and no gate explains: a store to a
  // block that is open for reading, or a fault of the program. True: retry (the hook has opened the
  // block, or knows that the access is right). False: the handler installed before ours gets it.
  // Runs on the park thread while the faulting thread waits. It may lock, wait and call the device,
  // but must not access a region.
  using Hook = std::function<bool(uintptr_t address, bool store)>;

  // Installs what parks threads. Counted: each install() needs an uninstall(). Any thread.
  virtual core::Status install() = 0;
  virtual void uninstall() = 0;
  // Makes sure that accesses still park, as another part of the program may have interfered. Call it
  // before each move.
  virtual core::Status check() = 0;
  // Registers a range, gates open. -ENOSPC: too many ranges.
  virtual core::Status add(void* base, size_t size) = 0;
  // Unregisters a range. Parked threads retry, and then get their SIGSEGV.
  virtual void remove(void* base) = 0;
  // Sets the gates of units inside one registered range. Call it before an mprotect that takes
  // access away, and after one that gives it. Opening wakes parked threads. False: outside registered
  // ranges.
  virtual bool set(uintptr_t address, size_t size, Gate gate) = 0;
  virtual Gate gate(uintptr_t address) = 0;
  // An empty hook ends the park thread, and accesses that wait for it retry. Not to be called from
  // the hook.
  virtual core::Status set_hook(Hook hook) = 0;
  // Counts the pages of 4 KiB that the CPU maps, in whole pages; stops at the first if `first_only`.
  virtual core::Status mapped_pages(uintptr_t address, size_t size, bool first_only, uint64_t* count) = 0;

 protected:
  ~CpuGate() = default;
};

}  // namespace vmem::device
