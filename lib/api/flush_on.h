// Signals that end the process: shared files are written first, by a thread of its own, and then the signal has its
// default action.
//
// - The handler calls nothing but what is async-signal-safe: it notes the signal and wakes the thread.
// - A second signal of the same number ends the process at once, and so does one in a forked child.
#pragma once

#include <span>

#include "core/status.h"

namespace vmem::api {

// All signals, or none and why. Any thread.
core::Status flush_on(std::span<const int> signals);

}  // namespace vmem::api
