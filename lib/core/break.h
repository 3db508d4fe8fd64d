// Negative controls: one protection at a time is taken out of a test build (make BREAK=name), and the tests must notice
// (tests/negative/run.sh). In every other build broken() is false when the compiler sees it, and nothing is left of it.
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
