// The cost of a move while other copies run. Do making and destroying blocks overlap with copies?
// Are copies to blocks as fast as to plain memory? Do both directions run at once? Reports and
// judges nothing. Uses at most 768 MiB of managed memory.
#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/types.h"
#include "device/backend.h"
#include "gpu_limits.h"

using namespace vmem;
using device::Access;
using device::kUnit;
using device::Range;
using device::Ticket;

namespace {

constexpr size_t kPart = size_t{256} << 20;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
void must(const core::Status& s) {
  if (s.ok()) return;
  std::printf("FAILED: %s\n", std::string(s.text()).c_str());
  _exit(1);
}
void must(cudaError_t e) {
  if (e == cudaSuccess) return;
  std::printf("FAILED: %s\n", cudaGetErrorString(e));
  _exit(1);
}
double percentile(std::vector<double>& v, size_t percent) {
  if (v.empty()) return 0;
  std::sort(v.begin(), v.end());
  return v[v.size() * percent / 100];
}

std::unique_ptr<device::Devices> d;
std::byte *plain, *host_in, *host_out, *made_in, *made_out, *scratch;

std::span<const Range> one(const Range& r) {
  return {&r, 1};
}
Range range(std::byte* p, size_t size) {
  return {reinterpret_cast<uintptr_t>(p), size};
}
void make(std::byte* p, size_t size) {
  bool torn = false;
  const Range r = range(p, size);
  must(d->populate(one(r), 0, &torn));
}
void drop(std::byte* p, size_t size) {
  const Range r = range(p, size);
  must(d->punch(one(r)));
  must(d->rearm(one(r)));
}

struct Side {
  std::byte* device;
  bool in;
  std::byte* staging = nullptr;  // plain memory as an intermediate stop, or null
};

// Keeps a stream busy with copies of one size between device memory and host memory.
class Load {
 public:
  Load(Side side, size_t piece) {
    thread_ = std::thread([this, side, piece] {
      cudaStream_t stream;
      cudaEvent_t events[4];
      must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
      for (auto& e : events) must(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
      std::byte* host = side.in ? host_in : host_out;
      for (size_t i = 0; !stop_; ++i) {
        const size_t offset = i * piece % kPart;
        if (i >= 4) {
          must(cudaEventSynchronize(events[i % 4]));
          bytes_ += piece;
        }
        std::byte* const far = (side.staging != nullptr ? side.staging : side.device) + offset;
        if (side.staging != nullptr && !side.in)
          must(cudaMemcpyAsync(far, side.device + offset, piece, cudaMemcpyDeviceToDevice, stream));
        must(side.in ? cudaMemcpyAsync(far, host + offset, piece, cudaMemcpyHostToDevice, stream)
                     : cudaMemcpyAsync(host + offset, far, piece, cudaMemcpyDeviceToHost, stream));
        if (side.staging != nullptr && side.in)
          must(cudaMemcpyAsync(side.device + offset, far, piece, cudaMemcpyDeviceToDevice, stream));
        must(cudaEventRecord(events[i % 4], stream));
      }
      must(cudaStreamSynchronize(stream));
      for (auto& e : events) cudaEventDestroy(e);
      cudaStreamDestroy(stream);
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    mark();
  }
  void mark() {
    start_ = now();
    first_ = bytes_;
  }
  double gbps() const { return static_cast<double>(bytes_ - first_) / (now() - start_) / 1e9; }
  ~Load() {
    stop_ = true;
    thread_.join();
  }

 private:
  std::atomic<bool> stop_{false};
  std::atomic<uint64_t> bytes_{0};
  double start_ = 0;
  uint64_t first_ = 0;
  std::thread thread_;
};

void pause_ms(int ms) {
  std::this_thread::sleep_for(std::chrono::milliseconds(ms));
}

struct Setting {
  const char* name;
  std::vector<Side> sides;
  size_t piece;
};

void beside(const Setting& s) {
  std::vector<std::unique_ptr<Load>> loads;
  for (const Side& side : s.sides) loads.push_back(std::make_unique<Load>(side, s.piece));
  const auto rate = [&] {
    double sum = 0;
    for (auto& l : loads) sum += l->gbps();
    return sum;
  };
  for (auto& l : loads) l->mark();
  pause_ms(60);
  std::printf("beside %-44s %6.1f GB/s alone;", s.name, rate());
  for (size_t size : {kUnit, 4 * kUnit, 16 * kUnit}) {
    std::vector<double> made, dropped;
    for (auto& l : loads) l->mark();
    for (int i = 0; i < 60; ++i) {
      const double a = now();
      make(scratch, size);
      const double b = now();
      drop(scratch, size);
      dropped.push_back((now() - b) * 1e6);
      made.push_back((b - a) * 1e6);
    }
    std::printf(" %zu MiB: prepare %.0f p90 %.0f, punch %.0f us, load %.1f GB/s;", size >> 20, percentile(made, 50),
                percentile(made, 90), percentile(dropped, 50), rate());
  }
  std::printf("\n");
}

void rates() {
  std::byte *const plain_in = plain, *const plain_out = plain + kPart;
  struct Way {
    const char* name;
    Side in, out;
  };
  for (const Way& w :
       {Way{"plain memory", {plain_in, true}, {plain_out, false}}, Way{"blocks", {made_in, true}, {made_out, false}},
        Way{"in: plain memory, out: blocks", {plain_in, true}, {made_out, false}},
        Way{"in: blocks, out: plain memory", {made_in, true}, {plain_out, false}},
        Way{"blocks, in by way of plain memory", {made_in, true, plain_in}, {made_out, false}},
        Way{"blocks, both by way of it", {made_in, true, plain_in}, {made_out, false, plain_out}}})
    for (size_t piece : {kUnit, 4 * kUnit, 16 * kUnit}) {
      const auto rate = [&](std::vector<Side> sides) {
        std::vector<std::unique_ptr<Load>> loads;
        for (const Side& s : sides) loads.push_back(std::make_unique<Load>(s, piece));
        for (auto& l : loads) l->mark();
        pause_ms(80);
        double sum = 0;
        for (auto& l : loads) sum += l->gbps();
        return sum;
      };
      std::printf("copies of %2zu MiB, %-36s in %6.1f  out %6.1f  both %6.1f GB/s\n", piece >> 20, w.name, rate({w.in}),
                  rate({w.out}), rate({w.in, w.out}));
    }
}

// Measures how long calls take that should only queue, and how long until the copy is seen to be
// done.
void issue() {
  for (size_t size : {kUnit, 4 * kUnit, 16 * kUnit})
    for (const bool in : {true, false}) {
      std::vector<double> queue, polled, slept, raw, raw_done;
      cudaStream_t stream;
      must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
      for (int i = 0; i < 80; ++i) {
        std::byte* block = in ? scratch : made_out;
        if (in) make(scratch, size);
        const device::Copy copy{reinterpret_cast<uintptr_t>(block), in ? host_in : host_out, size};
        Ticket t;
        bool done = false;
        const double a = now();
        if (i % 4 < 2) {
          must(in ? d->copy_in(0, std::span(&copy, 1), &t) : d->copy_out(0, std::span(&copy, 1), &t));
          const double b = now();
          queue.push_back((b - a) * 1e6);
          if (i % 2 == 0)
            while (!done) must(d->poll(t, &done));
          else
            must(d->wait(t));
          (i % 2 == 0 ? polled : slept).push_back((now() - a) * 1e6);
        } else {
          must(cudaMemcpyAsync(in ? plain : host_out, in ? host_in : plain, size,
                               in ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost, stream));
          raw.push_back((now() - a) * 1e6);
          must(cudaStreamSynchronize(stream));
          raw_done.push_back((now() - a) * 1e6);
        }
        if (in) drop(scratch, size);
      }
      std::printf(
          "copy %s %2zu MiB: call %5.1f us, done when polled %6.1f, when slept for %6.1f; plain memory: call %5.1f, "
          "done %6.1f\n",
          in ? "in " : "out", size >> 20, percentile(queue, 50), percentile(polled, 50), percentile(slept, 50),
          percentile(raw, 50), percentile(raw_done, 50));
      cudaStreamDestroy(stream);
    }
}

// Another thread of the application allocates and frees without a pause. Which of the two waits for
// the other?
void beside_malloc() {
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> rounds{0};
  std::thread other([&] {
    while (!stop) {
      void* p = nullptr;
      must(cudaMalloc(&p, 1 << 20));
      must(cudaFree(p));
      ++rounds;
    }
  });
  pause_ms(5);
  const char* const names[] = {"prepare", "copy_in", "wait", "order_after", "record", "poll", "punch", "memory"};
  std::vector<double> us[8];
  cudaStream_t stream;
  must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const double begin = now();
  for (int i = 0; i < 30 && now() - begin < 15; ++i) {
    double t = now();
    const auto lap = [&](size_t step) {
      us[step].push_back((now() - t) * 1e6);
      t = now();
    };
    const device::Copy copy{reinterpret_cast<uintptr_t>(scratch), host_in, kUnit};
    Ticket in, used;
    bool done = false;
    make(scratch, kUnit);
    lap(0);
    must(d->copy_in(0, std::span(&copy, 1), &in));
    lap(1);
    must(d->wait(in));
    lap(2);
    must(d->order_after(in, stream, 0));
    lap(3);
    must(d->record(stream, 0, &used));
    lap(4);
    must(d->poll(used, &done));
    lap(5);
    drop(scratch, kUnit);
    lap(6);
    device::Memory m{};
    must(d->memory(0, &m));
    lap(7);
  }
  stop = true;
  other.join();
  std::printf("beside cudaMalloc + cudaFree in a loop (%.0f a second):", static_cast<double>(rounds) / (now() - begin));
  for (size_t i = 0; i < 8; ++i) {
    const double median = percentile(us[i], 50);
    std::printf(" %s %.0f (max %.0f)", names[i], median, us[i].back());  // sorted by now
  }
  std::printf(" us\n");
  cudaStreamDestroy(stream);
}

}  // namespace

int main() {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  const uint64_t limit = gpu::managed_limit();
  if (limit == 0) {
    std::printf("SKIPPED: no CUDA device\n");
    return 77;
  }
  gpu::require_managed(3 * kPart, limit);
  cudaSetDevice(0);
  std::string why;
  must(device::make_devices("managed", device::kUnit, &d, &why));
  void* p = mmap(nullptr, 2 * kPart + kUnit, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  host_in = reinterpret_cast<std::byte*>(core::round_up(reinterpret_cast<uintptr_t>(p), kUnit));
  madvise(host_in, 2 * kPart, MADV_HUGEPAGE);
  std::memset(host_in, 1, 2 * kPart);
  host_out = host_in + kPart;
  must(d->pin(host_in, 2 * kPart));
  must(cudaMalloc(reinterpret_cast<void**>(&plain), 2 * kPart));
  void* base = nullptr;
  must(d->reserve(2 * kPart + 16 * kUnit, 0, &base));
  made_in = static_cast<std::byte*>(base);
  made_out = made_in + kPart;
  scratch = made_out + kPart;
  for (std::byte* part : {made_in, made_out})
    for (size_t offset = 0; offset < kPart; offset += kUnit) make(part + offset, kUnit);

  rates();
  issue();
  const Side plain_in{plain, true}, plain_out{plain + kPart, false}, in{made_in, true}, out{made_out, false};
  const Side staged{made_in, true, plain};
  for (const Setting& s : std::vector<Setting>{{"nothing", {}, kUnit},
                                               {"plain in, 2 MiB", {plain_in}, kUnit},
                                               {"plain out, 2 MiB", {plain_out}, kUnit},
                                               {"plain out, 32 MiB", {plain_out}, 16 * kUnit},
                                               {"blocks in, 2 MiB", {in}, kUnit},
                                               {"blocks in, 32 MiB", {in}, 16 * kUnit},
                                               {"blocks out, 2 MiB", {out}, kUnit},
                                               {"blocks out, 32 MiB", {out}, 16 * kUnit},
                                               {"blocks both, 2 MiB", {in, out}, kUnit},
                                               {"blocks in by way of plain memory, 2 MiB", {staged}, kUnit},
                                               {"blocks both, in by way of it, 2 MiB", {staged, out}, kUnit}})
    beside(s);
  beside_malloc();
  must(d->release(base));
  cudaFree(plain);
  must(d->unpin(host_in));
  d.reset();
  std::printf("overlap: done\n");
  return 0;
}
