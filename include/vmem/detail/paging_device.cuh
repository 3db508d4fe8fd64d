// How device code accesses the words of the paging protocol: each access is the instruction that
// the PTX memory model has for it. System scope: the other side is the host and its copy engines.
#pragma once

#include "vmem/detail/paging_group.h"
#include "vmem/detail/paging_types.h"

namespace vmem::paging {

struct DeviceAtomics {
  template <typename T>
  using Word = T;
  static constexpr bool kWakes = false;

  static __device__ uint64_t load(const uint64_t* word) {
    uint64_t value;
    asm volatile("ld.relaxed.sys.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
  }
  static __device__ uint32_t load(const uint32_t* word) {
    uint32_t value;
    asm volatile("ld.relaxed.sys.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
  }
  static __device__ uint64_t load_acquire(const uint64_t* word) {
    uint64_t value;
    asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
  }
  static __device__ void store(uint64_t* word, uint64_t value) {
    asm volatile("st.relaxed.sys.u64 [%0], %1;" : : "l"(word), "l"(value) : "memory");
  }
  static __device__ void store(uint32_t* word, uint32_t value) {
    asm volatile("st.relaxed.sys.u32 [%0], %1;" : : "l"(word), "r"(value) : "memory");
  }
  static __device__ uint32_t add(uint32_t* word, uint32_t value) {
    uint32_t before;
    asm volatile("atom.relaxed.sys.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(value) : "memory");
    return before;
  }
  static __device__ uint64_t add(uint64_t* word, uint64_t value) {
    uint64_t before;
    asm volatile("atom.relaxed.sys.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(word), "l"(value) : "memory");
    return before;
  }
  static __device__ uint32_t add_release(uint32_t* word, uint32_t value) {
    uint32_t before;
    asm volatile("atom.release.sys.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(value) : "memory");
    return before;
  }
  static __device__ bool swap_if(uint64_t* word, uint64_t* found, uint64_t wanted) {
    const uint64_t expected = *found;
    asm volatile("atom.relaxed.sys.cas.b64 %0, [%1], %2, %3;"
                 : "=l"(*found)
                 : "l"(word), "l"(expected), "l"(wanted)
                 : "memory");
    return *found == expected;
  }
  static __device__ bool swap_if(uint32_t* word, uint32_t* found, uint32_t wanted) {
    const uint32_t expected = *found;
    asm volatile("atom.relaxed.sys.cas.b32 %0, [%1], %2, %3;"
                 : "=r"(*found)
                 : "l"(word), "r"(expected), "r"(wanted)
                 : "memory");
    return *found == expected;
  }
  static __device__ void fence() { asm volatile("fence.sc.sys;" : : : "memory"); }
  static __device__ void fence_aliases() { asm volatile("fence.proxy.alias;" : : : "memory"); }
  static __device__ uint64_t now() {
    uint64_t nanoseconds;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
    return nanoseconds;
  }
  static __device__ void pause() { asm volatile("nanosleep.u32 400;"); }
};

}  // namespace vmem::paging
