#pragma once

namespace vmem::core {

// Prints the words to stderr and aborts: for states that can only be a bug of this library, where going on would risk
// data.
[[noreturn]] void fatal(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace vmem::core
