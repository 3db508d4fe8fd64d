// Tells if valgrind runs this program. Valgrind runs one thread at a time: a thread that sleeps in
// an access of a block would keep the threads that bring the block from running.
#pragma once

#include <array>
#include <cstdint>

namespace vmem::core {

// Makes the request of valgrind's headers (client request 0x1001). The instructions do nothing
// elsewhere.
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
