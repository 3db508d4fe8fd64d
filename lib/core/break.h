// Negative controls: a test build leaves out one protection (make BREAK=name), and the tests must
// notice (tests/negative/run.sh). In every other build broken() is false at compile time and leaves
// no code.
#pragma once

#include <string_view>

#ifndef VMEM_BREAK
#define VMEM_BREAK ""
#endif

namespace vmem::core {

consteval bool broken(std::string_view protection) {
  return protection == VMEM_BREAK;
}

}  // namespace vmem::core
