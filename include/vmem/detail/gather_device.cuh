// How device code gathers rows (paging_gather.h): the teams of a group, lists of rows, and copying.
#pragma once

#include "vmem/detail/paging_device.cuh"
#include "vmem/detail/paging_gather.h"
#include "vmem/detail/paging_types.h"

namespace vmem::paging {

// A warp of a group. The last warp of a thread block may have fewer lanes than 32.
class WarpTeam {
 public:
  __device__ WarpTeam(uint32_t rank, uint32_t threads) : threads_(threads), first_(rank & ~31u), lane_(rank & 31) {
    lanes_ = threads - first_ < 32 ? threads - first_ : 32;
    mask_ = 0xffffffffu >> (32 - lanes_);
  }
  __device__ uint32_t threads() const { return threads_; }
  __device__ uint32_t first() const { return first_; }
  __device__ uint32_t lane() const { return lane_; }
  __device__ uint32_t lanes() const { return lanes_; }
  __device__ uint32_t which(bool yes) const { return __ballot_sync(mask_, yes ? 1 : 0); }
  __device__ uint64_t from(uint64_t word, uint32_t lane) const {
    const uint32_t low = __shfl_sync(mask_, static_cast<uint32_t>(word), static_cast<int>(lane));
    const uint32_t high = __shfl_sync(mask_, static_cast<uint32_t>(word >> 32), static_cast<int>(lane));
    return uint64_t{high} << 32 | low;
  }
  __device__ void join() const { __syncwarp(mask_); }

 private:
  uint32_t threads_, first_, lane_, lanes_, mask_;
};

class ThreadTeam : public LoneTeam {
 public:
  __device__ uint32_t lanes() const { return 1; }
};

// Rows given by number or by address.
template <typename Index>
struct RowList {
  const Index* list;
  uint64_t begin, size, row_bytes;  // of the range

  __device__ bool multiples() const { return !pointers(list); }
  __device__ uint64_t bytes(uint64_t) const { return row_bytes; }
  __device__ uint64_t offset(uint64_t which) const { return offset_of(list[which]); }

 private:
  template <typename T>
  static __device__ bool pointers(T* const*) {
    return true;
  }
  static __device__ bool pointers(const void*) { return false; }
  __device__ uint64_t fitting(uint64_t offset) const {
    return offset <= size && row_bytes <= size - offset ? offset : kNoRow;
  }
  template <typename T>
  __device__ uint64_t offset_of(T* at) const {
    const uint64_t address = reinterpret_cast<uint64_t>(at);
    return address < begin ? kNoRow : fitting(address - begin);
  }
  template <typename Number>
  __device__ uint64_t offset_of(const Number& number) const {
    const uint64_t row = static_cast<uint64_t>(number);  // a negative one is far outside
    return row < size / row_bytes ? row * row_bytes : kNoRow;
  }
};

// Ranges of elements, given by a function.
template <typename T, typename Ranges>
struct RangeList {
  const Ranges& ranges;
  uint64_t elements, most;  // of the region, of a range

  __device__ uint64_t offset(uint64_t which) const {
    const auto range = ranges(which);
    const bool inside = range.count <= most && range.first <= elements && range.count <= elements - range.first;
    return inside ? range.first * sizeof(T) : kNoRow;
  }
  __device__ uint64_t bytes(uint64_t which) const { return ranges(which).count * sizeof(T); }
};

struct alignas(16) Sixteen {
  uint32_t words[4];
};

// Loads and stores of a team; each lane has four under way at a time.
template <typename Word>
__device__ void copy_words(uint64_t to, uint64_t from, uint64_t bytes, uint32_t lane, uint32_t lanes) {
  constexpr uint32_t kTogether = 4;
  const Word* const source = reinterpret_cast<const Word*>(from);
  Word* const target = reinterpret_cast<Word*>(to);
  const uint64_t words = bytes / sizeof(Word);
#pragma unroll 1
  for (uint64_t i = lane; i < words; i += uint64_t{kTogether} * lanes) {
    Word some[kTogether];
#pragma unroll
    for (uint32_t k = 0; k < kTogether; ++k)
      if (i + k * lanes < words) some[k] = source[i + k * lanes];
#pragma unroll
    for (uint32_t k = 0; k < kTogether; ++k)
      if (i + k * lanes < words) target[i + k * lanes] = some[k];
  }
}

template <typename Team>
struct CopyRow {
  uint64_t to, row_bytes;
  const Team& team;

  __device__ void operator()(uint64_t row, const Piece& piece) const {
    const uint64_t at = to + row * row_bytes + piece.offset, all = at | piece.address | piece.bytes;
    if ((all & 15) == 0) {
      copy_words<Sixteen>(at, piece.address, piece.bytes, team.lane(), team.lanes());
    } else if ((all & 3) == 0) {
      copy_words<uint32_t>(at, piece.address, piece.bytes, team.lane(), team.lanes());
    } else {
      copy_words<uint8_t>(at, piece.address, piece.bytes, team.lane(), team.lanes());
    }
  }
};

template <typename T, typename Team, typename Visit>
struct VisitRange {
  const Visit& visit;
  const Team& team;

  __device__ void operator()(uint64_t range, const Piece& piece) const {
    visit(static_cast<size_t>(range), reinterpret_cast<const T*>(piece.address),
          static_cast<size_t>(piece.offset / sizeof(T)), static_cast<size_t>(piece.bytes / sizeof(T)), team.lane(),
          team.lanes());
  }
};

}  // namespace vmem::paging
