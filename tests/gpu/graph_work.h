// Kernels of graph_bench: breadth-first search, level by level, and PageRank, pass by pass. Asynchronous; stream is a
// cudaStream_t.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gather_work.h"
#include "paging_work.h"
#include "vmem/vmem.h"

namespace vmem::gpu {

// Only the edges are in the region; all other arrays are plain memory of the device. A piece is the
// part of a vertex's edges within one 16 KiB of the list. Its word has the position of the first
// edge, and above that the number of edges.
struct GraphWork {
  const uint64_t* offsets;
  size_t vertices;
  uint32_t* levels;              // UINT32_MAX: not reached
  unsigned long long* pieces;    // of this level
  unsigned long long* n_pieces;  // number of pieces
};
inline constexpr uint64_t kPieceEdges = 4096;

// Collects the pieces of the vertices with this level, roughly in order of vertex number. *n_pieces
// must be 0.
void collect(void* stream, const GraphWork& graph, uint32_t level);
// Gives the next level to all vertices that those pieces lead to and that have none. walk_asking
// pages in the edges; walk_plain accesses them in place, only those in [from, to) of the list.
void walk_asking(void* stream, const vmem_kernel_view& edges, const GraphWork& graph, size_t n_pieces, uint32_t level,
                 unsigned groups, PagingResult* result);
void walk_plain(void* stream, const uint32_t* edges, const GraphWork& graph, size_t n_pieces, uint32_t level,
                uint64_t from, uint64_t to);
// Sets marks[b] to 1 for each block of 2 MiB that contains a piece.
void mark_blocks(void* stream, const GraphWork& graph, size_t n_pieces, unsigned char* marks);

// A pass of PageRank in integers, so that the order of summation does not matter. Vertex v gets the
// sum of the shares of the vertices in its row.
struct RankWork {
  const uint64_t* offsets;
  size_t vertices;
  const uint64_t* shares;    // what a vertex gives to each row that it is in
  unsigned long long* sums;  // 0 before the pass
};
inline constexpr uint64_t kRankOne = uint64_t{1} << 32;
// Returns what a vertex that received `sum` gives to each of the `rows` it is in.
VMEM_EVERYWHERE inline uint64_t share_of(uint64_t sum, uint32_t rows) {
  return (kRankOne / 20 * 3 + sum / 20 * 17) / (rows == 0 ? 1 : rows);
}
// `groups` thread blocks take a block of edges at a time. rank_plain uses only the edges in [from,
// to) of the list.
void rank_asking(void* stream, const vmem_kernel_view& edges, const RankWork& work, unsigned groups,
                 PagingResult* result);
void rank_plain(void* stream, const uint32_t* edges, const RankWork& work, uint64_t from, uint64_t to);
// Computes shares from sums and resets sums to 0. rows[v] is the number of rows that v is in.
void next_pass(void* stream, const RankWork& work, const uint32_t* rows, uint64_t* shares);
// Loads all of these kernels: see load_gathering.
void load_graph();

}  // namespace vmem::gpu
