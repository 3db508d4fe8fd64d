// Generates the edges of a synthetic graph of 2^scale vertices row by row, so that no sorting is
// needed. The graph is R-MAT (Chakrabarti, Zhan, Faloutsos, "R-MAT: a recursive model for graph
// mining", SDM 2004) with quadrants of 0.57, 0.19, 0.19 and 0.05, or uniform. A row has its
// expected number of edges; each bit of a column depends on the same bit of the row.
#pragma once

#include <cstdint>

namespace rmat {

inline uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

struct Generator {
  unsigned scale, degree;  // log2 of the vertices; edges of a vertex on average
  bool uniform;

  uint64_t vertices() const { return uint64_t{1} << scale; }
  uint64_t degree_of(uint64_t row) const {
    double d = degree;
    for (unsigned b = 0; b < scale && !uniform; ++b) d *= (row >> b & 1) != 0 ? 0.48 : 1.52;
    return static_cast<uint64_t>(d + static_cast<double>(mix(row + 1) >> 11) * 0x1p-53);
  }
  // Writes the first `count` edges of a row, unordered; the same at every call.
  void edges_of(uint64_t row, uint32_t* edges, uint64_t count) const {
    for (uint64_t i = 0; i < count; ++i) {
      uint64_t column = 0, random = 0;
      for (unsigned b = 0; b < scale; ++b, random >>= 16) {
        if (b % 4 == 0) random = mix((row << 34) + (i << 4) + b / 4 + 1);
        const uint64_t ones = uniform ? 32768 : (row >> b & 1) != 0 ? 13653 : 16384;  // of 65536
        column |= static_cast<uint64_t>((random & 0xffff) < ones) << b;
      }
      edges[i] = static_cast<uint32_t>(column);
    }
  }
};

}  // namespace rmat
