// Kernels of graph_bench: breadth-first search, level by level, and PageRank, pass by pass. Asynchronous; stream is a
// cudaStream_t.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gather_work.h"
#include "paging_work.h"
#include "vmem/vmem.h"

namespace vmem::gpu {

// All in plain memory of the device but the edges. A piece is a vertex's edges as far as they are in one 16 KiB of the
// list: where they begin, and above that how many they are.
struct GraphWork {
  const uint64_t* offsets;
  size_t vertices;
  uint32_t* levels;              // UINT32_MAX: not seen
  unsigned long long* pieces;    // of the level
  unsigned long long* n_pieces;  // .. how many
};
inline constexpr uint64_t kPieceEdges = 4096;

// The pieces of the vertices with this level, roughly by number; *n_pieces is 0 before.
void collect(void* stream, const GraphWork& graph, uint32_t level);
// What those lead to, and was not seen, gets the next level. The kernel pages in the edges, or they are where it can
// access them; of the latter, those edges that are in [from, to) of the list.
void walk_asking(void* stream, const vmem_kernel_view& edges, const GraphWork& graph, size_t n_pieces, uint32_t level,
                 unsigned groups, PagingResult* result);
void walk_plain(void* stream, const uint32_t* edges, const GraphWork& graph, size_t n_pieces, uint32_t level,
                uint64_t from, uint64_t to);
// marks[b] is 1 for each block of 2 MiB in which a piece is.
void mark_blocks(void* stream, const GraphWork& graph, size_t n_pieces, unsigned char* marks);

// A pass of PageRank, in whole numbers, so that the order of a sum changes nothing: v gets what those in its row give.
struct RankWork {
  const uint64_t* offsets;
  size_t vertices;
  const uint64_t* shares;    // what a vertex gives to each whose row it is in
  unsigned long long* sums;  // 0 before
};
inline constexpr uint64_t kRankOne = uint64_t{1} << 32;
// The rank of a vertex that was given `sum`, and what it gives to each of the `rows` it is in.
VMEM_EVERYWHERE inline uint64_t share_of(uint64_t sum, uint32_t rows) {
  return (kRankOne / 20 * 3 + sum / 20 * 17) / (rows == 0 ? 1 : rows);
}
// `groups` thread blocks take a block of edges at a time. plain: of the edges in [from, to) of the list.
void rank_asking(void* stream, const vmem_kernel_view& edges, const RankWork& work, unsigned groups,
                 PagingResult* result);
void rank_plain(void* stream, const uint32_t* edges, const RankWork& work, uint64_t from, uint64_t to);
// shares from sums, which are 0 then; rows[v]: in how many v is.
void next_pass(void* stream, const RankWork& work, const uint32_t* rows, uint64_t* shares);
// Loads all of these: see load_gathering.
void load_graph();

}  // namespace vmem::gpu
