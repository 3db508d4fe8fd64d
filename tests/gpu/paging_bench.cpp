// The gain from kernels that page data in: they gather rows of a table at random, with the table in
// host memory and on a disk. Compared with the ways that programs have without such kernels. Every
// word of every result is checked. Usage: paging_bench [--folder F] [--table MIB] [--rows MIB]; F
// is on the disk. The device's clock ends every wait of a kernel, and the host's clock every wait
// for a kernel.
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "client_bench.h"
#include "common/hooks.h"
#include "device/cuda/cuda_device.h"
#include "gather_work.h"
#include "gpu_limits.h"
#include "vmem/vmem.hpp"

namespace {

using vmem::gpu::kPagedBlock;
using vmem::gpu::PagingResult;
using vmem::gpu::RowWork;

using namespace gpuclients;

struct Rows {
  std::string name;
  std::vector<uint64_t> ids;
  size_t words;
  size_t bytes() const { return words * 4; }
};

class Bench {
 public:
  Bench(std::string folder, size_t table_mib, size_t rows_mib)
      : folder_(std::move(folder)), table_(table_mib * kMiB), rows_(rows_mib * kMiB), device_(table_ / 4) {
    MUST(cudaSetDevice(0));
    MUST(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    result_ = new (pinned<char>(4096).release()) PagingResult;
    out_ = on_device<uint32_t>(rows_ / 4);
    ids_ = on_device<uint64_t>(rows_ / 512);
    slots_ = on_device<uint64_t>(rows_ / 512);
    for (auto& s : staging_) s = pinned<char>(kStaging);
    for (auto& e : copied_) MUST(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
    vmem::api::test_hooks().make_devices = vmem::device::make_cuda_handles;
  }

  bool run() {
    std::printf("table %zu MiB, kernels may have %zu MiB of it, %zu MiB of rows a time\n", table_ / kMiB,
                device_ / kMiB, rows_ / kMiB);
    in_host_memory();
    on_disk();
    return right_;
  }

 private:
  static constexpr size_t kStaging = 64 * kMiB;

  // ---- rows
  Rows rows(const std::string& name, size_t bytes, size_t table, size_t hot, unsigned percent_hot, size_t all) const {
    Rows r{name, {}, bytes / 4};
    std::mt19937_64 random(7);
    r.ids.resize(all / bytes);
    for (auto& id : r.ids) id = random() % ((random() % 100 < percent_hot ? hot : table) / bytes);
    return r;
  }
  RowWork work(const Rows& r) const { return {ids_.get(), r.ids.size(), r.words, out_.get()}; }

  // ---- waiting and comparing
  void finish(const char* what) { gpuclients::finish(stream_, what); }
  void verify(const Rows& r, const char* what) {
    MUST(cudaMemcpyAsync(ids_.get(), r.ids.data(), 8 * r.ids.size(), cudaMemcpyHostToDevice, stream_));
    vmem::gpu::check_rows(stream_, work(r), result_);
    finish("comparing");
    unsigned long long refused = 0;
    for (const auto n : result_->refused) refused += n;
    if (result_->wrong == 0 && refused == 0) return;
    right_ = false;
    std::printf("WRONG: %s, %s: %llu words", r.name.c_str(), what, result_->wrong);
    for (unsigned a = 0; a < 16; ++a)
      if (result_->refused[a] != 0) std::printf(", %llu groups were told %u", result_->refused[a], a);
    std::printf("\n");
  }
  // One way to get the rows into out_; prints a line with its cost.
  void timed(const Rows& r, const char* way, const std::function<void()>& body) {
    MUST(cudaMemset(out_.get(), 0xff, r.ids.size() * r.bytes()));
    MUST(cudaMemcpy(ids_.get(), r.ids.data(), 8 * r.ids.size(), cudaMemcpyHostToDevice));
    MUST(cudaDeviceSynchronize());
    *result_ = PagingResult{};
    const uint64_t in = tier_runs_ ? stats().in_bytes : 0;
    const double begin = now();
    body();
    const double took = now() - begin;
    const double came = tier_runs_ ? static_cast<double>(stats().in_bytes - in) : 0;
    std::printf("%-34s %5zu B %-32s %9.2f ms %8.2f GB/s of rows %7.2f M rows/s %7.0f blocks in, %6.2f GB/s\n",
                r.name.c_str(), r.bytes(), way, took * 1e3, static_cast<double>(r.ids.size() * r.bytes()) / took / 1e9,
                static_cast<double>(r.ids.size()) / took / 1e6, came / kPagedBlock, came / took / 1e9);
    verify(r, way);
  }

  // ---- ways
  // Gathers into pinned memory with many threads, one part while another one is copied.
  template <typename Fetch>
  void by_host(const Rows& r, Fetch fetch) {
    const size_t each = kStaging / r.bytes();
    for (size_t from = 0, part = 0; from < r.ids.size(); from += each, ++part) {
      const size_t count = std::min(each, r.ids.size() - from), b = part % 2;
      MUST(cudaEventSynchronize(copied_[b]));
      char* const to = staging_[b].get();
      on_threads(count, [&r, from, to, fetch](size_t begin, size_t end, unsigned) {
        for (size_t i = begin; i < end; ++i) fetch(to + i * r.bytes(), r.ids[from + i] * r.bytes(), r.bytes());
      });
      MUST(cudaMemcpyAsync(out_.get() + from * r.words, to, count * r.bytes(), cudaMemcpyHostToDevice, stream_));
      MUST(cudaEventRecord(copied_[b], stream_));
    }
    finish("gathering by the host");
  }
  // Sorts the rows by block, and leases blocks for a quarter of the budget at a time.
  void by_leases(const Rows& r, const vmem::region& table) {
    const size_t blocks = table.size() / kPagedBlock, most = device_ / kPagedBlock / 4;
    std::vector<size_t> begin(blocks + 1);
    for (const uint64_t id : r.ids) ++begin[id * r.bytes() / kPagedBlock + 1];
    for (size_t b = 0; b < blocks; ++b) begin[b + 1] += begin[b];
    std::vector<size_t> at = begin;
    std::vector<uint64_t> ids(r.ids.size()), slots(r.ids.size());
    for (size_t i = 0; i < r.ids.size(); ++i) {
      const size_t to = at[r.ids[i] * r.bytes() / kPagedBlock]++;
      ids[to] = r.ids[i];
      slots[to] = i;
    }
    MUST(cudaMemcpyAsync(ids_.get(), ids.data(), 8 * ids.size(), cudaMemcpyHostToDevice, stream_));
    MUST(cudaMemcpyAsync(slots_.get(), slots.data(), 8 * slots.size(), cudaMemcpyHostToDevice, stream_));
    std::vector<vmem_range> now, next = some(table, begin, 0, most);
    const auto* const words = static_cast<const uint32_t*>(table.data());
    for (size_t b = 0; b < blocks; b += most) {
      now = std::move(next);
      next = some(table, begin, b + most, most);
      if (now.empty()) continue;
      vmem::check(vmem_acquire_ranges(now.data(), now.size(), 0, stream_));
      for (const vmem_range& range : next) vmem::check(vmem_prefetch(range.ptr, range.size, 0, nullptr));
      const size_t from = begin[b], to = begin[std::min(b + most, blocks)];
      vmem::gpu::gather_plain(stream_, words, {ids_.get() + from, to - from, r.words, out_.get()}, slots_.get() + from);
      vmem::check(vmem_release_ranges(now.data(), now.size(), stream_));
    }
    finish("gathering under leases");
  }
  static std::vector<vmem_range> some(const vmem::region& table, const std::vector<size_t>& begin, size_t from,
                                      size_t count) {
    std::vector<vmem_range> ranges;
    for (size_t b = from; b < std::min(from + count, begin.size() - 1); ++b)
      if (begin[b] != begin[b + 1])
        ranges.push_back({static_cast<const char*>(table.data()) + b * kPagedBlock, kPagedBlock, VMEM_READ, 0});
    return ranges;
  }
  void by_asking(const Rows& r, const vmem_kernel_view& view, unsigned groups, bool warps) {
    vmem::gpu::gather_asking(stream_, view, work(r), groups, warps, result_);
    MUST(cudaGetLastError());
    finish("gathering by asking");
  }

  // ---- tables
  static void fill(void* at, size_t bytes) {
    on_threads(bytes / 4, [words = static_cast<uint32_t*>(at)](size_t begin, size_t end, unsigned) {
      for (size_t w = begin; w < end; ++w) words[w] = vmem::gpu::row_word(w);
    });
  }
  void start(size_t device, size_t host) {
    gpuclients::start(device, host);
    tier_runs_ = true;
  }
  void in_host_memory() {
    start(2 * device_, table_ + table_ / 2);
    vmem::region table(table_);
    fill(table.data(), table_);
    const size_t hot = device_ / 2;
    std::vector<Rows> all;
    for (const size_t bytes : {4096, 1024, 512}) {
      all.push_back(rows("all rows are there", bytes, hot, hot, 100, rows_));
      all.push_back(rows("9 of 10 are there", bytes, table_, hot, 90, rows_));
      all.push_back(rows("from anywhere", bytes, table_, hot, 0, rows_));
    }
    all.push_back(rows("9 of 10 are there, few rows", 4096, table_, hot, 90, rows_ / 16));
    host_ways(table, all);
    asking_ways(table, all, hot);
    table.free();
    vmem_shutdown();
    tier_runs_ = false;
    bounds(all, hot);
  }
  void host_ways(const vmem::region& table, const std::vector<Rows>& all) {
    // A program that gathers without libvmem uses plain memory.
    const std::unique_ptr<char, void (*)(void*)> plain(static_cast<char*>(aligned_alloc(kPagedBlock, table_)), free);
    fill(plain.get(), table_);
    for (const Rows& r : all) {
      if (r.name == "all rows are there") continue;
      timed(r, "16 threads of the host, and copy",
            [&] { by_host(r, [&](char* to, uint64_t at, size_t bytes) { memcpy(to, plain.get() + at, bytes); }); });
      timed(r, "leases, rows sorted by block", [&] { by_leases(r, table); });
    }
  }
  void asking_ways(const vmem::region& table, const std::vector<Rows>& all, size_t hot) {
    for (const Rows& r : all) {
      struct vmem_kernel* kernel = nullptr;
      vmem_kernel_view view = {};
      vmem::check(vmem_kernel_begin(&kernel, table.data(), table_, VMEM_READ, 0, device_, &view));
      if (r.name != "from anywhere") {
        const Rows warm = rows("bringing them", r.bytes(), hot, hot, 100, std::min(rows_, hot));
        timed(warm, "asking, 2112 warps", [&] { by_asking(warm, view, 2112, true); });
        // Hot blocks are loaded in place at first, and come to the device once the library has seen
        // that they are hot.
        for (int i = 0; i < 8; ++i) by_asking(warm, view, 2112, true);
      }
      timed(r, "asking, 2112 warps", [&] { by_asking(r, view, 2112, true); });
      if (r.name == "all rows are there") timed(r, "asking, 8448 warps", [&] { by_asking(r, view, 8448, true); });
      timed(r, "asking again, 264 thread blocks", [&] { by_asking(r, view, 264, false); });
      vmem::check(vmem_kernel_end(kernel, stream_));
    }
  }
  // The whole table on the device, and managed memory that begins in host memory. The table may not
  // exceed the limit.
  void bounds(const std::vector<Rows>& all, size_t hot) {
    {
      const auto plain = on_device<uint32_t>(table_ / 4);
      const auto part = pinned<uint32_t>(kStaging / 4);
      for (size_t at = 0; at < table_; at += kStaging) {
        on_threads(kStaging / 4, [to = part.get(), first = at / 4](size_t begin, size_t end, unsigned) {
          for (size_t w = begin; w < end; ++w) to[w] = vmem::gpu::row_word(first + w);
        });
        MUST(cudaMemcpy(plain.get() + at / 4, part.get(), kStaging, cudaMemcpyHostToDevice));
      }
      for (const Rows& r : all) {
        timed(r, "all of the table on the device", [&] {
          vmem::gpu::gather_plain(stream_, plain.get(), work(r), nullptr);
          finish("gathering from plain memory");
        });
      }
    }
    const uint64_t limit = vmem::gpu::managed_limit();
    if (table_ > limit) {
      std::printf("no managed memory: the table is larger than %llu MiB\n",
                  static_cast<unsigned long long>(limit / kMiB));
      return;
    }
    for (const Rows& r : all) {
      if (r.bytes() == 1024 || r.name == "all rows are there") continue;
      vmem::gpu::require_managed(table_, limit);
      void* at = nullptr;
      MUST(cudaMallocManaged(&at, table_));
      const OnDevice<void> managed(at);
      fill(at, table_);  // by the CPU, so that it is in host memory
      if (r.name != "from anywhere") {
        const Rows warm = rows("bringing them", r.bytes(), hot, hot, 100, std::min(rows_, hot));
        timed(warm, "managed memory", [&] { managed_gather(warm, at); });
      }
      timed(r, "managed memory, which all fits", [&] { managed_gather(r, at); });
    }
  }
  void managed_gather(const Rows& r, void* at) {
    vmem::gpu::gather_plain(stream_, static_cast<const uint32_t*>(at), work(r), nullptr);
    finish("gathering from managed memory");
  }

  // The table is four times the budgets of host and device.
  void on_disk() {
    const size_t size = table_ / 2, few = rows_ / 8;
    const std::string path = folder_ + "/paging_bench." + std::to_string(getpid());
    const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_DIRECT | O_CLOEXEC, 0600);
    if (fd < 0) {
      std::printf("no disk: %s: %s\n", path.c_str(), strerror(errno));
      return;
    }
    unlink(path.c_str());
    write_table(fd, size);
    read_blocks(fd, size);
    start(size / 4 + size / 8, size / 4);
    vmem::attributes wanted;
    wanted.fd = fd;
    wanted.flags = VMEM_MAP_READ;
    vmem::region table(size, wanted);
    for (const size_t bytes : {size_t{4096}, size_t{512}}) {
      const Rows r = rows("from anywhere, table on the disk", bytes, size, size, 0, few);
      if (bytes == 4096) {
        timed(r, "16 threads of the host, and copy", [&] {
          by_host(r, [fd](char* to, uint64_t at, size_t n) {
            if (pread(fd, to, n, static_cast<off_t>(at)) != static_cast<ssize_t>(n)) fail("pread");
          });
        });
      }
      timed(r, "leases, rows sorted by block", [&] { by_leases(r, table); });
      table.evict(VMEM_SSD);
      struct vmem_kernel* kernel = nullptr;
      vmem_kernel_view view = {};
      vmem::check(vmem_kernel_begin(&kernel, table.data(), size, VMEM_READ, 0, size / 4, &view));
      timed(r, "asking, 2112 warps", [&] { by_asking(r, view, 2112, true); });
      vmem::check(vmem_kernel_end(kernel, stream_));
      table.evict(VMEM_SSD);
    }
    table.free();
    close(fd);
    vmem_shutdown();
    tier_runs_ = false;
  }
  // The limit of the disk: reads every block once, in random order, 16 at a time.
  void read_blocks(int fd, size_t size) {
    std::vector<size_t> order(size / kPagedBlock);
    for (size_t b = 0; b < order.size(); ++b) order[b] = b;
    std::shuffle(order.begin(), order.end(), std::minstd_rand(3));
    const double begin = now();
    on_threads(order.size(), [this, fd, &order](size_t first, size_t last, unsigned thread) {
      for (size_t i = first; i < last; ++i)
        if (pread(fd, staging_[0].get() + thread * kPagedBlock, kPagedBlock,
                  static_cast<off_t>(order[i] * kPagedBlock)) != static_cast<ssize_t>(kPagedBlock))
          fail("pread of a block");
    });
    const double took = now() - begin;
    std::printf("raw reads of blocks of 2 MiB, in no order, 16 at a time: %.2f GB/s\n",
                static_cast<double>(size) / took / 1e9);
  }
  void write_table(int fd, size_t size) {
    const double begin = now();
    for (size_t from = 0; from < size; from += kStaging) {
      char* const part = staging_[0].get();
      on_threads(kStaging / 4, [part, from](size_t first, size_t last, unsigned) {
        auto* const words = reinterpret_cast<uint32_t*>(part);
        for (size_t w = first; w < last; ++w) words[w] = vmem::gpu::row_word(from / 4 + w);
      });
      if (pwrite(fd, part, kStaging, static_cast<off_t>(from)) != static_cast<ssize_t>(kStaging))
        fail(std::string("pwrite: ") + strerror(errno));
    }
    std::printf("%zu MiB written to the disk in %.1f s\n", size / kMiB, now() - begin);
  }

  const std::string folder_;
  const size_t table_, rows_, device_;
  cudaStream_t stream_ = nullptr;
  PagingResult* result_ = nullptr;
  OnDevice<uint32_t> out_;
  OnDevice<uint64_t> ids_, slots_;
  std::unique_ptr<char, HostFree> staging_[2];
  cudaEvent_t copied_[2] = {};
  bool tier_runs_ = false, right_ = true;
};

}  // namespace

int main(int argc, char** argv) {
  std::string folder = ".";
  size_t table = 4096, rows = 1024;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (strcmp(argv[i], "--folder") == 0) folder = argv[i + 1];
    if (strcmp(argv[i], "--table") == 0) table = strtoul(argv[i + 1], nullptr, 10);
    if (strcmp(argv[i], "--rows") == 0) rows = strtoul(argv[i + 1], nullptr, 10);
  }
  return gpuclients::run_bench([&] { return Bench(folder, table, rows).run(); });
}
