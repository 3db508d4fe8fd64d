// Whether valgrind runs this program. It has one thread run at a time, and a thread that sleeps in an access of a block
// keeps the others from running, those among them that would bring the block.
#pragma once

#include <array>
#include <cstdint>

namespace vmem::core {

// The question that its headers ask ("client request" 0x1001): instructions that do nothing anywhere else.
inline bool on_valgrind() {
  std::array<uint64_t, 6> request{0x1001};
  uint64_t answer = 0;
#if defined(__x86_64__)
  asm volatile(
      "rolq $3, %%rdi; rolq $13, %%rdi; rolq $61, %%rdi; rolq $51, %%rdi\n\t"
      "xchgq %%rbx, %%rbx"
      : "=d"(answer)
      : "a"(request.data()), "0"(answer)
      : "cc", "memory");
#elif defined(__aarch64__)
  asm volatile(
      "mov x3, %1; mov x4, %2\n\t"
      "ror x12, x12, #3; ror x12, x12, #13; ror x12, x12, #51; ror x12, x12, #61\n\t"
      "orr x10, x10, x10\n\t"
      "mov %0, x3"
      : "=r"(answer)
      : "r"(answer), "r"(request.data())
      : "cc", "memory", "x3", "x4");
#else
  (void)request;
#endif
  return answer != 0;
}

}  // namespace vmem::core
