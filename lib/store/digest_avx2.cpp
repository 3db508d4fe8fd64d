// digest.cpp calls this only if the processor has AVX2. Everything between push and pop is compiled
// for AVX2 and static to this file, so no such code can leak into a program that runs elsewhere.
#if defined(__x86_64__)

#include <immintrin.h>

#include "store/digest.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif

#define XXH_INLINE_ALL
#define XXH_VECTOR 2  // XXH_AVX2, which the header defines only later
#include <xxhash.h>

namespace vmem::store::digest_kernel {

namespace {

core::Digest hash(const void* bytes, size_t size, const Secret& secret) {
  const XXH128_hash_t h = XXH3_128bits_withSecret(bytes, size, secret.data(), secret.size());
  return {h.low64, h.high64};
}

void update(void* state, const void* bytes, size_t size) {
  XXH3_128bits_update(static_cast<XXH3_state_t*>(state), bytes, size);
}

}  // namespace

const Kernel kAvx2{hash, update};

}  // namespace vmem::store::digest_kernel

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // __x86_64__
