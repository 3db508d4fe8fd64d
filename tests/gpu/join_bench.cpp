// The probe phase of a hash join on a GPU. The table of tuples is four times the device budget, and
// kernels page in the buckets. Compared with leases with keys sorted by block, threads of the host,
// managed memory, and the whole table on the device. Every result is checked. Usage: join_bench
// [--table MIB] [--probes N] [--folder F]: N keys at a time; half of the table is also read from
// the disk of F.
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
#include "gpu_limits.h"
#include "join_work.h"

namespace {

using namespace gpuclients;
using vmem::gpu::JoinWork;
using vmem::gpu::kPagedBlock;
using vmem::gpu::PagingResult;
using vmem::gpu::Tuple;

constexpr unsigned kGroups = 2112;  // warps that request blocks
constexpr size_t kBlockTuples = kPagedBlock / sizeof(Tuple);

struct Probes {
  std::string name;
  std::vector<uint64_t> keys;
};

class Bench {
 public:
  Bench(std::string folder, size_t table_mib, size_t probes)
      : folder_(std::move(folder)), table_(table_mib * kMiB / kPagedBlock * kPagedBlock), probes_(probes) {
    MUST(cudaSetDevice(0));
    MUST(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    result_ = new (pinned<char>(4096).release()) PagingResult;
    keys_ = on_device<uint64_t>(probes_);
    slots_ = on_device<uint64_t>(probes_);
    out_ = on_device<uint64_t>(probes_);
    host_out_ = pinned<uint64_t>(probes_);
    vmem::api::test_hooks().make_devices = vmem::device::make_cuda_handles;
    vmem::gpu::load_joining();
  }

  bool run() {
    in_host_memory();
    on_disk();
    return right_;
  }

 private:
  // ---- the table and its probes
  size_t buckets() const { return firsts_.size() - 1; }
  // Places as many buckets as fit. Free places count as part of the last bucket of a block.
  void lay_out(size_t bytes) {
    firsts_.assign(1, 0);
    for (size_t at = 0, b = 0;; ++b) {
      const size_t n = vmem::gpu::tuples_of(b);
      if (at / kBlockTuples != (at + n - 1) / kBlockTuples)
        firsts_.back() = at = (at / kBlockTuples + 1) * kBlockTuples;
      if ((at += n) > bytes / sizeof(Tuple)) break;
      firsts_.push_back(static_cast<uint32_t>(at));
    }
    if (firsts_.back() % kBlockTuples == 0) return;
    firsts_.back() = static_cast<uint32_t>(bytes / sizeof(Tuple));
  }
  // Writes the buckets of a part to `at`, which is tuple `from`.
  void fill(Tuple* at, size_t from, size_t to) const {
    on_threads(to - from, [=, this](size_t begin, size_t end, unsigned) {
      size_t b = std::upper_bound(firsts_.begin(), firsts_.end(), from + begin) - firsts_.begin() - 1;
      for (size_t t = from + begin; t < from + end; ++t) {
        while (b < buckets() && t >= firsts_[b + 1]) ++b;
        const size_t j = b < buckets() ? t - firsts_[b] : SIZE_MAX;
        const bool is = j < 16 && j < vmem::gpu::tuples_of(b);
        const uint64_t key = is ? vmem::gpu::hash_of(16 * b + j) : vmem::gpu::kNoKey;
        at[t - from] = {key, is ? vmem::gpu::payload_of(key) : 0};
      }
    });
  }
  // Makes keys of buckets in the first `hot` of the table, or anywhere; four of five exist.
  Probes probes(const std::string& name, size_t hot, size_t table, unsigned percent_hot, size_t count) const {
    Probes p{name, std::vector<uint64_t>(count)};
    const auto share = static_cast<double>(hot) / static_cast<double>(table);
    const auto warm = std::max<size_t>(static_cast<size_t>(static_cast<double>(buckets()) * share), 1);
    std::mt19937_64 random(11);
    for (auto& key : p.keys) {
      const size_t b = random() % (random() % 100 < percent_hot ? warm : buckets());
      key = vmem::gpu::hash_of(16 * b + random() % 10);
    }
    return p;
  }
  JoinWork work(const Probes& p) const { return {device_firsts_.get(), keys_.get(), p.keys.size(), out_.get()}; }
  void show_layout() {
    device_firsts_ = on_device<uint32_t>(firsts_.size());
    MUST(cudaMemcpy(device_firsts_.get(), firsts_.data(), 4 * firsts_.size(), cudaMemcpyHostToDevice));
  }

  // ---- one way to compute the results into out_; prints a line with its cost
  void timed(const Probes& p, const char* way, const std::function<void()>& body) {
    const size_t n = p.keys.size();
    *result_ = PagingResult{};
    MUST(cudaMemset(out_.get(), 0, 8 * n));
    MUST(cudaMemcpy(keys_.get(), p.keys.data(), 8 * n, cudaMemcpyHostToDevice));
    MUST(cudaDeviceSynchronize());
    const uint64_t in = tier_runs_ ? stats().in_bytes : 0, read = tier_runs_ ? vmem::stats().read_bytes : 0;
    const double begin = now();
    body();
    finish(stream_, way);
    const double took = now() - begin;
    const double came = tier_runs_ ? static_cast<double>(stats().in_bytes - in) : 0;
    const double bytes_read = tier_runs_ ? static_cast<double>(vmem::stats().read_bytes - read) : 0;
    std::printf("%-28s %-36s %9.2f ms %9.2f M keys/s %7.0f blocks in, %6.2f GB/s; %5.2f GB/s from disk\n",
                p.name.c_str(), way, took * 1e3, static_cast<double>(n) / took / 1e6, came / kPagedBlock,
                came / took / 1e9, bytes_read / took / 1e9);
    verify(p, way);
  }
  void verify(const Probes& p, const char* way) {
    MUST(cudaMemcpy(keys_.get(), p.keys.data(), 8 * p.keys.size(), cudaMemcpyHostToDevice));
    vmem::gpu::check_probes(stream_, work(p), result_);
    finish(stream_, "comparing");
    bool right = result_->wrong == 0;
    for (unsigned a = 0; a < 16; ++a)
      if (result_->refused[a] != 0)
        std::printf("WRONG: %llu groups were told %u\n", result_->refused[a], a), right = false;
    if (result_->wrong != 0) std::printf("WRONG: %s, %s: %llu results\n", p.name.c_str(), way, result_->wrong);
    right_ = right_ && right;
  }

  // ---- ways
  void asking(const Probes& p, const vmem_kernel_view& view) {
    vmem::gpu::probe_asking(stream_, view, work(p), kGroups, result_);
    MUST(cudaGetLastError());
  }
  // Sorts the keys by block, inside the measured time, and leases blocks for a quarter of the
  // budget at a time.
  void by_leases(const Probes& p, const vmem::region& table) {
    const size_t blocks = table.size() / kPagedBlock, most = std::max<size_t>(device_ / kPagedBlock / 4, 1);
    const auto block_of = [&](uint64_t key) { return firsts_[vmem::gpu::hash_of(key) / 16] / kBlockTuples; };
    std::vector<size_t> begin(blocks + 1);
    for (const uint64_t key : p.keys) ++begin[block_of(key) + 1];
    for (size_t b = 0; b < blocks; ++b) begin[b + 1] += begin[b];
    std::vector<size_t> at = begin;
    std::vector<uint64_t> keys(p.keys.size()), slots(p.keys.size());
    for (size_t i = 0; i < p.keys.size(); ++i) {
      const size_t to = at[block_of(p.keys[i])]++;
      keys[to] = p.keys[i], slots[to] = i;
    }
    MUST(cudaMemcpyAsync(keys_.get(), keys.data(), 8 * keys.size(), cudaMemcpyHostToDevice, stream_));
    MUST(cudaMemcpyAsync(slots_.get(), slots.data(), 8 * slots.size(), cudaMemcpyHostToDevice, stream_));
    std::vector<vmem_range> now, next = some(table, begin, 0, most);
    for (size_t b = 0; b < blocks; b += most) {
      now = std::move(next), next = some(table, begin, b + most, most);
      if (now.empty()) continue;
      vmem::check(vmem_acquire_ranges(now.data(), now.size(), 0, stream_));
      for (const vmem_range& range : next) vmem::check(vmem_prefetch(range.ptr, range.size, 0, nullptr));
      const size_t from = begin[b], to = begin[std::min(b + most, blocks)];
      vmem::gpu::probe_plain(stream_, static_cast<const Tuple*>(table.data()),
                             {device_firsts_.get(), keys_.get() + from, to - from, out_.get()}, slots_.get() + from);
      vmem::check(vmem_release_ranges(now.data(), now.size(), stream_));
    }
    finish(stream_, "probing under leases");
  }
  static std::vector<vmem_range> some(const vmem::region& table, const std::vector<size_t>& begin, size_t from,
                                      size_t count) {
    std::vector<vmem_range> ranges;
    for (size_t b = from; b < std::min(from + count, begin.size() - 1); ++b)
      if (begin[b] != begin[b + 1])
        ranges.push_back({static_cast<const char*>(table.data()) + b * kPagedBlock, kPagedBlock, VMEM_READ, 0});
    return ranges;
  }
  // The results are needed on the device.
  void by_host(const Probes& p, const Tuple* tuples) {
    on_threads(p.keys.size(), [&, out = host_out_.get()](size_t begin, size_t end, unsigned) {
      for (size_t i = begin; i < end; ++i) {
        const uint64_t key = p.keys[i], b = vmem::gpu::hash_of(key) / 16;
        out[i] = 0;
        for (size_t k = firsts_[b]; k < firsts_[b + 1]; ++k)
          if (tuples[k].key == key) out[i] = tuples[k].payload;
      }
    });
    MUST(cudaMemcpyAsync(out_.get(), host_out_.get(), 8 * p.keys.size(), cudaMemcpyHostToDevice, stream_));
  }

  // ---- where the table is
  void start(size_t device, size_t host) {
    gpuclients::start(device, host);
    tier_runs_ = true;
  }
  void in_host_memory() {
    lay_out(table_);
    show_layout();
    device_ = table_ / 4;
    const size_t hot = device_ / 2;
    std::printf("%zu buckets, %u tuples' places in %zu MiB; kernels may have %zu MiB of them; %zu keys a time\n",
                buckets(), firsts_.back(), table_ / kMiB, device_ / kMiB, probes_);
    const std::vector<Probes> all = {probes("all buckets are there", hot, table_, 100, probes_),
                                     probes("9 of 10 are there", hot, table_, 90, probes_),
                                     probes("from anywhere", hot, table_, 0, probes_)};
    start(2 * device_, table_ + table_ / 2);
    {
      vmem::region table(table_);
      fill(static_cast<Tuple*>(table.data()), 0, table_ / sizeof(Tuple));
      // Bring in all blocks once, so that only this line pays for the first pinning of pages.
      timed(all[2], "leases, the first time", [&] { by_leases(all[2], table); });
      for (const Probes& p : all) {
        const vmem::kernel_range open(table.data(), table_, VMEM_READ, 0, stream_, device_);
        timed(p, "asking, at first", [&] { asking(p, open.view()); });
        // Hot blocks are loaded in place at first, and come to the device once the library has seen
        // that they are hot.
        for (int i = 0; i < 8; ++i) asking(p, open.view());
        timed(p, "asking again", [&] { asking(p, open.view()); });
      }
      for (const Probes& p : all) timed(p, "leases, keys sorted by block", [&] { by_leases(p, table); });
    }
    vmem_shutdown();
    tier_runs_ = false;
    bounds(all);
  }
  void bounds(const std::vector<Probes>& all) {
    const std::unique_ptr<Tuple, void (*)(void*)> plain(static_cast<Tuple*>(aligned_alloc(kPagedBlock, table_)),
                                                        [](void* p) { free(p); });
    fill(plain.get(), 0, table_ / sizeof(Tuple));
    for (const Probes& p : all) timed(p, "16 threads of the host, and copy", [&] { by_host(p, plain.get()); });
    {
      const auto there = on_device<Tuple>(table_ / sizeof(Tuple));
      MUST(cudaMemcpy(there.get(), plain.get(), table_, cudaMemcpyHostToDevice));
      for (const Probes& p : all)
        timed(p, "all of the table on the device",
              [&] { vmem::gpu::probe_plain(stream_, there.get(), work(p), nullptr); });
    }
    {
      const auto pinned_table = pinned<Tuple>(table_ / sizeof(Tuple));
      memcpy(pinned_table.get(), plain.get(), table_);
      for (const Probes& p : all)
        timed(p, "all of it pinned, over the link",
              [&] { vmem::gpu::probe_plain(stream_, pinned_table.get(), work(p), nullptr); });
    }
    const uint64_t limit = vmem::gpu::managed_limit();
    if (table_ > limit) {
      std::printf("no managed memory: the table is larger than %llu MiB\n",
                  static_cast<unsigned long long>(limit / kMiB));
      return;
    }
    for (const Probes& p : all) {
      vmem::gpu::require_managed(table_, limit);
      void* at = nullptr;
      MUST(cudaMallocManaged(&at, table_));
      const OnDevice<void> managed(at);
      memcpy(at, plain.get(), table_);  // by the CPU, so that it is in host memory
      const auto* const tuples = static_cast<const Tuple*>(at);
      timed(p, "managed memory, which all fits", [&] { vmem::gpu::probe_plain(stream_, tuples, work(p), nullptr); });
    }
  }

  // Half of the table, which is four times the budgets of host and device.
  void on_disk() {
    const size_t size = table_ / 2, part = 64 * kMiB;
    const std::string path = folder_ + "/join_bench." + std::to_string(getpid());
    const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_DIRECT | O_CLOEXEC, 0600);
    if (fd < 0) {
      std::printf("no disk: %s: %s\n", path.c_str(), strerror(errno));
      return;
    }
    unlink(path.c_str());
    lay_out(size);
    show_layout();
    device_ = size / 4;
    {
      const auto staging = pinned<char>(part);
      const double begin = now();
      for (size_t at = 0; at < size; at += part) {
        const size_t n = std::min(part, size - at);
        fill(reinterpret_cast<Tuple*>(staging.get()), at / sizeof(Tuple), (at + n) / sizeof(Tuple));
        if (pwrite(fd, staging.get(), n, static_cast<off_t>(at)) != static_cast<ssize_t>(n)) fail("pwrite");
      }
      std::printf("%zu MiB written to the disk in %.1f s\n", size / kMiB, now() - begin);
    }
    const Probes p = probes("from anywhere, on the disk", size, size, 0, probes_ / 16);
    start(size / 4 + size / 8, size / 4);
    vmem::attributes wanted;
    wanted.fd = fd;
    wanted.flags = VMEM_MAP_READ;
    {
      vmem::region table(size, wanted);
      timed(p, "leases, keys sorted by block", [&] { by_leases(p, table); });
      table.evict(VMEM_SSD);
      const vmem::kernel_range open(table.data(), size, VMEM_READ, 0, stream_, size / 4);
      timed(p, "asking", [&] { asking(p, open.view()); });
    }
    close(fd);
    vmem_shutdown();
    tier_runs_ = false;
  }

  const std::string folder_;
  const size_t table_, probes_;
  size_t device_ = 0;
  std::vector<uint32_t> firsts_;
  cudaStream_t stream_ = nullptr;
  PagingResult* result_ = nullptr;
  OnDevice<uint32_t> device_firsts_;
  OnDevice<uint64_t> keys_, slots_, out_;
  std::unique_ptr<uint64_t, HostFree> host_out_;
  bool tier_runs_ = false, right_ = true;
};

}  // namespace

int main(int argc, char** argv) {
  std::string folder = ".";
  size_t table = 4096, probes = 16 << 20;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (strcmp(argv[i], "--folder") == 0) folder = argv[i + 1];
    if (strcmp(argv[i], "--table") == 0) table = strtoul(argv[i + 1], nullptr, 10);
    if (strcmp(argv[i], "--probes") == 0) probes = strtoul(argv[i + 1], nullptr, 10);
  }
  return gpuclients::run_bench([&] { return Bench(folder, table, probes).run(); });
}
