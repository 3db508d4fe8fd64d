// XXH3-128 by the widest vectors the processor has. A distribution's libxxhash is often built for SSE2 alone, a third
// of the speed, so the header is compiled in, once for every machine and once for AVX2. The values are the same.
#pragma once

#include <cstddef>

#include "core/types.h"

namespace vmem::store::digest_kernel {

struct Kernel {
  core::Digest (*hash)(const void* bytes, size_t size);
  void (*update)(void* state, const void* bytes, size_t size);
};

#if defined(__x86_64__)
extern const Kernel kAvx2;  // only where the processor has AVX2
#endif
extern const Kernel kPortable;

}  // namespace vmem::store::digest_kernel
