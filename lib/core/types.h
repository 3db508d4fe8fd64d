// Types and numbers that all rooms share. No I/O, no threads, no allocation.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace vmem::core {

inline constexpr size_t kPage = 4096;                  // the kernel's small page, bytes
inline constexpr size_t kHugePage = size_t{2} << 20;   // x86-64 PMD page and the driver's unit, bytes
inline constexpr size_t kMinBlock = kPage;             // smallest block, bytes
inline constexpr size_t kMaxBlock = size_t{64} << 20;  // largest block, bytes
// Number of block sizes, each twice the one before.
inline constexpr size_t kBlockSizes = std::countr_zero(kMaxBlock / kMinBlock) + 1;

constexpr size_t round_up(size_t n, size_t unit) {
  return (n + unit - 1) / unit * unit;
}
constexpr size_t round_down(size_t n, size_t unit) {
  return n / unit * unit;
}
constexpr bool is_power_of_two(size_t n) {
  return n != 0 && (n & (n - 1)) == 0;
}

// Index of a block inside its region: 0 .. region bytes / block bytes - 1.
using BlockIndex = uint64_t;

// Dense number of a frame: an index into arrays, reused after the frame is freed.
using FrameId = uint32_t;
inline constexpr FrameId kNoFrame = UINT32_MAX;

// The kind of waiter of an I/O, most urgent first. This is the order of service.
enum class Urgency : uint8_t { fault, acquire, prefetch, readahead, writeback };
inline constexpr size_t kUrgencies = 5;

// 128-bit digest of a block's bytes (XXH3-128). Equal digests are taken to mean equal bytes.
struct Digest {
  uint64_t lo = 0, hi = 0;
  friend bool operator==(const Digest&, const Digest&) = default;
};

// Where a block's bytes lie in the store, packed in 8 bytes. `bits == 0` means nowhere.
//   offset  39 bits, units of 4 KiB     (up to 2 PiB a path)
//   pages   15 bits, stored length in units of 4 KiB
//   path     7 bits, which of the store's paths
//   codec    2 bits, 0 raw, 1 lz4, 2 zstd
//   valid    1 bit,  always 1 when the extent exists
struct Extent {
  static constexpr unsigned kOffsetBits = 39, kLengthBits = 15;
  static constexpr uint64_t kMostOffsetPages = uint64_t{1} << kOffsetBits,
                            kMostPages = (uint64_t{1} << kLengthBits) - 1;
  uint64_t bits = 0;

  static constexpr Extent make(unsigned path, uint64_t offset_bytes, size_t length_bytes, unsigned codec) {
    return Extent{(offset_bytes / kPage) | uint64_t{length_bytes / kPage} << kOffsetBits | uint64_t{path} << 54 |
                  uint64_t{codec} << 61 | uint64_t{1} << 63};
  }
  constexpr explicit operator bool() const { return bits != 0; }
  constexpr uint64_t offset() const { return (bits & (kMostOffsetPages - 1)) * kPage; }
  constexpr size_t length() const { return (bits >> kOffsetBits & kMostPages) * kPage; }
  constexpr unsigned path() const { return bits >> 54 & 0x7f; }
  constexpr unsigned codec() const { return bits >> 61 & 3; }
  friend constexpr bool operator==(const Extent&, const Extent&) = default;
};
inline constexpr unsigned kMaxStorePaths = 127;

}  // namespace vmem::core
