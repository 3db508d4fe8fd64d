// Measures and checks on this machine each step that the CUDA backend uses, one line per step. Not
// a test: it judges nothing but bytes. Usage: probe_bench [MiB of blocks, default 1024]. Never
// keeps more managed memory alive than gpu_limits.h allows.
#include <cuda_runtime_api.h>
#include <dirent.h>
#include <errno.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "core/types.h"
#include "device/backend.h"
#include "device/managed/pagemap.h"
#include "gpu_limits.h"
#include "kernels.h"

using namespace vmem;
using device::Access;
using device::Copy;
using device::kUnit;
using device::Range;
using device::Ticket;

namespace {

cudaError_t prefetch_to_device(const void* unit, cudaStream_t stream) {
#if CUDART_VERSION >= 13000
  const cudaMemLocation device{cudaMemLocationTypeDevice, 0};
  return cudaMemPrefetchAsync(unit, kUnit, device, 0, stream);
#else
  return cudaMemPrefetchAsync(unit, kUnit, 0, stream);
#endif
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

[[noreturn]] void die(const std::string& what) {
  std::printf("FAILED: %s\n", what.c_str());
  std::exit(1);
}
void must(const core::Status& s, const char* what) {
  if (!s.ok()) die(std::string(what) + ": " + std::string(s.text()));
}
void must(cudaError_t e, const char* what) {
  if (e != cudaSuccess) die(std::string(what) + ": " + cudaGetErrorString(e));
}

uintptr_t at(const void* p) {
  return reinterpret_cast<uintptr_t>(p);
}
std::span<const Range> one(const Range& r) {
  return {&r, 1};
}

struct Stopwatch {
  std::vector<double> us;
  template <class F>
  void time(F f) {
    const double t = now();
    f();
    us.push_back((now() - t) * 1e6);
  }
  void print(const char* what) {
    std::sort(us.begin(), us.end());
    std::printf("%-58s median %8.2f us  min %8.2f  p99 %8.2f\n", what, us[us.size() / 2], us.front(),
                us[us.size() * 99 / 100]);
  }
};

// --- raw steps, without lib/device ----------------------------------------------------------------------------------

std::vector<int> uvm_files() {
  std::vector<int> out;
  DIR* dir = opendir("/proc/self/fd");
  while (dirent* e = readdir(dir)) {
    char target[256] = "";
    const ssize_t n = readlinkat(dirfd(dir), e->d_name, target, sizeof target - 1);
    if (n > 0 && std::string(target, static_cast<size_t>(n)) == "/dev/nvidia-uvm") out.push_back(atoi(e->d_name));
  }
  closedir(dir);
  return out;
}

void* hole_over(void* p, size_t size) {
  return mmap(p, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

uint64_t free_now() {
  size_t f = 0, t = 0;
  must(cudaMemGetInfo(&f, &t), "cudaMemGetInfo");
  return f;
}

int raw_file = -1;

void raw_steps() {
  void* p = nullptr;
  constexpr size_t kUnits = 64;
  must(cudaMallocManaged(&p, kUnits * kUnit), "cudaMallocManaged");
  std::printf("cudaMallocManaged of 128 MiB: aligned to 2 MiB: %s; uvm files open: %zu\n",
              at(p) % kUnit == 0 ? "yes" : "NO", uvm_files().size());
  if (hole_over(p, kUnits * kUnit) != p) die("hole over the range");
  for (int fd : uvm_files()) {
    void* got = mmap(p, kUnit, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, static_cast<off_t>(at(p)));
    const int err = errno;
    unsigned char resident = 0;
    const bool there = mincore(p, core::kPage, &resident) == 0;
    std::printf("  file %d takes a mapping: %s%s\n", fd, got == p ? "yes" : strerror(err),
                got == p ? ""
                : there  ? "; the hole stayed"
                         : "; the hole is GONE, the addresses are free");
    if (got == p) raw_file = fd;
    hole_over(p, kUnit);
  }
  if (raw_file < 0) die("no uvm file takes a mapping");
  cudaStream_t stream;
  must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  void* pinned = nullptr;
  must(cudaMallocHost(&pinned, kUnit), "cudaMallocHost");

  Stopwatch map, shut, pagemap, prefetch, copy, open, punch;
  const uint64_t before = free_now();
  uint64_t least = ~uint64_t{0};
  for (int round = 0; round < 4; ++round) {
    for (size_t u = 0; u < kUnits; ++u) {
      auto* b = static_cast<std::byte*>(p) + u * kUnit;
      map.time([&] {
        if (mmap(b, kUnit, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, raw_file, static_cast<off_t>(at(b))) != b)
          die("mmap");
      });
      shut.time([&] { mprotect(b, kUnit, PROT_NONE); });
      uint64_t touched = 0;
      pagemap.time([&] { must(device::mapped_pages(at(b), kUnit, true, &touched), "pagemap"); });
      if (touched != 0) die("a page of a fresh part is mapped");
      prefetch.time([&] {
        must(prefetch_to_device(b, stream), "prefetch");
        must(cudaStreamSynchronize(stream), "synchronize");
      });
      copy.time([&] {
        must(cudaMemcpyAsync(b, pinned, kUnit, cudaMemcpyHostToDevice, stream), "copy");
        must(cudaStreamSynchronize(stream), "synchronize");
      });
      open.time([&] { mprotect(b, kUnit, PROT_READ | PROT_WRITE); });
    }
    least = std::min(least, free_now());
    for (size_t u = 0; u < kUnits; ++u) punch.time([&] { hole_over(static_cast<std::byte*>(p) + u * kUnit, kUnit); });
  }
  map.print("step: mmap 2 MiB of uvm over a hole");
  shut.print("step: mprotect NONE");
  pagemap.print("step: pagemap of 2 MiB, nothing mapped");
  prefetch.print("step: prefetch of an empty 2 MiB + synchronize");
  copy.print("step: pinned copy of 2 MiB + synchronize");
  open.print("step: mprotect READ|WRITE");
  punch.print("step: PROT_NONE mmap over it (destroys the part)");
  std::printf("memory: 128 MiB made took %.0f MiB of free memory, after punching %+.0f MiB against the start\n",
              static_cast<double>(before - least) / (1 << 20),
              (static_cast<double>(free_now()) - static_cast<double>(before)) / (1 << 20));

  // Can another mapping land in the range while it is unmapped and mapped again?
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> tries{0}, inside{0};
  std::thread mapper([&] {
    while (!stop) {
      void* q = mmap(nullptr, kUnit, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (at(q) >= at(p) && at(q) < at(p) + kUnits * kUnit) ++inside;
      munmap(q, kUnit);
      ++tries;
    }
  });
  for (int i = 0; i < 2000; ++i) {
    mmap(p, kUnits * kUnit, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, raw_file, static_cast<off_t>(at(p)));
    hole_over(p, kUnits * kUnit);
  }
  stop = true;
  mapper.join();
  std::printf("hole by MAP_FIXED under %llu foreign mmaps: %llu landed inside\n",
              static_cast<unsigned long long>(tries), static_cast<unsigned long long>(inside));

  // A touch between map and shut must show in pagemap.
  auto* b = static_cast<std::byte*>(p);
  mmap(b, kUnit, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, raw_file, static_cast<off_t>(at(b)));
  const bool load_only = static_cast<volatile std::byte*>(b)[5000] == std::byte{0};
  mprotect(b, kUnit, PROT_NONE);
  uint64_t touched = 0;
  must(device::mapped_pages(at(b), kUnit, false, &touched), "pagemap");
  std::printf("intruder: a load (zero: %d) before the shut shows as %llu pages in pagemap\n", load_only,
              static_cast<unsigned long long>(touched));
  must(cudaFree(p), "cudaFree with a hole, a made part and PROT_NONE");

  // Small ranges: does the driver reuse the address space of a punched and freed range, and is it
  // intact?
  int wrong = 0;
  for (size_t units : {1, 2, 8}) {
    void* q = nullptr;
    must(cudaMallocManaged(&q, units * kUnit), "cudaMallocManaged");
    hole_over(q, units * kUnit);
    must(cudaFree(q), "cudaFree of a hole");
    void* again[4];
    for (void*& r : again) {
      must(cudaMallocManaged(&r, units * kUnit), "cudaMallocManaged");
      std::memset(r, 1, units * kUnit);
      if (cudaMemset(r, 2, units * kUnit) != cudaSuccess || cudaDeviceSynchronize() != cudaSuccess) ++wrong;
      if (*static_cast<volatile unsigned char*>(r) != 2) ++wrong;
      std::printf("small: %zu units punched at %p, next managed allocation at %p\n", units, q, r);
    }
    for (void* r : again) must(cudaFree(r), "cudaFree");
  }
  std::printf("small: managed memory after punched ranges were freed: %s\n", wrong == 0 ? "right" : "WRONG");
  must(cudaFreeHost(pinned), "cudaFreeHost");
  must(cudaStreamDestroy(stream), "stream");
}

// --- lib/device -----------------------------------------------------------------------------------------------------

std::byte* frames = nullptr;
constexpr size_t kFrames = size_t{256} << 20;

void raw_copies() {
  void* plain = nullptr;
  must(cudaMalloc(&plain, kFrames), "cudaMalloc");
  cudaStream_t stream;
  must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  for (const bool in : {true, false})
    for (size_t size : {kUnit, 4 * kUnit, 16 * kUnit}) {
      double best = 0;
      for (int round = 0; round < 3; ++round) {
        const double t = now();
        size_t bytes = 0;
        for (int repeat = 0; repeat < 4; ++repeat)
          for (size_t offset = 0; offset < kFrames; offset += size, bytes += size) {
            auto* d = static_cast<std::byte*>(plain) + offset;
            if (in)
              cudaMemcpyAsync(d, frames + offset, size, cudaMemcpyHostToDevice, stream);
            else
              cudaMemcpyAsync(frames + offset, d, size, cudaMemcpyDeviceToHost, stream);
          }
        must(cudaStreamSynchronize(stream), "copies");
        best = std::max(best, static_cast<double>(bytes) / (now() - t) / 1e9);
      }
      std::printf("limit: pinned copy %s, %2zu MiB pieces                       %7.2f GB/s\n", in ? "in " : "out",
                  size >> 20, best);
    }
  cudaFree(plain);
  cudaStreamDestroy(stream);
}

// Times each step of a move alone, and several threads that make blocks of one size at once.
void steps(device::Devices& d) {
  constexpr size_t kMost = 16 * kUnit, kThreads = 8;
  void* base = nullptr;
  must(d.reserve(kMost * kThreads, 0, &base), "reserve");
  for (size_t size : {kUnit, 4 * kUnit, 16 * kUnit}) {
    const Range r{at(base), size};
    const Copy copy{r.address, frames, size};
    Stopwatch make, in, open, hold, out, punch, settle;
    for (int i = 0; i < 50; ++i) {
      bool torn = false;
      Ticket ticket;
      make.time([&] { must(d.populate(one(r), 0, &torn), "populate"); });
      in.time([&] {
        must(d.copy_in(0, std::span(&copy, 1), &ticket), "copy_in");
        must(d.wait(ticket), "wait");
      });
      open.time([&] { must(d.open(one(r), Access::read_write), "open"); });
      hold.time([&] { must(d.write_protect(one(r), Access::read), "write_protect"); });
      out.time([&] {
        must(d.copy_out(0, std::span(&copy, 1), &ticket), "copy_out");
        must(d.wait(ticket), "wait");
      });
      punch.time([&] { must(d.punch(one(r)), "punch"); });
      settle.time([&] { must(d.rearm(one(r)), "rearm"); });
    }
    const auto name = [&](const char* what) { return core::strprintf("%s, %zu MiB", what, size >> 20); };
    make.print(name("populate()").c_str());
    in.print(name("copy_in() + wait()").c_str());
    open.print(name("open()").c_str());
    hold.print(name("write_protect()").c_str());
    out.print(name("copy_out() + wait()").c_str());
    punch.print(name("punch()").c_str());
    settle.print(name("rearm()").c_str());
  }
  for (size_t size : {kUnit, 4 * kUnit, 16 * kUnit})
    for (size_t threads : {size_t{1}, size_t{2}, size_t{4}, kThreads}) {
      constexpr int kRounds = 60;
      std::atomic<uint64_t> making{0};
      std::vector<std::thread> all;
      const double t = now();
      for (size_t i = 0; i < threads; ++i)
        all.emplace_back([&, i] {
          const Range r{at(base) + i * kMost, size};
          for (int round = 0; round < kRounds; ++round) {
            bool torn = false;
            const double start = now();
            must(d.populate(one(r), 0, &torn), "populate");
            making += static_cast<uint64_t>((now() - start) * 1e9);
            must(d.punch(one(r)), "punch");
            must(d.rearm(one(r)), "rearm");
          }
        });
      for (auto& th : all) th.join();
      const double seconds = now() - t, blocks = static_cast<double>(threads) * kRounds;
      std::printf("parallel: %2zu MiB blocks, %zu threads: prepare() %7.1f us each; made and destroyed %7.1f GB/s\n",
                  size >> 20, threads, static_cast<double>(making) / blocks / 1e3,
                  blocks * static_cast<double>(size) / seconds / 1e9);
    }
  must(d.release(base), "release");
}

// `threads` threads fill or empty the range, each its own part, piece by piece with two copies in
// flight.
double run(device::Devices& d, std::byte* base, size_t total, size_t piece, int threads, bool in, int gpu) {
  std::vector<std::thread> all;
  const double t = now();
  for (int i = 0; i < threads; ++i)
    all.emplace_back([&, i] {
      const size_t part = total / static_cast<size_t>(threads), first = part * static_cast<size_t>(i);
      const size_t my_frames = kFrames / static_cast<size_t>(threads);
      std::byte* frame = frames + my_frames * static_cast<size_t>(i);
      const size_t slots = std::max<size_t>(1, std::min<size_t>(4, my_frames / piece));
      std::vector<Ticket> tickets(slots);
      std::vector<Range> pending(slots, Range{0, 0});
      auto finish = [&](size_t slot) {
        if (pending[slot].size == 0) return;
        must(d.wait(tickets[slot]), "wait");
        if (in) {
          must(d.open(one(pending[slot]), Access::read_write), "open");
        } else {
          must(d.punch(one(pending[slot])), "punch");
          must(d.rearm(one(pending[slot])), "rearm");
        }
        pending[slot].size = 0;
      };
      size_t slot = 0;
      for (size_t offset = 0; offset < part; offset += piece, slot = (slot + 1) % slots) {
        finish(slot);
        const Range r{at(base) + first + offset, piece};
        const Copy copy{r.address, frame + slot * piece, piece};
        if (in) {
          bool torn = false;
          must(d.populate(one(r), gpu, &torn), "populate");
          must(d.copy_in(gpu, std::span(&copy, 1), &tickets[slot]), "copy_in");
        } else {
          must(d.write_protect(one(r), Access::read), "write_protect");
          must(d.copy_out(gpu, std::span(&copy, 1), &tickets[slot]), "copy_out");
        }
        pending[slot] = r;
      }
      for (size_t s = 0; s < slots; ++s) finish(s);
    });
  for (auto& th : all) th.join();
  return static_cast<double>(total) / (now() - t) / 1e9;
}

void throughput(device::Devices& d, size_t total) {
  void* base = nullptr;
  must(d.reserve(total, 0, &base), "reserve");
  auto* b = static_cast<std::byte*>(base);
  for (size_t piece : {kUnit, 4 * kUnit, 16 * kUnit})
    for (int threads : {1, 2, 4}) {
      double in = 0, out = 0;
      for (int round = 0; round < 3; ++round) {
        in = std::max(in, run(d, b, total, piece, threads, true, 0));
        out = std::max(out, run(d, b, total, piece, threads, false, 0));
      }
      std::printf("move: %2zu MiB pieces, %d threads   in %7.2f GB/s   out %7.2f GB/s\n", piece >> 20, threads, in,
                  out);
    }
  // Both directions: half of the range leaves while the other half arrives.
  for (int threads : {1, 2}) {
    double both = 0;
    for (int round = 0; round < 3; ++round) {
      run(d, b, total / 2, 4 * kUnit, 2, true, 0);
      const double t = now();
      std::thread out([&] { run(d, b, total / 2, 4 * kUnit, threads, false, 0); });
      run(d, b + total / 2, total / 2, 4 * kUnit, threads, true, 0);
      out.join();
      both = std::max(both, static_cast<double>(total) / (now() - t) / 1e9);
      run(d, b + total / 2, total / 2, 4 * kUnit, 2, false, 0);
    }
    std::printf("move: 8 MiB pieces, both directions, %d+%d threads   %7.2f GB/s\n", threads, threads, both);
  }
  must(d.release(base), "release");
}

void grouped(device::Devices& d) {
  void* base = nullptr;
  must(d.reserve(64 * kUnit, 0, &base), "reserve");
  for (size_t units : {1, 2, 4, 8, 16, 32, 64}) {
    Stopwatch make, drop;
    for (int i = 0; i < 50; ++i) {
      const Range r{at(base), units * kUnit};
      bool torn = false;
      make.time([&] { must(d.populate(one(r), 0, &torn), "populate"); });
      drop.time([&] { must(d.punch(one(r)), "punch"); });
      must(d.rearm(one(r)), "rearm");
    }
    make.print(core::strprintf("populate() of %zu MiB as one range", units * 2).c_str());
    drop.print(core::strprintf("punch() of %zu MiB as one range", units * 2).c_str());
  }
  must(d.release(base), "release");
  Stopwatch reserve, release, release_full;
  for (int i = 0; i < 20; ++i) {
    reserve.time([&] { must(d.reserve(64 * kUnit, 0, &base), "reserve"); });
    release.time([&] { must(d.release(base), "release"); });
    must(d.reserve(64 * kUnit, 0, &base), "reserve");
    const Range r{at(base), 64 * kUnit};
    bool torn = false;
    must(d.populate(one(r), 0, &torn), "populate");
    release_full.time([&] { must(d.release(base), "release"); });
  }
  reserve.print("reserve() of 128 MiB");
  release.print("release() of 128 MiB of holes");
  release_full.print("release() of 128 MiB made");
}

void small_calls(device::Devices& d) {
  cudaStream_t stream;
  must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  auto per_call = [](const char* what, const std::function<void()>& f) {
    f();
    const double t = now();
    for (int i = 0; i < 10000; ++i) f();
    std::printf("call: %-24s %7.0f ns\n", what, (now() - t) / 10000 * 1e9);
  };
  Ticket ticket, other;
  bool done = false;
  per_call("health", [&] { must(d.health(0), "health"); });
  per_call("check_stream", [&] { must(d.check_stream(stream, 0), "check_stream"); });
  per_call("record", [&] { must(d.record(stream, 0, &ticket), "record"); });
  per_call("order_after, reached", [&] { must(d.order_after(ticket, stream, 0), "order_after"); });
  per_call("poll, reached", [&] { must(d.poll(ticket, &done), "poll"); });
  auto* gate = reinterpret_cast<uint32_t*>(frames);
  *gate = 0;
  gpu::stand_still(stream, gate);
  must(d.record(stream, 0, &ticket), "record");
  cudaStream_t second;
  must(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking), "stream");
  per_call("poll, not reached", [&] { must(d.poll(ticket, &done), "poll"); });
  const double t = now();
  for (int i = 0; i < 100; ++i) must(d.order_after(ticket, second, 0), "order_after");
  std::printf("call: %-24s %7.0f ns\n", "order_after, not reached", (now() - t) / 100 * 1e9);
  *static_cast<volatile uint32_t*>(gate) = 1;
  must(cudaStreamSynchronize(second), "streams");
  cudaStreamDestroy(stream);
  cudaStreamDestroy(second);
  device::Memory m{};
  per_call("memory", [&] { must(d.memory(0, &m), "memory"); });
}

void kernels(device::Devices& d, size_t total) {
  void *base = nullptr, *plain = nullptr;
  must(d.reserve(total, 0, &base), "reserve");
  must(cudaMalloc(&plain, total), "cudaMalloc");
  run(d, static_cast<std::byte*>(base), total, kUnit, 2, true, 0);
  cudaStream_t stream;
  must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  for (void* p : {plain, base}) {
    double best = 0;
    for (int round = 0; round < 6; ++round) {
      const double t = now();
      for (int i = 0; i < 20; ++i) gpu::read_all(stream, static_cast<uint64_t*>(p), total / 8, nullptr);
      must(cudaStreamSynchronize(stream), "kernels");
      best = std::max(best, 20.0 * static_cast<double>(total) / (now() - t) / 1e9);
    }
    std::printf("kernel reading %-34s %9.0f GB/s\n", p == plain ? "plain device memory" : "blocks made one by one",
                best);
  }
  cudaStreamDestroy(stream);
  cudaFree(plain);
  must(d.release(base), "release");
}

void peers(device::Devices& d, size_t total) {
  for (int i = 0; i < d.count(); ++i) {
    const device::Info& info = d.info(i);
    std::printf("device %d: %s, %s, NUMA node %d, %.1f GiB, links", i, info.name.c_str(), info.pci.c_str(),
                info.numa_node, static_cast<double>(info.total_bytes) / (1 << 30));
    static const char* const kLinks[] = {"self", "nvlink", "pcie", "none"};
    for (device::Link l : info.links) std::printf(" %s", kLinks[static_cast<size_t>(l)]);
    std::printf("\n");
  }
  if (d.count() < 2) {
    std::printf("peers: skipped, one device\n");
    return;
  }
  void* base = nullptr;
  must(d.reserve(total, 0, &base), "reserve");
  auto* b = static_cast<std::byte*>(base);
  std::memset(frames, 3, kFrames);
  run(d, b, total, kUnit, 2, true, 0);
  for (size_t piece : {kUnit, 16 * kUnit, total}) {
    double best = 0;
    for (int round = 0; round < 4; ++round) {
      const double t = now();
      for (size_t offset = 0; offset < total; offset += piece)
        must(d.migrate(Range{at(b) + offset, piece}, round % 2 == 0 ? 1 : 0), "migrate");
      best = std::max(best, static_cast<double>(total) / (now() - t) / 1e9);
    }
    std::printf("peers: migrate in pieces of %4zu MiB   %7.2f GB/s\n", piece >> 20, best);
  }
  void *near = nullptr, *far = nullptr;
  must(cudaMalloc(&near, kFrames), "cudaMalloc");
  cudaSetDevice(1);
  must(cudaMalloc(&far, kFrames), "cudaMalloc");
  cudaStream_t stream;
  must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  double best = 0;
  for (int round = 0; round < 5; ++round) {
    const double t = now();
    for (int i = 0; i < 8; ++i) cudaMemcpyPeerAsync(far, 1, near, 0, kFrames, stream);
    must(cudaStreamSynchronize(stream), "peer copy");
    best = std::max(best, 8.0 * static_cast<double>(kFrames) / (now() - t) / 1e9);
  }
  std::printf("peers: plain peer copy                  %7.2f GB/s\n", best);
  best = 0;
  for (int round = 0; round < 5; ++round) {
    const double t = now();
    cudaMemcpyAsync(far, b, kFrames, cudaMemcpyDefault, stream);
    must(cudaStreamSynchronize(stream), "managed to plain");
    best = std::max(best, static_cast<double>(kFrames) / (now() - t) / 1e9);
  }
  std::printf("peers: made blocks on one -> plain memory on the other %7.2f GB/s\n", best);
  cudaFree(near);
  cudaFree(far);
  cudaStreamDestroy(stream);
  cudaSetDevice(0);
  must(d.release(base), "release");
}

}  // namespace

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  const uint64_t limit = gpu::managed_limit();
  if (limit == 0) {
    std::printf("SKIPPED: no CUDA device\n");
    return 77;
  }
  const size_t total = core::round_up(argc > 1 ? strtoul(argv[1], nullptr, 10) << 20 : size_t{1} << 30, 64 * kUnit);
  gpu::require_managed(total + (size_t{256} << 20), limit);
  cudaSetDevice(0);
  gpu::load_all();
  int driver = 0;
  cudaDriverGetVersion(&driver);
  std::printf("CUDA runtime %d, driver API %d, limit of managed memory %.2f GiB\n", CUDART_VERSION, driver,
              static_cast<double>(limit) / (1 << 30));
  raw_steps();

  std::unique_ptr<device::Devices> d;
  std::string why;
  const double t = now();
  must(device::make_devices("managed", device::kUnit, &d, &why), "make_devices");
  std::printf("make_devices: %.0f ms, with the trial of one unit\n", (now() - t) * 1e3);
  void* p = mmap(nullptr, kFrames + kUnit, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  frames = reinterpret_cast<std::byte*>(core::round_up(at(p), kUnit));
  madvise(frames, kFrames, MADV_HUGEPAGE);
  std::memset(frames, 1, kFrames);
  const double t2 = now();
  must(d->pin(frames, kFrames), "pin");
  std::printf("pin: %.1f ms/GiB on huge pages\n", (now() - t2) * 1e3 * (1 << 30) / static_cast<double>(kFrames));
  raw_copies();
  steps(*d);
  grouped(*d);
  small_calls(*d);
  throughput(*d, total);
  kernels(*d, std::min<size_t>(total, size_t{512} << 20));
  peers(*d, std::min<size_t>(total, size_t{512} << 20));
  must(d->unpin(frames), "unpin");
  d.reset();
  std::printf("probe: done\n");
  return 0;
}
