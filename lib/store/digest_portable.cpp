// The digest for every processor. mk/lib.mk says how this and digest_avx2.cpp are compiled, and
// why.

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "store/digest.h"

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

const Kernel kPortable{hash, update};

}  // namespace vmem::store::digest_kernel
