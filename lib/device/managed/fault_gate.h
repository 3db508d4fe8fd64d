// Parks CPU threads that access a unit while it moves: a SIGSEGV handler that knows registered
// ranges and passes every other fault on. No CUDA, no policy. One per process, as signal handlers
// are.
//
// - Each unit (2 MiB) of a registered range has a gate. The handler reads it without locks, waits
//   on a futex while the gate forbids the access, and returns so that the instruction runs again.
// - An access that no gate explains (a store to a unit that is mapped read-only with its gate open)
//   goes to the hook, on the park thread. If the hook refuses it, or there is none, it goes to the
//   handler installed before ours, with the semantics that the kernel would have given it.
//
// Limits:
// - The kernel kills a thread that blocks SIGSEGV at its first access to a moving unit, as for any
//   fault.
// - A system call gets EFAULT.
// - A handler that replaced ours sees our faults until check() finds it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/status.h"
#include "core/types.h"
#include "device/cpu_gate.h"

namespace vmem::device::fault_gate {

using device::Gate;

inline constexpr size_t kGateUnit = core::kHugePage;
inline constexpr size_t kMaxRanges = 16384;

// Installs the handler, on the alternate stack where a thread has one. Counted: each install()
// needs an uninstall(), and the last one puts the previous handler back if ours is still in place.
// Any thread.
core::Status install();
void uninstall();
// If another handler has replaced ours, puts ours back in front and logs that once. One system call
// if ours is in place; the device calls it at each move. -ELOOP: handlers were replaced more often
// than it can chain.
core::Status check();

// Registers a range, gates open. `base` and `size` are multiples of kGateUnit, size > 0. -ENOSPC:
// kMaxRanges are in use.
core::Status add(void* base, size_t size);
// Unregisters a range. Parked threads retry, and then get their SIGSEGV. Returns when no handler
// reads the range any more.
void remove(void* base);
// Sets the gates of units inside one registered range. Call it before an mprotect that takes access
// away, and after one that gives it. Opening wakes parked threads. False: outside registered
// ranges.
bool set(uintptr_t address, size_t size, Gate gate);
Gate gate(uintptr_t address);

using Hook = CpuGate::Hook;
// An empty hook ends the park thread, and accesses that wait for it retry. Not to be called from
// the hook.
core::Status set_hook(Hook hook);

// The interface through which device.h and the backends use these functions.
CpuGate& cpu_gate();

struct Stats {
  uint64_t parked;   // accesses that waited
  uint32_t waiting;  // threads parked now
};
Stats stats();

}  // namespace vmem::device::fault_gate
