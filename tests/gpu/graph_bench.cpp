// Breadth-first search and PageRank on a GPU. The edges of the graph are four times the device
// budget, and kernels page them in. Compared with leases, the host alone, managed memory, and all
// edges on the device. The levels and ranks of all vertices are checked against the host's results.
// Usage: graph_bench [--scale N] [--folder F]: an R-MAT graph of 2^N vertices with 16 edges each;
// the edges are also read from the disk of F.
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "client_bench.h"
#include "common/hooks.h"
#include "common/rmat.h"
#include "device/cuda/cuda_device.h"
#include "gpu_limits.h"
#include "graph_work.h"

namespace {

using namespace gpuclients;
using vmem::gpu::GraphWork;
using vmem::gpu::kPagedBlock;
using vmem::gpu::PagingResult;
using vmem::gpu::RankWork;

constexpr unsigned kGroups = 2112;  // warps that request blocks
constexpr unsigned kRankGroups = 132, kPasses = 3;

class Bench {
 public:
  Bench(unsigned scale, std::string folder) : graph_{scale, 16, false}, folder_(std::move(folder)) {
    MUST(cudaSetDevice(0));
    MUST(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    result_ = new (pinned<char>(4096).release()) PagingResult;
    n_pieces_ = pinned<unsigned long long>(1);
    vmem::api::test_hooks().make_devices = vmem::device::make_cuda_handles;
    vmem::gpu::load_graph();
  }

  bool run() {
    make();
    if (!room()) return true;
    in_host_memory();
    on_disk();
    bounds();
    return right_;
  }

 private:
  using Walk = std::function<void(size_t pieces, uint32_t level)>;

  // ---- the graph
  void make() {
    const double begin = now();
    offsets_.resize(graph_.vertices() + 1);
    for (size_t v = 0; v < graph_.vertices(); ++v) offsets_[v + 1] = offsets_[v] + graph_.degree_of(v);
    bytes_ = (offsets_.back() * 4 + kPagedBlock - 1) / kPagedBlock * kPagedBlock;
    device_ = bytes_ / 4 / kPagedBlock * kPagedBlock;
    edges_.resize(bytes_ / 4);
    in_parts([&](size_t v) { graph_.edges_of(v, &edges_[offsets_[v]], offsets_[v + 1] - offsets_[v]); });
    const double made = now();
    by_host();
    std::printf("%zu vertices, %zu edges in %zu MiB, made in %.1f s; kernels may have %zu MiB of them\n",
                static_cast<size_t>(graph_.vertices()), static_cast<size_t>(offsets_.back()), bytes_ / kMiB,
                made - begin, device_ / kMiB);
    std::printf("%-52s %9.2f ms: %zu edges visited, %u levels\n", "16 threads of the host, all in memory",
                1e3 * (now() - made), visited_, levels_of_host_);
    ranks_by_host();
  }
  // Counts the rows that each vertex is in, and runs the passes.
  void ranks_by_host() {
    rows_.assign(graph_.vertices(), 0);
    on_threads(offsets_.back(), [&](size_t begin, size_t end, unsigned) {
      for (size_t e = begin; e < end; ++e) std::atomic_ref(rows_[edges_[e]]).fetch_add(1, std::memory_order_relaxed);
    });
    const double begin = now();
    std::vector<uint64_t> sums(graph_.vertices());
    shares_ = first_shares();
    for (unsigned pass = 0; pass < kPasses; ++pass) {
      in_parts([&](size_t v) {
        sums[v] = 0;
        for (size_t e = offsets_[v]; e < offsets_[v + 1]; ++e) sums[v] += shares_[edges_[e]];
      });
      in_parts([&](size_t v) { shares_[v] = vmem::gpu::share_of(sums[v], rows_[v]); });
    }
    std::printf("%-52s %9.2f ms: %u passes\n", "PageRank, 16 threads of the host, all in memory", 1e3 * (now() - begin),
                kPasses);
  }
  std::vector<uint64_t> first_shares() const {
    std::vector<uint64_t> shares(graph_.vertices());
    for (size_t v = 0; v < shares.size(); ++v) shares[v] = vmem::gpu::share_of(vmem::gpu::kRankOne, rows_[v]);
    return shares;
  }
  // Hands out small parts in turn, because the rows with many edges are all at the beginning.
  template <typename Body>
  void in_parts(Body body) {
    std::atomic<size_t> next{0};
    on_threads(kThreads, [&](size_t, size_t, unsigned) {
      constexpr size_t kPart = 1024;
      for (size_t from; (from = next.fetch_add(kPart)) < graph_.vertices();)
        for (size_t v = from; v < std::min<size_t>(from + kPart, graph_.vertices()); ++v) body(v);
    });
  }
  // A vertex gets the same level whichever thread reaches it first.
  void by_host() {
    levels_.assign(graph_.vertices(), UINT32_MAX);
    levels_[0] = 0;
    std::atomic<size_t> visited{0};
    std::atomic<bool> more{true};
    for (uint32_t level = 0; more.exchange(false); ++level) {
      std::atomic<size_t> next{0};
      on_threads(kThreads, [&](size_t, size_t, unsigned) {
        constexpr size_t kPart = 4096;
        size_t mine = 0;
        for (size_t from; (from = next.fetch_add(kPart)) < levels_.size();)
          for (size_t v = from; v < std::min(from + kPart, levels_.size()); ++v) {
            if (std::atomic_ref(levels_[v]).load(std::memory_order_relaxed) != level) continue;
            mine += offsets_[v + 1] - offsets_[v];
            for (size_t e = offsets_[v]; e < offsets_[v + 1]; ++e) {
              std::atomic_ref seen(levels_[edges_[e]]);
              if (seen.load(std::memory_order_relaxed) == UINT32_MAX) seen.store(level + 1, std::memory_order_relaxed);
            }
          }
        visited += mine;
        if (mine != 0) more = true;
      });
      levels_of_host_ = level;
    }
    visited_ = visited;
  }
  bool room() {
    const size_t vertices = graph_.vertices(), pieces = 2 * vertices + offsets_.back() / vmem::gpu::kPieceEdges;
    size_t free_bytes = 0, total = 0;
    MUST(cudaMemGetInfo(&free_bytes, &total));
    if (free_bytes < 2 * bytes_ + 32 * vertices + 8 * pieces) {
      std::printf("too little memory is free on the device\n");
      return false;
    }
    device_offsets_ = on_device<uint64_t>(vertices + 1);
    device_levels_ = on_device<uint32_t>(vertices);
    pieces_ = on_device<unsigned long long>(pieces);
    count_ = on_device<unsigned long long>(1);
    marks_ = on_device<unsigned char>(bytes_ / kPagedBlock);
    device_rows_ = on_device<uint32_t>(vertices);
    device_shares_ = on_device<uint64_t>(vertices);
    sums_ = on_device<unsigned long long>(vertices);
    MUST(cudaMemcpy(device_offsets_.get(), offsets_.data(), 8 * offsets_.size(), cudaMemcpyHostToDevice));
    MUST(cudaMemcpy(device_rows_.get(), rows_.data(), 4 * rows_.size(), cudaMemcpyHostToDevice));
    return true;
  }
  GraphWork work() const {
    return {device_offsets_.get(), graph_.vertices(), device_levels_.get(), pieces_.get(), count_.get()};
  }

  // ---- a search
  void search(const char* way, bool tier, const Walk& walk) {
    *result_ = PagingResult{};
    MUST(cudaMemset(device_levels_.get(), 0xff, 4 * graph_.vertices()));
    MUST(cudaMemset(device_levels_.get(), 0, 4));
    MUST(cudaDeviceSynchronize());
    const uint64_t in = tier ? stats().in_bytes : 0, read = tier ? vmem::stats().read_bytes : 0;
    const double begin = now();
    for (uint32_t level = 0;; ++level) {
      MUST(cudaMemsetAsync(count_.get(), 0, 8, stream_));
      vmem::gpu::collect(stream_, work(), level);
      MUST(cudaMemcpyAsync(n_pieces_.get(), count_.get(), 8, cudaMemcpyDeviceToHost, stream_));
      finish(stream_, "collecting");
      if (*n_pieces_ == 0) break;
      walk(*n_pieces_, level);
      MUST(cudaGetLastError());
      finish(stream_, way);
    }
    const double took = now() - begin;
    const double came = tier ? static_cast<double>(stats().in_bytes - in) : 0;
    const double bytes_read = tier ? static_cast<double>(vmem::stats().read_bytes - read) : 0;
    std::printf("%-52s %9.2f ms %8.2f GB/s of edges, %7.0f blocks in, %6.2f GB/s; %6.2f GB/s from disk\n", way,
                took * 1e3, 4 * static_cast<double>(visited_) / took / 1e9, came / kPagedBlock, came / took / 1e9,
                bytes_read / took / 1e9);
    verify(way);
  }
  void verify(const char* way) {
    std::vector<uint32_t> got(graph_.vertices());
    MUST(cudaMemcpy(got.data(), device_levels_.get(), 4 * got.size(), cudaMemcpyDeviceToHost));
    size_t wrong = 0;
    for (size_t v = 0; v < got.size(); ++v) wrong += got[v] != levels_[v];
    for (unsigned a = 0; a < 16; ++a)
      if (result_->refused[a] != 0) std::printf("WRONG: %llu groups were told %u\n", result_->refused[a], a), ++wrong;
    if (wrong != 0) std::printf("WRONG: %s: %zu vertices\n", way, wrong);
    right_ = right_ && wrong == 0;
  }

  // ---- ranks
  RankWork rank_work() const { return {device_offsets_.get(), graph_.vertices(), device_shares_.get(), sums_.get()}; }
  void rank(const char* way, bool tier, const std::function<void()>& pass) {
    const size_t n = graph_.vertices();
    *result_ = PagingResult{};
    {
      const std::vector<uint64_t> shares = first_shares();
      MUST(cudaMemcpy(device_shares_.get(), shares.data(), 8 * n, cudaMemcpyHostToDevice));
    }
    MUST(cudaMemset(sums_.get(), 0, 8 * n));
    MUST(cudaDeviceSynchronize());
    const uint64_t in = tier ? stats().in_bytes : 0, read = tier ? vmem::stats().read_bytes : 0;
    const double begin = now();
    for (unsigned i = 0; i < kPasses; ++i) {
      pass();
      vmem::gpu::next_pass(stream_, rank_work(), device_rows_.get(), device_shares_.get());
      MUST(cudaGetLastError());
      finish(stream_, way);
    }
    const double took = now() - begin;
    const double came = tier ? static_cast<double>(stats().in_bytes - in) : 0;
    const double bytes_read = tier ? static_cast<double>(vmem::stats().read_bytes - read) : 0;
    std::printf("%-52s %9.2f ms %8.2f GB/s of edges, %7.0f blocks in, %6.2f GB/s; %6.2f GB/s from disk\n", way,
                took * 1e3, 4.0 * kPasses * static_cast<double>(offsets_.back()) / took / 1e9, came / kPagedBlock,
                came / took / 1e9, bytes_read / took / 1e9);
    std::vector<uint64_t> got(n);
    MUST(cudaMemcpy(got.data(), device_shares_.get(), 8 * n, cudaMemcpyDeviceToHost));
    size_t wrong = 0;
    for (size_t v = 0; v < n; ++v) wrong += got[v] != shares_[v];
    for (unsigned a = 0; a < 16; ++a)
      if (result_->refused[a] != 0) std::printf("WRONG: %llu groups were told %u\n", result_->refused[a], a), ++wrong;
    if (wrong != 0) std::printf("WRONG: %s: %zu ranks\n", way, wrong);
    right_ = right_ && wrong == 0;
  }
  void rank_by_asking(const char* way, const void* edges) {
    const vmem::kernel_range open(edges, bytes_, VMEM_READ, 0, stream_, device_);
    rank(way, true, [&] { vmem::gpu::rank_asking(stream_, open.view(), rank_work(), kRankGroups, result_); });
  }
  void rank_by_leases(const char* way, const void* edges) {
    const size_t step = std::max(device_ / kPagedBlock / 4, size_t{1}) * kPagedBlock;
    rank(way, true, [&] {
      for (size_t at = 0; at < bytes_; at += step) {
        const char* const from = static_cast<const char*>(edges) + at;
        const size_t n = std::min(step, bytes_ - at), rest = bytes_ - at - n;
        vmem::check(vmem_acquire(from, n, VMEM_READ, 0, stream_));
        if (rest != 0) vmem::check(vmem_prefetch(from + n, std::min(step, rest), 0, nullptr));
        vmem::gpu::rank_plain(stream_, static_cast<const uint32_t*>(edges), rank_work(), at / 4, (at + n) / 4);
        vmem::check(vmem_release(from, n, stream_));
      }
    });
  }

  // ---- ways
  void asking(const char* way, const void* edges) {
    const vmem::kernel_range open(edges, bytes_, VMEM_READ, 0, stream_, device_);
    search(way, true, [&](size_t pieces, uint32_t level) {
      vmem::gpu::walk_asking(stream_, open.view(), work(), pieces, level, kGroups, result_);
    });
  }
  // Leases the blocks of a level in turn, a quarter of the budget at a time, and prefetches the
  // next ones.
  void leasing(const char* way, const void* edges) {
    const size_t blocks = bytes_ / kPagedBlock, most = std::max<size_t>(device_ / kPagedBlock / 4, 1);
    std::vector<unsigned char> marks(blocks);
    search(way, true, [&](size_t pieces, uint32_t level) {
      MUST(cudaMemsetAsync(marks_.get(), 0, blocks, stream_));
      vmem::gpu::mark_blocks(stream_, work(), pieces, marks_.get());
      MUST(cudaMemcpyAsync(marks.data(), marks_.get(), blocks, cudaMemcpyDeviceToHost, stream_));
      finish(stream_, "marking");
      size_t from = 0, to = 0;
      std::vector<vmem_range> ranges = some(edges, marks, 0, most, &to);
      while (!ranges.empty()) {
        vmem::check(vmem_acquire_ranges(ranges.data(), ranges.size(), 0, stream_));
        size_t end = 0;
        const std::vector<vmem_range> next = some(edges, marks, to, most, &end);
        for (const vmem_range& r : next) vmem::check(vmem_prefetch(r.ptr, r.size, 0, nullptr));
        vmem::gpu::walk_plain(stream_, static_cast<const uint32_t*>(edges), work(), pieces, level,
                              from * kPagedBlock / 4, to * kPagedBlock / 4);
        vmem::check(vmem_release_ranges(ranges.data(), ranges.size(), stream_));
        ranges = next, from = to, to = end;
      }
    });
  }
  // Returns as many marked blocks from `from` on; *end: behind the last.
  static std::vector<vmem_range> some(const void* edges, const std::vector<unsigned char>& marks, size_t from,
                                      size_t most, size_t* end) {
    std::vector<vmem_range> ranges;
    for (*end = from; *end < marks.size() && ranges.size() < most; ++*end)
      if (marks[*end] != 0)
        ranges.push_back({static_cast<const char*>(edges) + *end * kPagedBlock, kPagedBlock, VMEM_READ, 0});
    return ranges;
  }
  void in_host_memory() {
    start(2 * device_, bytes_ + bytes_ / 2);
    {
      vmem::region region(bytes_);
      on_threads(bytes_, [&](size_t begin, size_t end, unsigned) {
        memcpy(static_cast<char*>(region.data()) + begin, reinterpret_cast<const char*>(edges_.data()) + begin,
               end - begin);
      });
      asking("asking, edges in host memory", region.data());
      leasing("leases for each level, edges in host memory", region.data());
      asking("asking again", region.data());
      rank_by_asking("PageRank, asking, edges in host memory", region.data());
      rank_by_leases("PageRank, leases in turn, edges in host memory", region.data());
    }
    vmem_shutdown();
  }
  void on_disk() {
    const std::string path = folder_ + "/graph_bench." + std::to_string(getpid());
    const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_DIRECT | O_CLOEXEC, 0600);
    if (fd < 0) {
      std::printf("no disk: %s: %s\n", path.c_str(), strerror(errno));
      return;
    }
    unlink(path.c_str());
    const size_t step = 64 * kMiB;
    const auto part = pinned<char>(step);
    const double begin = now();
    for (size_t at = 0; at < bytes_; at += step) {
      const size_t n = std::min(step, bytes_ - at);
      memcpy(part.get(), reinterpret_cast<const char*>(edges_.data()) + at, n);
      if (pwrite(fd, part.get(), n, static_cast<off_t>(at)) != static_cast<ssize_t>(n)) fail("pwrite");
    }
    std::printf("%zu MiB written to the disk in %.1f s\n", bytes_ / kMiB, now() - begin);
    start(device_ + device_ / 2, device_);
    vmem::attributes wanted;
    wanted.fd = fd;
    wanted.flags = VMEM_MAP_READ;
    {
      vmem::region region(bytes_, wanted);
      asking("asking, edges on the disk", region.data());
      region.evict(VMEM_SSD);
      leasing("leases for each level, edges on the disk", region.data());
      region.evict(VMEM_SSD);
      rank_by_asking("PageRank, asking, edges on the disk", region.data());
      region.evict(VMEM_SSD);
      rank_by_leases("PageRank, leases in turn, edges on the disk", region.data());
    }
    close(fd);
    vmem_shutdown();
  }
  void bounds() {
    {
      const auto edges = on_device<uint32_t>(bytes_ / 4);
      MUST(cudaMemcpy(edges.get(), edges_.data(), bytes_, cudaMemcpyHostToDevice));
      search("all edges on the device", false, plain(edges.get()));
      rank("PageRank, all edges on the device", false,
           [&] { vmem::gpu::rank_plain(stream_, edges.get(), rank_work(), 0, UINT64_MAX); });
    }
    const uint64_t limit = vmem::gpu::managed_limit();
    if (bytes_ > limit) {
      std::printf("no managed memory: the edges are more than %llu MiB\n",
                  static_cast<unsigned long long>(limit / kMiB));
      return;
    }
    vmem::gpu::require_managed(bytes_, limit);
    void* at = nullptr;
    MUST(cudaMallocManaged(&at, bytes_));
    const OnDevice<void> managed(at);
    on_threads(bytes_, [&](size_t begin, size_t end, unsigned) {
      memcpy(static_cast<char*>(at) + begin, reinterpret_cast<const char*>(edges_.data()) + begin, end - begin);
    });
    search("managed memory, which all fits, at the host first", false, plain(static_cast<const uint32_t*>(at)));
    memcpy(at, edges_.data(), bytes_);  // by the CPU, so that it is in host memory again
    rank("PageRank, managed memory, which all fits, at the host first", false,
         [&] { vmem::gpu::rank_plain(stream_, static_cast<const uint32_t*>(at), rank_work(), 0, UINT64_MAX); });
  }
  Walk plain(const uint32_t* edges) {
    return [this, edges](size_t pieces, uint32_t level) {
      vmem::gpu::walk_plain(stream_, edges, work(), pieces, level, 0, UINT64_MAX);
    };
  }

  const rmat::Generator graph_;
  const std::string folder_;
  std::vector<uint64_t> offsets_;
  std::vector<uint32_t> edges_, levels_, rows_;
  std::vector<uint64_t> shares_;
  size_t bytes_ = 0, device_ = 0, visited_ = 0;
  uint32_t levels_of_host_ = 0;
  cudaStream_t stream_ = nullptr;
  PagingResult* result_ = nullptr;
  std::unique_ptr<unsigned long long, HostFree> n_pieces_;
  OnDevice<uint64_t> device_offsets_, device_shares_;
  OnDevice<uint32_t> device_levels_, device_rows_;
  OnDevice<unsigned long long> pieces_, count_, sums_;
  OnDevice<unsigned char> marks_;
  bool right_ = true;
};

}  // namespace

int main(int argc, char** argv) {
  std::string folder = ".";
  unsigned scale = 25;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (strcmp(argv[i], "--folder") == 0) folder = argv[i + 1];
    if (strcmp(argv[i], "--scale") == 0) scale = static_cast<unsigned>(strtoul(argv[i + 1], nullptr, 10));
  }
  return gpuclients::run_bench([&] { return Bench(scale, folder).run(); });
}
