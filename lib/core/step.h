// Named points inside every asynchronous transition. Production code pays one relaxed load. Tests
// install a hook that sleeps, yields or counts there, to force an interleaving. A hook may block;
// it must not access a region.
#pragma once

#include <atomic>

namespace vmem::core {

using StepHook = void (*)(const char* step);
inline std::atomic<StepHook> step_hook{nullptr};

inline void step(const char* name) {
  if (StepHook hook = step_hook.load(std::memory_order_relaxed); hook != nullptr) [[unlikely]]
    hook(name);
}

}  // namespace vmem::core
