// vmem-bfs: breadth-first search in a graph whose edges are four times larger than the memory it
// may use.
//
// The edges lie in a region, in CSR form; offsets and levels in ordinary memory. The search walks a
// frontier in chunks. It leases the edge ranges of a chunk together, so that their blocks are read
// in parallel, and prefetches those of the next chunk. The graph comes from a file (an edge list or
// Matrix Market) or is generated.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "api/memory_limit.h"
#include "common/command_line.h"
#include "common/edges.h"
#include "common/input.h"
#include "common/own_files.h"
#include "common/progress.h"
#include "common/rmat.h"
#include "vmem/vmem.hpp"

namespace {

constexpr uint32_t kUnseen = UINT32_MAX;
constexpr uint64_t kBlock = 64 << 10;  // small: a frontier of few vertices reads few edges of a block
constexpr uint64_t kOfAVertex = 24;    // bytes of memory: two offsets, its level, its place in a frontier
using Levels = std::vector<uint32_t>;

struct Settings {
  rmat::Generator graph{21, 16, false};
  std::string file, output;
  const input::File* given = nullptr;  // `file`, open; null: the graph is generated
  bool undirected = false;
  uint64_t budget = 0;
  uint32_t source = 0;  // for R-MAT: the vertex with the most edges
  bool spoil = false;
};

struct Graph {
  std::vector<uint64_t> offsets;  // where each vertex's edges begin; the last is the number of edges
  const uint32_t* edges;
};

// Vertices of the frontier up to `end`, and the byte ranges of their edges.
struct Chunk {
  size_t end;
  std::vector<vmem_range> ranges;
};

// Joins ranges whose blocks are equal or adjacent. A chunk's blocks hold at most `room` bytes, or
// one vertex.
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
  Levels levels(g.offsets.size() - 1, kUnseen), frontier{s.source}, reached;
  levels[s.source] = 0;
  Progress progress("searching", g.offsets.back());
  for (uint32_t level = 1; !frontier.empty(); ++level) {
    Chunk now = chunk_from(g, frontier, 0, s.budget / 8);
    for (size_t i = 0; i < frontier.size();) {
      Chunk next = chunk_from(g, frontier, now.end, s.budget / 8);
      const auto& ranges = now.ranges;
      if (!ranges.empty()) vmem::check(vmem_acquire_ranges(ranges.data(), ranges.size(), VMEM_HOST, nullptr));
      for (const vmem_range& r : next.ranges) vmem::check(vmem_prefetch(r.ptr, r.size, VMEM_HOST, nullptr));
      const uint64_t before = *visited;
      for (; i < now.end; ++i) {
        for (uint64_t e = g.offsets[frontier[i]]; e < g.offsets[frontier[i] + 1]; ++e, ++*visited) {
          if (levels[g.edges[e]] != kUnseen) continue;
          levels[g.edges[e]] = level;
          reached.push_back(g.edges[e]);
        }
      }
      progress.add(*visited - before);
      if (!ranges.empty()) vmem::check(vmem_release_ranges(ranges.data(), ranges.size(), nullptr));
      now = std::move(next);
    }
    // Put the frontier into the order of the edges. A scan of all vertices is cheaper than a sort
    // of many; few levels have many.
    if (reached.size() > levels.size() / 16) {
      reached.clear();
      for (uint32_t v = 0; v < levels.size(); ++v) {
        if (levels[v] == level) reached.push_back(v);
      }
    } else {
      std::sort(reached.begin(), reached.end());
    }
    frontier.swap(reached);
    reached.clear();
  }
  return levels;
}

// Calls edge(from, to) for each edge; returns the number of vertices of a file. plainly: uses the
// second reader.
template <typename Edge>
uint64_t each_edge(const Settings& s, bool plainly, Edge edge) {
  if (s.given != nullptr) {
    const auto both = [&](uint32_t from, uint32_t to) {
      edge(from, to);
      if (s.undirected && from != to) edge(to, from);
    };
    if (!plainly) return edges::read(*s.given, both);
    edges::read_plainly(*s.given, both);
    return 0;
  }
  std::vector<uint32_t> row;
  for (uint32_t v = 0; v < s.graph.vertices(); ++v) {
    row.resize(s.graph.degree_of(v));
    s.graph.edges_of(v, row.data(), row.size());
    for (const uint32_t to : row) edge(v, to);
  }
  return s.graph.vertices();
}

// Returns where each vertex's edges begin.
std::vector<uint64_t> offsets_of(const Settings& s) {
  std::vector<uint64_t> offsets{0};
  if (s.given == nullptr) {
    for (uint64_t v = 0; v < s.graph.vertices(); ++v) offsets.push_back(offsets.back() + s.graph.degree_of(v));
    return offsets;
  }
  const Progress progress("counting the edges of each vertex");
  const uint64_t most = vmem::api::usable_memory("") / kOfAVertex;
  const auto grow = [&](uint64_t vertices) {
    if (vertices > most)
      throw input::Refused(s.file + " has a vertex " + std::to_string(vertices - 1) + ": memory is there for " +
                           std::to_string(most));
    if (offsets.size() < vertices + 1) offsets.resize(vertices + 1);
  };
  grow(each_edge(s, false, [&](uint32_t from, uint32_t to) {
    grow(uint64_t{std::max(from, to)} + 1);
    ++offsets[uint64_t{from} + 1];
  }));
  for (size_t v = 1; v < offsets.size(); ++v) offsets[v] += offsets[v - 1];
  if (offsets.back() == 0) throw input::Refused(s.file + " has no edges");
  return offsets;
}

void place_edges(const Graph& g, const Settings& s, uint32_t* to) {
  std::vector<uint64_t> next(g.offsets.begin(), g.offsets.end() - 1);
  Progress progress("placing edges", g.offsets.back());
  uint64_t unreported = 0;
  each_edge(s, false, [&](uint32_t from, uint32_t v) {
    if (s.given != nullptr && (std::max(from, v) >= next.size() || next[from] >= g.offsets[from + 1]))
      throw s.given->changed();
    to[next[from]++] = v;
    if (++unreported == 1 << 16) progress.add(std::exchange(unreported, 0));
  });
}

// Counts wrong levels. Levels are right if the source has 0, no edge spans more than one level, and
// each vertex reached has an edge from the level before. The check takes the edges one by one from
// their source and keeps none in memory. A file is read by a second reader, which must find the
// same number of edges.
uint64_t mismatches(const Settings& s, const Graph& g, const Levels& levels) {
  const Progress progress("verifying");
  std::vector<bool> reached(levels.size());
  uint64_t wrong = levels[s.source] != 0, edges = 0;
  each_edge(s, true, [&](uint32_t from, uint32_t to) {
    ++edges;
    if (std::max(from, to) >= levels.size()) {
      ++wrong;
    } else if (levels[from] != kUnseen) {
      wrong += levels[to] > levels[from] + 1;
      if (levels[to] == levels[from] + 1) reached[to] = true;
    }
  });
  for (size_t v = 0; v < levels.size(); ++v) wrong += levels[v] != kUnseen && v != s.source && !reached[v];
  return wrong + (edges != g.offsets.back());
}

void write_levels(ownfiles::OwnFile& to, const std::string& path, const Levels& levels) {
  FILE* file = fopen(to.again().c_str(), "we");
  if (file == nullptr) throw std::system_error(errno, std::generic_category(), path);
  fprintf(file, "# vertex, edges from the source\n");
  for (size_t v = 0; v < levels.size(); ++v) {
    if (levels[v] != kUnseen) fprintf(file, "%zu %u\n", v, levels[v]);
  }
  const bool failed = ferror(file) != 0;
  if (fclose(file) != 0 || failed) throw std::runtime_error(path + " could not be written");
  to.put_as_new(path);
}

int run(Settings s) {
  std::optional<input::File> file;
  if (!s.file.empty()) s.given = &file.emplace(s.file);
  std::optional<ownfiles::OwnFile> output;
  if (!s.output.empty()) {
    ownfiles::handle_signals();
    ownfiles::as_named([&] {
      ownfiles::must_be_new(s.output);
      output.emplace(s.output);
    });
  }
  Graph g{offsets_of(s), nullptr};
  if (s.source >= g.offsets.size() - 1)
    throw input::Refused("there is no vertex " + std::to_string(s.source) + ": the last is " +
                         std::to_string(g.offsets.size() - 2));
  const uint64_t bytes = g.offsets.back() * 4;
  if (s.budget == 0) s.budget = std::max<uint64_t>(bytes / 4, 8 << 20);
  vmem::set("host_budget", std::to_string(s.budget));
  vmem::set("block_size", std::to_string(kBlock));
  const vmem::region region(bytes, VMEM_HOST_ONLY);
  place_edges(g, s, static_cast<uint32_t*>(region.data()));
  g.edges = static_cast<const uint32_t*>(region.data());
  region.evict();  // the search begins with nothing in memory
  printf("vmem-bfs: %zu vertices, %zu edges in %.1f MB, memory budget %.1f MB\n", g.offsets.size() - 1,
         g.offsets.back(), 1e-6 * static_cast<double>(bytes), 1e-6 * static_cast<double>(s.budget));
  const uint64_t read_before = vmem::stats().read_bytes;
  const auto start = std::chrono::steady_clock::now();
  uint64_t visited = 0;
  Levels levels = search(g, s, &visited);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const auto read = static_cast<double>(vmem::stats().read_bytes - read_before);
  printf("vmem-bfs: %zu edges visited in %.2f s; %.1f MB read, %.2f bytes for each byte of them\n", visited, seconds,
         1e-6 * read, visited != 0 ? read / 4 / static_cast<double>(visited) : 0);
  if (s.spoil) ++levels[s.source];
  size_t seen = 0;
  uint32_t far = 0;
  for (const uint32_t level : levels) {
    seen += level != kUnseen;
    if (level != kUnseen) far = std::max(far, level);
  }
  const uint64_t wrong = mismatches(s, g, levels);
  printf("vmem-bfs: %zu vertices can be reached from %u, the farthest over %u edges\n", seen, s.source, far);
  printf("vmem-bfs: verified: %zu mismatches in %zu levels\n", wrong, levels.size());
  if (wrong == 0 && output) write_levels(*output, s.output, levels);
  return wrong == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Breadth-first search in a graph whose edges are larger than the memory it may use."};
  Settings s;
  app.add_option("file", s.file, "graph: an edge list (two vertices a line) or Matrix Market; without it one is made");
  app.add_flag("--undirected", s.undirected, "edges of the file lead both ways");
  app.add_option("--source", s.source, "vertex where the search begins (0)");
  app.add_option("-o,--output", s.output, "new file for the vertices that were reached and their levels");
  app.add_option("--scale", s.graph.scale, "log2 of the number of vertices (21)")->check(CLI::Range(8, 30));
  app.add_option("--degree", s.graph.degree, "edges of a vertex, on average (16)")->check(CLI::Range(1, 1024));
  app.add_flag("--uniform", s.graph.uniform, "any edge is as likely as any other; otherwise an R-MAT graph");
  app.add_option("--budget", s.budget, "host memory (default: a quarter of the edges)")
      ->transform(size_of(vmem::core::Option::host_budget));
  app.add_flag("--spoil", s.spoil, "change a result before it is verified: exit code 1");
  return run_program(app, "vmem-bfs", argc, argv, [&] { return run(s); });
}
