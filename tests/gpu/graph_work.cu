#include <cuda_runtime.h>

#include "graph_work.h"
#include "vmem/device.cuh"

namespace vmem::gpu {

namespace {

constexpr uint64_t kPatience = 10000000000, kLongest = 30000000000;  // ns
constexpr unsigned kBlocks = 1056;                                   // thread blocks of 256
constexpr unsigned kBegin = 44;                                      // the bits of the begin of a piece

__device__ uint64_t begin_of(unsigned long long piece) {
  return piece & ((1ull << kBegin) - 1);
}
__device__ uint64_t count_of(unsigned long long piece) {
  return piece >> kBegin;
}

// The vertices of a warp reserve space for their pieces together.
__global__ void collect_kernel(GraphWork g, uint32_t level) {
  const size_t threads = size_t{gridDim.x} * blockDim.x, me = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const unsigned lane = threadIdx.x % 32;
  for (size_t first = me - lane; first < g.vertices; first += threads) {
    const size_t v = first + lane;
    uint64_t begin = 0, end = 0;
    if (v < g.vertices && g.levels[v] == level) begin = g.offsets[v], end = g.offsets[v + 1];
    const unsigned count = begin == end ? 0 : static_cast<unsigned>((end - 1) / kPieceEdges - begin / kPieceEdges + 1);
    unsigned before = count;
    for (int far = 1; far < 32; far *= 2) {
      const unsigned other = __shfl_up_sync(0xffffffffu, before, far);
      if (lane >= static_cast<unsigned>(far)) before += other;
    }
    const unsigned all = __shfl_sync(0xffffffffu, before, 31);
    if (all == 0) continue;
    unsigned long long at = 0;
    if (lane == 0) at = atomicAdd(g.n_pieces, static_cast<unsigned long long>(all));
    at = __shfl_sync(0xffffffffu, at, 0) + before - count;
    for (unsigned i = 0; i < count; ++i) {
      const uint64_t next = (begin / kPieceEdges + 1) * kPieceEdges, to = next < end ? next : end;
      g.pieces[at + i] = (to - begin) << kBegin | begin;
      begin = to;
    }
  }
}

__device__ void see(const GraphWork& g, uint32_t vertex, uint32_t level) {
  // Threads that race here store the same value.
  if (*const_cast<volatile uint32_t*>(&g.levels[vertex]) == UINT32_MAX) g.levels[vertex] = level + 1;
}

__global__ void __launch_bounds__(256, 3) asking_kernel(device_region<uint32_t> edges, GraphWork g, size_t n_pieces,
                                                        uint32_t level, unsigned groups, PagingResult* result) {
  warp_group<uint32_t> group(edges, kPatience, kLongest);
  const unsigned warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  const size_t each = (n_pieces + groups - 1) / groups, first = warp * each;
  if (warp >= groups || first >= n_pieces) return;
  const auto ranges = [&g, first](size_t i) {
    const unsigned long long piece = g.pieces[first + i];
    return elements{begin_of(piece), count_of(piece)};
  };
  const auto visit = [&g, level](size_t, const uint32_t* at, size_t, size_t n, uint32_t lane, uint32_t lanes) {
    for (size_t k = lane; k < n; k += lanes) see(g, at[k], level);
  };
  const Gathered got = group.visit(ranges, min(each, n_pieces - first), kPieceEdges, visit);
  if (!got && threadIdx.x % 32 == 0) atomicAdd_system(&result->refused[static_cast<unsigned>(got.answer) % 16], 1ull);
}

__global__ void plain_kernel(const uint32_t* edges, GraphWork g, size_t n_pieces, uint32_t level, uint64_t from,
                             uint64_t to) {
  const size_t warps = size_t{gridDim.x} * blockDim.x / 32;
  for (size_t i = (size_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32; i < n_pieces; i += warps) {
    const uint64_t begin = begin_of(g.pieces[i]), n = count_of(g.pieces[i]);
    if (begin < from || begin >= to) continue;  // no piece crosses the end of a block
    for (size_t k = threadIdx.x % 32; k < n; k += 32) see(g, edges[begin + k], level);
  }
}

__global__ void mark_kernel(GraphWork g, size_t n_pieces, unsigned char* marks) {
  const size_t threads = size_t{gridDim.x} * blockDim.x;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n_pieces; i += threads)
    marks[begin_of(g.pieces[i]) * 4 / kPagedBlock] = 1;
}

// Returns the row of an edge: the last row that begins at the edge or before it.
__device__ size_t row_of(const RankWork& w, uint64_t edge) {
  size_t low = 0, high = w.vertices;
  while (high - low > 1) {
    const size_t middle = low + (high - low) / 2;
    (w.offsets[middle] <= edge ? low : high) = middle;
  }
  return low;
}

// This thread block adds the edges [from, to), one piece per warp at a time.
__device__ void add_rows(const RankWork& w, const uint32_t* edges, uint64_t from, uint64_t to) {
  constexpr uint64_t kPiece = 2048;
  const unsigned lane = threadIdx.x % 32;
  for (uint64_t begin = from + threadIdx.x / 32 * kPiece; begin < to; begin += blockDim.x / 32 * kPiece) {
    const uint64_t end = min(begin + kPiece, to);
    size_t v = row_of(w, begin);
    for (uint64_t at = begin; at < end; ++v) {
      const uint64_t last = min(w.offsets[v + 1], end);
      unsigned long long sum = 0;
      for (uint64_t e = at + lane; e < last; e += 32) sum += w.shares[edges[e]];
      for (int far = 16; far > 0; far /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, far);
      if (lane == 0 && last > at) atomicAdd(&w.sums[v], sum);
      at = max(at, last);
    }
  }
}

__global__ void __launch_bounds__(512)
    rank_asking_kernel(device_region<uint32_t> edges, RankWork w, PagingResult* result) {
  constexpr uint64_t kEach = kPagedBlock / 4;
  block_group<uint32_t> group(edges, kPatience, kLongest);
  const uint64_t all = w.offsets[w.vertices];
  for (uint64_t first = blockIdx.x * kEach; first < all; first += gridDim.x * kEach) {
    const uint64_t count = min(kEach, all - first);
    const auto pin = group.acquire(first, count);
    if (!pin) {
      if (threadIdx.x == 0) atomicAdd_system(&result->refused[static_cast<unsigned>(pin.answer()) % 16], 1ull);
      return;
    }
    add_rows(w, edges.data(), first, first + count);
  }
}

__global__ void __launch_bounds__(512)
    rank_plain_kernel(const uint32_t* edges, RankWork w, uint64_t from, uint64_t to) {
  constexpr uint64_t kEach = kPagedBlock / 4;
  to = min(to, w.offsets[w.vertices]);
  for (uint64_t first = from + blockIdx.x * kEach; first < to; first += gridDim.x * kEach)
    add_rows(w, edges, first, min(first + kEach, to));
}

__global__ void next_kernel(RankWork w, const uint32_t* rows, uint64_t* shares) {
  const size_t threads = size_t{gridDim.x} * blockDim.x;
  for (size_t v = size_t{blockIdx.x} * blockDim.x + threadIdx.x; v < w.vertices; v += threads) {
    shares[v] = share_of(w.sums[v], rows[v]);
    w.sums[v] = 0;
  }
}

cudaStream_t of(void* stream) {
  return static_cast<cudaStream_t>(stream);
}

}  // namespace

void collect(void* stream, const GraphWork& graph, uint32_t level) {
  collect_kernel<<<kBlocks, 256, 0, of(stream)>>>(graph, level);
}

void walk_asking(void* stream, const vmem_kernel_view& edges, const GraphWork& graph, size_t n_pieces, uint32_t level,
                 unsigned groups, PagingResult* result) {
  asking_kernel<<<(groups + 7) / 8, 256, 0, of(stream)>>>(device_region<uint32_t>(edges), graph, n_pieces, level,
                                                          groups, result);
}

void walk_plain(void* stream, const uint32_t* edges, const GraphWork& graph, size_t n_pieces, uint32_t level,
                uint64_t from, uint64_t to) {
  plain_kernel<<<kBlocks, 256, 0, of(stream)>>>(edges, graph, n_pieces, level, from, to);
}

void mark_blocks(void* stream, const GraphWork& graph, size_t n_pieces, unsigned char* marks) {
  mark_kernel<<<kBlocks, 256, 0, of(stream)>>>(graph, n_pieces, marks);
}

void rank_asking(void* stream, const vmem_kernel_view& edges, const RankWork& work, unsigned groups,
                 PagingResult* result) {
  rank_asking_kernel<<<groups, 512, 0, of(stream)>>>(device_region<uint32_t>(edges), work, result);
}

void rank_plain(void* stream, const uint32_t* edges, const RankWork& work, uint64_t from, uint64_t to) {
  rank_plain_kernel<<<kBlocks / 2, 512, 0, of(stream)>>>(edges, work, from, to);
}

void next_pass(void* stream, const RankWork& work, const uint32_t* rows, uint64_t* shares) {
  next_kernel<<<kBlocks, 256, 0, of(stream)>>>(work, rows, shares);
}

void load_graph() {
  cudaFuncAttributes ignored;
  cudaFuncGetAttributes(&ignored, collect_kernel);
  cudaFuncGetAttributes(&ignored, asking_kernel);
  cudaFuncGetAttributes(&ignored, plain_kernel);
  cudaFuncGetAttributes(&ignored, mark_kernel);
  cudaFuncGetAttributes(&ignored, rank_asking_kernel);
  cudaFuncGetAttributes(&ignored, rank_plain_kernel);
  cudaFuncGetAttributes(&ignored, next_kernel);
}

}  // namespace vmem::gpu
