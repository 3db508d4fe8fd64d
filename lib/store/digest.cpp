#include "store/digest.h"

#include <sys/auxv.h>
#include <sys/random.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <memory>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "store/codec.h"

namespace vmem::store {

namespace {

const digest_kernel::Kernel& kernel() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") != 0) return digest_kernel::kAvx2;
#endif
  return digest_kernel::kPortable;
}

core::Digest hash_zeros(size_t size) {
  static const std::array<char, size_t{64} << 10> zeros{};
  Digester digester;
  while (size != 0) {
    const size_t piece = size < zeros.size() ? size : zeros.size();
    digester.update(zeros.data(), piece);
    size -= piece;
  }
  return digester.finish();
}

}  // namespace

namespace digest_kernel {

namespace {

Secret draw_secret() {
  Secret out;
  size_t have = 0;
  while (have < out.size()) {
    const ssize_t n = getrandom(out.data() + have, out.size() - have, 0);
    if (n > 0) {
      have += static_cast<size_t>(n);
    } else if (n == 0 || errno != EINTR) {
      break;
    }
  }
  if (have == out.size()) return out;
  // A filter of system calls forbids getrandom(): expand the random bytes that the kernel gave at
  // the start.
  const auto* start = reinterpret_cast<const void*>(getauxval(AT_RANDOM));
  XXH3_generateSecret(out.data(), out.size(), start, start != nullptr ? 16 : 0);
  return out;
}

}  // namespace

const Secret& secret() {
  // A function-local static would have a guard, and a child could find it held by a thread that it
  // does not have.
  static constinit std::atomic<const Secret*> drawn{nullptr};
  const Secret* known = drawn.load(std::memory_order_acquire);
  if (known != nullptr) [[likely]]
    return *known;
  auto mine = std::make_unique<const Secret>(draw_secret());
  return drawn.compare_exchange_strong(known, mine.get()) ? *mine.release() : *known;
}

}  // namespace digest_kernel

core::Digest digest(const void* bytes, size_t size) {
  return kernel().hash(bytes, size, digest_kernel::secret());
}

core::Digest zero_digest(size_t size) {
  // Blocks come in few sizes; the last one of a region may be odd. Reclaim threads call this even
  // while the process exits. So it has no destructor, allocates nothing, and takes no lock that a
  // child could find held.
  struct Known {
    std::atomic<size_t> size{0};  // 0: free; kTaken: being filled in
    core::Digest digest;
  };
  constexpr size_t kTaken = SIZE_MAX;
  static constinit std::array<Known, 64> known{};
  for (const Known& one : known) {
    if (one.size.load(std::memory_order_acquire) == size) return one.digest;
  }
  const core::Digest out = hash_zeros(size);
  for (Known& one : known) {
    size_t free = 0;
    if (!one.size.compare_exchange_strong(free, kTaken)) {
      if (free == size) break;  // another thread was faster
      continue;
    }
    one.digest = out;
    one.size.store(size, std::memory_order_release);
    break;
  }
  return out;
}

Digester::Digester() : state_{} {
  static_assert(sizeof(XXH3_state_t) <= kState && alignof(XXH3_state_t) <= 64);
  reset();
}
void Digester::reset() {
  const digest_kernel::Secret& secret = digest_kernel::secret();
  XXH3_128bits_reset_withSecret(reinterpret_cast<XXH3_state_t*>(state_.data()), secret.data(), secret.size());
}
void Digester::update(const void* bytes, size_t size) {
  kernel().update(state_.data(), bytes, size);
}
core::Digest Digester::finish() const {
  const XXH128_hash_t h = XXH3_128bits_digest(reinterpret_cast<const XXH3_state_t*>(state_.data()));
  return {h.low64, h.high64};
}

}  // namespace vmem::store
