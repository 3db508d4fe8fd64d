// Parks CPU threads that touch a unit while it moves: a SIGSEGV handler that knows registered ranges and passes every
// other fault on. No CUDA, no policy. One per process, as signal handlers are.
//
// Each unit (2 MiB) of a registered range has a gate. The handler looks it up without locks, waits on a futex while the
// gate forbids the access, and returns so that the instruction runs again. An access that no gate explains (a store to
// a unit that is mapped read-only with its gate open) is put to the touch hook on the park thread; refused, or without
// a hook, it goes to the handler installed before ours, with the semantics the kernel would have given it.
//
// Limits: a thread that blocks SIGSEGV is killed by the kernel at its first access of a moving unit, as for any fault;
// a system call gets EFAULT; a handler that replaced ours sees our faults until check() finds it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "core/status.h"
#include "core/types.h"

namespace vmem::device::fault_gate {

enum class Gate : uint8_t {
  open,     // nothing moves here
  writers,  // stores park, loads go on
  shut,     // every access parks
};

inline constexpr size_t kGateUnit = core::kHugePage;
inline constexpr size_t kMaxRanges = 16384;

// Installs the handler, on the alternate stack where a thread has one. Counted: each install() needs its uninstall(),
// and the last one puts the previous handler back if ours is still in place. Any thread.
core::Status install();
void uninstall();
// Is our handler still in place? If not, puts it back in front of the one found there, and says so once. One system
// call (0.1 us); the device calls it at each move. -ELOOP when handlers were replaced more often than it can chain.
core::Status check();

// Registers a range, gates open. `base` and `size` are multiples of kGateUnit, size > 0. -ENOSPC: kMaxRanges in use.
core::Status add(void* base, size_t size);
// Forgets it; parked threads try again and then get their SIGSEGV. Returns when no handler reads the range any more.
void remove(void* base);
// Sets the gates of units inside one registered range; order it yourself against mprotect: before one that takes access
// away, after one that gives it. Opening wakes the parked. False: outside registered ranges.
bool set(uintptr_t address, size_t size, Gate gate);
Gate gate(uintptr_t address);

// What to do with a CPU access that the page's protection forbids and no gate explains: a store to a block that is open
// for reading, or a fault of the program. true: try again (the hook has opened the block, or knows that it is right).
// false: the handler installed before ours gets it. Runs on one thread of this room's own; it may lock, wait and call
// the device, but touch no region. The faulting thread waits for it. An empty function ends that thread, and accesses
// waiting for it try again. Not to be called from the hook.
using Hook = std::function<bool(uintptr_t address, bool store)>;
core::Status set_hook(Hook hook);

struct Stats {
  uint64_t parked;     // accesses that waited
  uint64_t retried;    // .. that were sent back at once: the move had ended
  uint64_t asked;      // .. put to the hook
  uint64_t passed_on;  // faults given to the previous handler
  uint32_t waiting;    // threads parked now
};
Stats stats();

}  // namespace vmem::device::fault_gate
