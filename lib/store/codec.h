// Digests and compression of blocks. Pure; any thread.
#pragma once

#include <array>
#include <cstddef>

#include "core/status.h"
#include "core/types.h"

namespace vmem::store {

enum class Codec : unsigned { raw = 0, lz4 = 1, zstd = 2 };

// Keyed XXH3-128 (https://xxhash.com): the same bytes have another digest in another process. Runs
// at about memory speed.
core::Digest digest(const void* bytes, size_t size);
// Returns the digest of `size` zero bytes; computed once for each size.
core::Digest zero_digest(size_t size);

// Computes the same digest piece by piece, in order, so that a block can be hashed while its tail
// is being read. Allocates nothing.
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
  alignas(64) std::array<std::byte, kState> state_;  // XXH3's state
};

// Allocates, for good, the least memory that reading blocks of this codec needs. Returns 0 or
// -ENOMEM.
core::Status prepare_codec(Codec codec);
// Call in a forked child: another thread of the parent may have been using the spare decompressor.
void renew_codec();
// Encodes `block` into `out`, which holds at least `size` bytes. If that saves a page or more,
// *stored is the bytes to write, a multiple of 4 KiB, and *codec is `wanted`. Otherwise *codec is
// raw, *stored is `size` and the contents of `out` are undefined: write `block` instead.
void encode(Codec wanted, const void* block, size_t size, void* out, size_t* stored, Codec* codec);
// Decodes `stored` bytes into exactly `size` bytes. Returns -EIO if they do not decode. Threads
// without memory take turns with the decompressor that prepare_codec() made.
core::Status decode(Codec codec, const void* in, size_t stored, void* block, size_t size);

}  // namespace vmem::store
