// Digests and compression of blocks. Pure; any thread.
#pragma once

#include <array>
#include <cstddef>

#include "core/status.h"
#include "core/types.h"

namespace vmem::store {

enum class Codec : unsigned { raw = 0, lz4 = 1, zstd = 2 };

// XXH3-128 (https://xxhash.com), keyed: in another process the same bytes have another digest. About memory speed.
core::Digest digest(const void* bytes, size_t size);
// The digest of `size` zero bytes; computed once per size.
core::Digest zero_digest(size_t size);

// The same digest fed piece by piece in order, so that a block can be hashed while its tail is still being read. Needs
// no memory beside itself.
class Digester {
 public:
  Digester();
  ~Digester() = default;
  Digester(const Digester&) = delete;
  Digester& operator=(const Digester&) = delete;
  void reset();
  void update(const void* bytes, size_t size);
  core::Digest finish() const;

 private:
  static constexpr size_t kState = 1024;
  alignas(64) std::array<std::byte, kState> state_;  // XXH3's
};

// Memory that reading blocks of this codec needs at least, for good. -ENOMEM: there is none.
core::Status prepare_codec(Codec codec);
// In a forked child: what is kept for threads without memory may have been in use.
void renew_codec();
// Encodes `block` into `out` (capacity at least `size` bytes). *stored = bytes to write, a multiple of 4 KiB smaller
// than `size` when it paid, and then *codec = what was asked; otherwise *codec = raw, *stored = size, and what is in
// `out` means nothing: write `block` itself.
void encode(Codec wanted, const void* block, size_t size, void* out, size_t* stored, Codec* codec);
// Decodes `stored` bytes into exactly `size` bytes. -EIO when they do not decode. Where memory is short, threads take
// turns with what prepare_codec() has made.
core::Status decode(Codec codec, const void* in, size_t stored, void* block, size_t size);

}  // namespace vmem::store
