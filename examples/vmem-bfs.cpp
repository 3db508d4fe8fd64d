// vmem-bfs: breadth-first search in a graph whose edges are four times larger than the memory it may use.
//
// The edges lie in a region, in CSR form; offsets and levels in ordinary memory. A frontier is walked in chunks: a
// chunk's ranges of edges are leased together, so that their blocks are read side by side, and the next one's are
// prefetched.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <queue>
#include <vector>

#include "common/rmat.h"
#include "vmem/vmem.hpp"

namespace {

constexpr uint32_t kUnseen = UINT32_MAX, kSource = 0;  // the vertex with the most edges of an R-MAT
constexpr uint64_t kBlock = 64 << 10;                  // small: a frontier of few vertices reads few edges of a block
using Levels = std::vector<uint32_t>;

struct Settings {
  rmat::Generator graph{21, 16, false};
  uint64_t budget = 0;
  bool spoil = false;
};

struct Graph {
  std::vector<uint64_t> offsets;  // of each vertex's edges; the last is the number of edges
  const uint32_t* edges;
};

// Vertices of the frontier up to `end`, and the ranges of bytes in which their edges lie.
struct Chunk {
  size_t end;
  std::vector<vmem_range> ranges;
};

// Ranges whose blocks are the same or neighbours are one. A chunk's blocks have at most `room` bytes, or one vertex.
Chunk chunk_from(const Graph& g, const Levels& frontier, size_t begin, uint64_t room) {
  Chunk chunk{begin, {}};
  uint64_t blocks = 0, range_from = 0, range_to = 0;
  for (; chunk.end < frontier.size(); ++chunk.end) {
    const uint64_t from = g.offsets[frontier[chunk.end]] * 4, to = g.offsets[frontier[chunk.end] + 1] * 4;
    if (from == to) continue;
    const bool joins = range_to != 0 && from / kBlock <= (range_to - 1) / kBlock + 1;
    const uint64_t more = (to - 1) / kBlock + 1 - (joins ? (range_to - 1) / kBlock + 1 : from / kBlock);
    if (blocks != 0 && (blocks + more) * kBlock > room) break;
    blocks += more;
    if (!joins) chunk.ranges.push_back({g.edges + (range_from = from) / 4, 0, VMEM_READ, 0});
    chunk.ranges.back().size = (range_to = to) - range_from;
  }
  return chunk;
}

Levels search(const Graph& g, const Settings& s, uint64_t* visited) {
  Levels levels(g.offsets.size() - 1, kUnseen), frontier{kSource};
  levels[kSource] = 0;
  for (uint32_t level = 1; !frontier.empty(); ++level) {
    Chunk now = chunk_from(g, frontier, 0, s.budget / 8);
    for (size_t i = 0; i < frontier.size();) {
      Chunk next = chunk_from(g, frontier, now.end, s.budget / 8);
      const auto& ranges = now.ranges;
      if (!ranges.empty()) vmem::check(vmem_acquire_ranges(ranges.data(), ranges.size(), VMEM_HOST, nullptr));
      for (const vmem_range& r : next.ranges) vmem::check(vmem_prefetch(r.ptr, r.size, VMEM_HOST, nullptr));
      for (; i < now.end; ++i) {
        for (uint64_t e = g.offsets[frontier[i]]; e < g.offsets[frontier[i] + 1]; ++e, ++*visited) {
          if (levels[g.edges[e]] == kUnseen) levels[g.edges[e]] = level;
        }
      }
      if (!ranges.empty()) vmem::check(vmem_release_ranges(ranges.data(), ranges.size(), nullptr));
      now = std::move(next);
    }
    frontier.clear();
    for (uint32_t v = 0; v < levels.size(); ++v) {
      if (levels[v] == level) frontier.push_back(v);
    }
  }
  return levels;
}

void make_edges(const Graph& g, const rmat::Generator& make, uint32_t* edges) {
  for (size_t v = 0; v < make.vertices(); ++v) make.edges_of(v, edges + g.offsets[v], g.offsets[v + 1] - g.offsets[v]);
}

// How many levels are not those of a plain search on edges made anew in plain memory.
uint64_t wrong_levels(const Graph& g, const Settings& s, const Levels& levels) {
  Levels right(levels.size(), kUnseen), edges(g.offsets.back());
  make_edges(g, s.graph, edges.data());
  std::queue<uint32_t> queue({kSource});
  for (right[kSource] = 0; !queue.empty(); queue.pop()) {
    for (uint64_t v = queue.front(), e = g.offsets[v]; e < g.offsets[v + 1]; ++e) {
      if (right[edges[e]] != kUnseen) continue;
      right[edges[e]] = right[v] + 1;
      queue.push(edges[e]);
    }
  }
  uint64_t wrong = 0;
  for (size_t v = 0; v < levels.size(); ++v) wrong += levels[v] != right[v];
  return wrong;
}

int run(Settings s) {
  Graph g{{0}, nullptr};
  for (uint64_t v = 0; v < s.graph.vertices(); ++v) g.offsets.push_back(g.offsets.back() + s.graph.degree_of(v));
  const uint64_t bytes = g.offsets.back() * 4;
  if (s.budget == 0) s.budget = std::max<uint64_t>(bytes / 4, 8 << 20);
  vmem::set("host_budget", std::to_string(s.budget));
  vmem::set("block_size", std::to_string(kBlock));
  const vmem::region region(bytes, VMEM_HOST_ONLY);
  make_edges(g, s.graph, static_cast<uint32_t*>(region.data()));
  g.edges = static_cast<const uint32_t*>(region.data());
  region.evict();  // the search begins with nothing in memory
  printf("vmem-bfs: %zu vertices, %zu edges in %.1f MB, memory budget %.1f MB\n", s.graph.vertices(), g.offsets.back(),
         1e-6 * static_cast<double>(bytes), 1e-6 * static_cast<double>(s.budget));
  const uint64_t read_before = vmem::stats().read_bytes;
  const auto start = std::chrono::steady_clock::now();
  uint64_t visited = 0;
  Levels levels = search(g, s, &visited);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const auto read = static_cast<double>(vmem::stats().read_bytes - read_before);
  printf("vmem-bfs: %zu edges visited in %.2f s; %.1f MB read, %.2f bytes for each byte of them\n", visited, seconds,
         1e-6 * read, read / 4 / static_cast<double>(visited));
  if (s.spoil) ++levels[kSource];
  const uint64_t wrong = wrong_levels(g, s, levels);
  printf("vmem-bfs: %s: %zu levels of %zu are not those of a search in plain memory\n", wrong == 0 ? "right" : "WRONG",
         wrong, levels.size());
  return wrong == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Breadth-first search in a graph whose edges are larger than the memory it may use."};
  Settings s;
  app.add_option("--scale", s.graph.scale, "log2 of the number of vertices (21)")->check(CLI::Range(8, 30));
  app.add_option("--degree", s.graph.degree, "edges of a vertex, on average (16)")->check(CLI::Range(1, 1024));
  app.add_flag("--uniform", s.graph.uniform, "any edge is as likely as any other; otherwise an R-MAT graph");
  app.add_option("--budget", s.budget, "host memory (default: a quarter of the edges)")
      ->transform(CLI::AsSizeValue(false));
  app.add_flag("--spoil", s.spoil, "change a result before it is verified: exit code 1");
  CLI11_PARSE(app, argc, argv);
  try {
    return run(s);
  } catch (const std::exception& e) {
    fprintf(stderr, "vmem-bfs: %s\n", e.what());
    return 1;
  }
}
