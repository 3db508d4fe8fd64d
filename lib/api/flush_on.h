// Makes signals that end the process write shared files first: a thread of its own does that, and
// then takes the signal's default action.
//
// - The handler calls only async-signal-safe functions: it notes the signal and wakes the thread.
// - A second signal of the same number ends the process at once; so does one in a forked child.
#pragma once

#include <span>

#include "core/status.h"

namespace vmem::api {

// Prepares all of the signals, or none and returns why. Any thread.
core::Status flush_on(std::span<const int> signals);

}  // namespace vmem::api
