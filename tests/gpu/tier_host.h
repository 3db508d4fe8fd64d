// Rows of tier_bench: between host frames and the device, and on the device.
#pragma once

#include <chrono>
#include <thread>

#include "tier_disk.h"

namespace gpubench {

// Plain unified memory that CUDA's prefetch moves.
class Managed {
 public:
  explicit Managed(size_t bytes) {
    gpuapp::must(cudaMallocManaged(reinterpret_cast<void**>(&data_), bytes), "cudaMallocManaged");
  }
  ~Managed() { cudaFree(data_); }
  Managed(const Managed&) = delete;
  Managed& operator=(const Managed&) = delete;
  char* data() const { return data_; }
  void prefetch(size_t at, size_t bytes, bool to_device, void* stream) const {
    prefetch_to(to_device ? 0 : cudaCpuDeviceId, at, bytes, static_cast<cudaStream_t>(stream));
  }
  void prefetch_to(int device, size_t at, size_t bytes, cudaStream_t stream) const {
#if CUDART_VERSION >= 13000
    const bool host = device == cudaCpuDeviceId;
    const cudaMemLocation where{host ? cudaMemLocationTypeHost : cudaMemLocationTypeDevice, host ? 0 : device};
    gpuapp::must(cudaMemPrefetchAsync(data_ + at, bytes, where, 0, stream), "cudaMemPrefetchAsync");
#else
    gpuapp::must(cudaMemPrefetchAsync(data_ + at, bytes, device, stream), "cudaMemPrefetchAsync");
#endif
  }

 private:
  char* data_ = nullptr;
};

class HostRows : public DiskRows {
 public:
  using DiskRows::DiskRows;

 protected:
  // ---- host frames and device
  // -----------------------------------------------------------------------------------------

  static constexpr int kTimes = 8;  // passes per sample, since one is short

  vmem::region on_device(uint64_t bytes) {
    vmem::region r(bytes);
    acquire(r.data(), bytes, VMEM_WRITE);
    kernels_.set(stream_.get(), r.data(), bytes, 0, 5, false);
    release(r.data(), bytes);
    stream_.synchronize();
    return r;
  }
  void bring(const vmem::region& r, uint64_t from, uint64_t bytes, uint64_t step, bool ahead) const {
    uint64_t asked = from;
    for (uint64_t offset = from; offset < from + bytes; offset += step) {
      for (; ahead && asked < from + bytes && asked <= offset + std::max(step, 64 * kMiB); asked += step)
        vmem::check(vmem_prefetch(at(r, asked), std::min(step, from + bytes - asked), 0, nullptr));
      const uint64_t n = std::min(step, from + bytes - offset);
      acquire(at(r, offset), n, VMEM_READ);
      release(at(r, offset), n);
    }
  }
  void take(const vmem::region& r, uint64_t from, uint64_t bytes, uint64_t step, bool hints) const {
    for (uint64_t offset = from; offset < from + bytes; offset += step) {
      const uint64_t n = std::min(step, from + bytes - offset);
      hints ? vmem::check(vmem_prefetch(at(r, offset), n, VMEM_HOST, nullptr))
            : vmem::check(vmem_evict(at(r, offset), n, VMEM_HOST));
    }
    if (hints) vmem::check(vmem_evict(at(r, from), bytes, VMEM_HOST));  // waits for the hints
  }
  // Changes the data on the device, so that host memory has no copy and leaving takes a transfer.
  void change(const vmem::region& r, uint64_t from, uint64_t bytes) {
    acquire(at(r, from), bytes, VMEM_READ | VMEM_WRITE);
    kernels_.set(stream_.get(), at(r, from), bytes, from, 5, false);
    release(at(r, from), bytes);
    stream_.synchronize();
  }
  void expect_all(const vmem::region& r, bool on_the_device) const {
    const auto q = r.query();
    const uint64_t there = on_the_device ? q.device_bytes : q.host_bytes;
    if (there != r.size()) {
      throw std::runtime_error("only " + std::to_string(there >> 20) + " of " + std::to_string(r.size() >> 20) +
                               " MiB are " + (on_the_device ? "on the device" : "in host memory"));
    }
  }
  Sample to_device(const vmem::region& r, uint64_t step, bool ahead) {
    double seconds = 0, cpu = 0;
    for (int i = 0; i < kTimes; ++i) {
      r.evict(VMEM_HOST);
      expect_all(r, false);
      const double start = rawdisk::now(), before = Meter::cpu();
      bring(r, 0, r.size(), step, ahead);
      stream_.synchronize();
      seconds += rawdisk::now() - start;
      cpu += Meter::cpu() - before;
    }
    verify(r);
    return rate(kTimes * r.size(), seconds, cpu);
  }
  Sample to_host(const vmem::region& r, uint64_t step, bool hints) {
    double seconds = 0, cpu = 0;
    for (int i = 0; i < kTimes; ++i) {
      bring(r, 0, r.size(), r.size(), false);
      change(r, 0, r.size());
      expect_all(r, true);
      const double start = rawdisk::now(), before = Meter::cpu();
      take(r, 0, r.size(), step, hints);
      seconds += rawdisk::now() - start;
      cpu += Meter::cpu() - before;
    }
    expect_all(r, false);
    return rate(kTimes * r.size(), seconds, cpu);
  }
  void verify(const vmem::region& r) {
    acquire(r.data(), r.size(), VMEM_READ);
    kernels_.check(stream_.get(), r.data(), r.size(), 0, 5, false);
    release(r.data(), r.size());
    stream_.synchronize();
  }
  static Sample rate(uint64_t bytes, double seconds, double cpu) {
    const double gb = static_cast<double>(bytes) / 1e9;
    return {gb / seconds, cpu / gb, 0, ""};
  }
  Sample pinned(uint64_t step, bool in) {
    gpuapp::Pinned host(app_, span_);
    gpuapp::Plain device(app_, span_);
    const double cpu = Meter::cpu();
    const double gbs = gpuapp::copy_rate(app_, host, device, step, kTimes * span_, in);
    return {gbs, (Meter::cpu() - cpu) / (static_cast<double>(kTimes * span_) / 1e9), 0, ""};
  }
  Sample driver_prefetch(uint64_t step, bool in) {
    const Managed m(span_);
    memset(m.data(), 1, span_);
    double seconds = 0;
    for (int i = 0; i < kTimes; ++i) {
      for (const bool to_device : {true, false}) {
        const double start = rawdisk::now();
        parts(span_, step, [&](uint64_t offset, uint64_t n) { m.prefetch(offset, n, to_device, stream_.get()); });
        stream_.synchronize();
        if (to_device == in) seconds += rawdisk::now() - start;
      }
    }
    return rate(kTimes * span_, seconds, 0);
  }
  std::vector<Way> with_driver(std::vector<Way> ways, const std::function<Sample()>& way) const {
    if (!app_.simulated()) ways.emplace_back("other", way);
    return ways;
  }
  void host_and_device(uint64_t step) {
    const std::string size = std::to_string(step / kMiB), a_call = ", " + size + " MiB a call";
    if (step < s_.block) return;  // a lease covers whole blocks
    if (!table_.wanted("h2d-" + size, true) && !table_.wanted("d2h-" + size, true)) return;
    const vmem::region r = on_device(span_);
    take(r, 0, span_, span_, false);
    bring(r, 0, span_, span_, false);  // now the staging frames exist
    stream_.synchronize();
    for (const bool ahead : {true, false}) {
      table_.row("h2d-" + size + (ahead ? "" : "-one"),
                 "host frames -> device" + a_call + (ahead ? ", prefetch 64 MiB ahead" : ", acquire alone"), "GB/s",
                 with_driver({{"raw", [&] { return pinned(step, true); }},
                              {"vmem", [&, ahead] { return to_device(r, step, ahead); }}},
                             [&] { return driver_prefetch(step, true); }));
    }
    for (const bool hints : {true, false}) {
      table_.row("d2h-" + size + (hints ? "" : "-one"),
                 "device -> host frames" + a_call + (hints ? ", prefetch to the host" : ", evict alone"), "GB/s",
                 with_driver({{"raw", [&] { return pinned(step, false); }},
                              {"vmem", [&, hints] { return to_host(r, step, hints); }}},
                             [&] { return driver_prefetch(step, false); }));
    }
  }
  Sample raw_both() {
    gpuapp::Pinned host(app_, span_);
    gpuapp::Plain device(app_, span_);
    gpuapp::Stream in(app_), out(app_);
    const uint64_t half = span_ / 2;
    Meter m;
    for (int i = 0; i < kTimes; ++i) {
      parts(half, std::min<uint64_t>(half, 8 * kMiB), [&](uint64_t offset, uint64_t n) {
        app_.copy(device.data() + offset, host.data() + offset, n, in.get());
        app_.copy(host.data() + half + offset, device.data() + half + offset, n, out.get());
      });
    }
    in.synchronize();
    out.synchronize();
    m.stop();
    return m.rate(2 * kTimes * half);
  }
  Sample vmem_both(const vmem::region& r) {
    const uint64_t half = span_ / 2, step = std::min(half, std::max<uint64_t>(8 * kMiB, s_.block));
    double seconds = 0, cpu = 0;
    for (int i = 0; i < kTimes; ++i) {
      const uint64_t away = i % 2 == 0 ? 0 : half, here = half - away;
      bring(r, away, half, half, false);
      change(r, away, half);
      take(r, here, half, half, false);
      std::string failed;
      const double start = rawdisk::now(), before = Meter::cpu();
      std::thread other([&] {
        try {
          take(r, away, half, step, true);
        } catch (const std::exception& e) {
          failed = e.what();
        }
      });
      bring(r, here, half, step, true);
      stream_.synchronize();
      other.join();
      seconds += rawdisk::now() - start;
      cpu += Meter::cpu() - before;
      if (!failed.empty()) return {0, 0, 0, failed};
    }
    verify(r);
    return rate(2 * kTimes * half, seconds, cpu);
  }
  void both_ways() {
    if (!table_.wanted("duplex", true)) return;
    const vmem::region r = on_device(span_);
    const uint64_t step = std::max<uint64_t>(8 * kMiB, s_.block);
    table_.row(
        "duplex",
        "host frames -> device and device -> host frames at once, " + std::to_string(step / kMiB) + " MiB a call (sum)",
        "GB/s", {{"raw", [&] { return raw_both(); }}, {"vmem", [&] { return vmem_both(r); }}});
  }

  // ---- no data to move
  // ------------------------------------------------------------------------------------------------

  void first_touch() {
    const uint64_t bytes = s_.budget / kBlock * kBlock;
    const auto memset_alone = [&, bytes] {
      void* plain = nullptr;
      gpuapp::must(cudaMalloc(&plain, bytes), "cudaMalloc");
      Meter m;
      parts(bytes, s_.part, [&](uint64_t offset, uint64_t n) {
        gpuapp::must(
            cudaMemsetAsync(static_cast<std::byte*>(plain) + offset, 0, n, static_cast<cudaStream_t>(stream_.get())),
            "cudaMemset");
      });
      stream_.synchronize();
      m.stop();
      cudaFree(plain);
      return m.rate(bytes);
    };
    table_.row("touch",
               "first touch on the device, acquired part by part (raw: cudaMemset of plain memory; other: managed "
               "memory, prefetched)",
               "GB/s",
               with_driver({{"raw", memset_alone},
                            {"vmem",
                             [&, bytes] {
                               vmem::region r(bytes);
                               Meter m;
                               bring(r, 0, bytes, s_.part, false);
                               stream_.synchronize();
                               m.stop();
                               return m.rate(bytes);
                             }}},
                           [&, bytes] {
                             const Managed managed(bytes);
                             Meter m;
                             parts(bytes, s_.part, [&](uint64_t offset, uint64_t n) {
                               managed.prefetch(offset, n, true, stream_.get());
                               stream_.synchronize();
                             });
                             m.stop();
                             return m.rate(bytes);
                           }));
  }
  enum class Figure { acquire_cpu, acquire_time, release_cpu, process_cpu };
  // Leases all parts of the region, `bytes` each, then runs a kernel under them, then releases
  // them.
  Sample lease_cost(const vmem::region& r, size_t bytes, Figure figure) {
    const uint64_t count = r.size() / bytes, rounds = std::min<uint64_t>(500, 4000 / count);
    std::vector<double> us;
    const auto note = [&](double seconds) { us.push_back(seconds / static_cast<double>(count) * 1e6); };
    const double process = Meter::cpu();
    for (uint64_t i = 0; i < rounds; ++i) {
      double cpu = thread_cpu();
      parts(r.size(), bytes, [&](uint64_t offset, uint64_t n) {
        const double start = rawdisk::now();
        acquire(at(r, offset), n, VMEM_READ);
        if (figure == Figure::acquire_time) us.push_back((rawdisk::now() - start) * 1e6);
      });
      if (figure == Figure::acquire_cpu) note(thread_cpu() - cpu);
      if (figure != Figure::process_cpu) kernels_.read(stream_.get(), r.data(), kBlock, false);
      cpu = thread_cpu();
      parts(r.size(), bytes, [&](uint64_t offset, uint64_t n) { release(at(r, offset), n); });
      if (figure == Figure::release_cpu) note(thread_cpu() - cpu);
      if (figure != Figure::process_cpu) stream_.synchronize();
    }
    stream_.synchronize();
    if (figure == Figure::process_cpu)
      return {(Meter::cpu() - process) / static_cast<double>(rounds * count) * 1e6, 0, 0, ""};
    return latency(us);
  }
  void leases() {
    if (!table_.wanted("lease", true)) return;
    for (const size_t bytes : {kBlock, size_t{32 * kMiB}, size_t{1} << 30}) {
      if (bytes < s_.block || bytes > std::max(kBlock, s_.budget / 4 * 3)) continue;
      const vmem::region r = on_device(std::min<uint64_t>(std::max(bytes, 32 * kMiB), s_.budget / 4 * 3));
      verify(r);  // the leases for writing have ended
      const std::string size = std::to_string(bytes / kMiB), of = " of " + size + " MiB that are there, ";
      const auto figure = [&](const char* key, const std::string& what, Figure f) {
        table_.row("lease-" + size + key, what, "us", {{"vmem", [&, f] { return lease_cost(r, bytes, f); }}}, true);
      };
      figure("-acquire", "acquire" + of + "CPU time of the call", Figure::acquire_cpu);
      figure("-time", "acquire" + of + "time of the call", Figure::acquire_time);
      figure("-release", "release" + of + "CPU time of the call", Figure::release_cpu);
      figure("-both", "acquire and release" + of + "CPU time of all threads, no kernel", Figure::process_cpu);
    }
  }
  // The CPU loads one word in the middle of each block on the device, with pauses for the work that
  // follows a load.
  Sample load_time(const vmem::region& r, bool leased) {
    bring(r, 0, r.size(), r.size(), false);
    change(r, 0, r.size());
    if (leased) acquire(r.data(), r.size(), VMEM_READ);
    std::vector<double> us;
    for (uint64_t middle = s_.block / 2; middle < r.size(); middle += s_.block) {
      const double start = rawdisk::now();
      const uint64_t word = *reinterpret_cast<const volatile uint64_t*>(at(r, middle));
      us.push_back((rawdisk::now() - start) * 1e6);
      if (word != stamp(middle / 8, 5)) throw std::runtime_error("a load of the CPU saw another word");
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    if (leased) release(r.data(), r.size());
    stream_.synchronize();
    return latency(us);
  }
  void loads() {
    if (!table_.wanted("load", true)) return;
    const vmem::region r = on_device(std::min(s_.budget / 2, 16 * s_.block) / s_.block * s_.block);
    const std::string size = std::to_string(s_.block / kMiB);
    const auto row = [&](const char* key, const char* which, bool leased) {
      table_.row(key, "load by the CPU of a block of " + size + " MiB on the device, " + which, "us",
                 {{"vmem", [&, leased] { return load_time(r, leased); }}}, true);
    };
    row("load", "which nobody leases", false);
    row("load-leased", "under a READ lease there", true);
    r.advise(VMEM_ADVISE_SET_READ_MOSTLY);
    row("load-mostly", "which nobody leases, advised READ_MOSTLY", false);
  }
  Sample read_rate(const void* p, bool plain) {
    kernels_.read(stream_.get(), p, span_, plain);
    const int times = app_.simulated() ? 2 : 100;
    const auto start = app_.mark(stream_.get());
    for (int i = 0; i < times; ++i) kernels_.read(stream_.get(), p, span_, plain);
    const auto end = app_.mark(stream_.get());
    stream_.synchronize();
    return {static_cast<double>(span_) * times / 1e9 / end->seconds_since(*start), 0, 0, ""};
  }
  void resident_kernel() {
    if (!table_.wanted("kernel", true)) return;
    const vmem::region r = on_device(span_);
    const gpuapp::Plain plain(app_, span_);
    kernels_.set(stream_.get(), plain.data(), span_, 0, 5, true);
    table_.row("kernel", "kernel that reads what is there (raw: cudaMalloc memory)", "GB/s",
               {{"raw", [&] { return read_rate(plain.data(), true); }}, {"vmem", [&] {
                                                                           acquire(r.data(), span_, VMEM_READ);
                                                                           const Sample s = read_rate(r.data(), false);
                                                                           release(r.data(), span_);
                                                                           return s;
                                                                         }}});
  }
};

}  // namespace gpubench
