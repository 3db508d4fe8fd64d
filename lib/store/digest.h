// XXH3-128 with the widest vectors of the processor. A distribution's libxxhash is often built for
// SSE2 alone and is much slower. So the header is compiled in twice, for every processor and for
// AVX2. The values are the same.
//
// The key is a secret, drawn when the first digest is taken, and never leaves the process. Another
// user who can write to the store cannot make bytes that pass for others. XXH3 is not
// cryptographic. It is fast enough to check every block, and without the secret a collision cannot
// be computed.
#pragma once

#include <array>
#include <cstddef>

#include "core/types.h"

namespace vmem::store::digest_kernel {

using Secret = std::array<unsigned char, 192>;
const Secret& secret();

struct Kernel {
  core::Digest (*hash)(const void* bytes, size_t size, const Secret& secret);
  void (*update)(void* state, const void* bytes, size_t size);
};

#if defined(__x86_64__)
extern const Kernel kAvx2;  // only if the processor has AVX2
#endif
extern const Kernel kPortable;

}  // namespace vmem::store::digest_kernel
