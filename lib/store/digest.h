// XXH3-128 by the widest vectors the processor has. A distribution's libxxhash is often built for SSE2 alone, a third
// of the speed, so the header is compiled in, once for every machine and once for AVX2. The values are the same.
//
// Keyed by a secret that is drawn when the first digest is taken and never leaves the process: who can write to the
// store cannot make bytes that pass for others. XXH3 is no cryptographic function; it is fast enough to look at every
// block, and without the secret there is nothing to compute a collision from.
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
extern const Kernel kAvx2;  // only where the processor has AVX2
#endif
extern const Kernel kPortable;

}  // namespace vmem::store::digest_kernel
