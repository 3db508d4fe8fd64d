#pragma once

namespace vmem::core {

// Prints the message to stderr and aborts. For states that can only be a bug of this library, where
// continuing would risk data.
[[noreturn]] void fatal(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace vmem::core
