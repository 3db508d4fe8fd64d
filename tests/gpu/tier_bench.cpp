// The device tier through the C API: disk to device and back, host frames to device and back, random blocks, first
// touch, leases of what is there. Beside raw io_uring, raw pinned copies, the loop an expert writes by hand, and CUDA's
// own prefetch of managed memory, all in one run. What it does not measure: several GPUs, many threads that lease at
// once, pressure from other programs, compression, kernels that compute much (examples/vmem-stream does).
//
// At most --bytes of managed memory are alive at a time, and never more than an eighth of what is free.
#include <sys/statfs.h>
#include <sys/utsname.h>
#include <time.h>

#include <CLI/CLI.hpp>
#include <fstream>
#include <numeric>
#include <random>
#include <thread>

#include "bench_kernels.h"
#include "bench_table.h"
#include "gpu_limits.h"
#include "hand_loop.h"
#include "vmem/vmem.hpp"

namespace gpubench {

namespace {

constexpr uint64_t kMiB = 1 << 20;
constexpr size_t kBlock = 2 * kMiB;

struct Settings {
  std::string device = "auto", json, only, fast = "/dev/shm";
  std::string folder = getenv("TMPDIR") != nullptr ? getenv("TMPDIR") : "/var/tmp";
  uint64_t bytes = 0, budget = 0, host_budget = 0, part = 0;
  int rounds = 3;
};

double thread_cpu() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) / 1e9;
}

#ifdef VMEM_HAVE_CUDA
// Plain unified memory, moved by CUDA's prefetch.
class Managed {
 public:
  explicit Managed(size_t bytes) : size_(bytes) {
    gpuapp::must(cudaMallocManaged(reinterpret_cast<void**>(&data_), bytes), "cudaMallocManaged");
  }
  ~Managed() { cudaFree(data_); }
  Managed(const Managed&) = delete;
  Managed& operator=(const Managed&) = delete;
  char* data() const { return data_; }
  void prefetch(size_t at, size_t bytes, bool to_device, void* stream) const {
    const auto s = static_cast<cudaStream_t>(stream);
#if CUDART_VERSION >= 13000
    const cudaMemLocation where{to_device ? cudaMemLocationTypeDevice : cudaMemLocationTypeHost, 0};
    gpuapp::must(cudaMemPrefetchAsync(data_ + at, bytes, where, 0, s), "cudaMemPrefetchAsync");
#else
    gpuapp::must(cudaMemPrefetchAsync(data_ + at, bytes, to_device ? 0 : cudaCpuDeviceId, s), "cudaMemPrefetchAsync");
#endif
  }

 private:
  char* data_ = nullptr;
  size_t size_;
};
#endif

class TierBench {
 public:
  TierBench(gpuapp::App& app, const Settings& s)
      : s_(s),
        app_(app),
        kernels_(app),
        stream_(app),
        table_(s.rounds, s.only),
        file_(s.folder + "/vmem-tier." + std::to_string(getpid())),
        fast_(s.fast + "/vmem-tier." + std::to_string(getpid())),
        span_(std::min<uint64_t>(256 * kMiB, s.budget / 2)) {}
  ~TierBench() {
    unlink(file_.c_str());
    unlink(fast_.c_str());
  }
  TierBench(const TierBench&) = delete;
  TierBench& operator=(const TierBench&) = delete;

  // False: something failed, or a word was wrong.
  bool run() {
    from_disk();
    random_blocks();
    to_disk();
    for (const uint64_t step : {2 * kMiB, 8 * kMiB, 32 * kMiB}) {
      if (step <= span_) host_and_device(step);
    }
    both_ways();
    first_touch();
    leases();
    resident_kernel();
    table_.print();
    if (kernels_.wrong() != 0) printf("\nWRONG: %llu words were not what had been written\n", kernels_.wrong());
    if (!s_.json.empty()) save();
    return !table_.failed() && kernels_.wrong() == 0;
  }

 private:
  void need_file(const std::string& path) {
    if (access(path.c_str(), R_OK) == 0) return;
    const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) throw std::system_error(errno, std::generic_category(), path);
    std::vector<uint64_t> part(4 * kMiB / 8);
    bool good = true;
    for (uint64_t at = 0; at < s_.bytes && good; at += part.size() * 8) {
      for (size_t i = 0; i < part.size(); ++i) part[i] = stamp(at / 8 + i, 1);
      const uint64_t n = std::min<uint64_t>(part.size() * 8, s_.bytes - at);
      good = pwrite(fd, part.data(), n, static_cast<off_t>(at)) == static_cast<ssize_t>(n);
    }
    const int why = errno;
    fsync(fd);
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    close(fd);
    if (!good) throw std::system_error(why, std::generic_category(), path);
  }
  rawdisk::Plan plan() const {
    rawdisk::Plan p;
    p.span = p.total = s_.bytes;
    return p;
  }
  Sample raw(const std::string& path, const rawdisk::Plan& p, bool flush = false) const {
    Meter m;
    const auto r = rawdisk::run(path, p);
    m.stop();
    if (!r.error.empty()) return {0, 0, 0, r.error};
    Sample s = m.rate(p.total);
    double seconds = r.seconds;
    if (flush) {
      const double start = rawdisk::now();
      if (const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC); fd >= 0) {
        fdatasync(fd);
        close(fd);
      }
      seconds += rawdisk::now() - start;
    }
    s.value = static_cast<double>(p.total) / 1e9 / seconds;  // without making the buffers
    return s;
  }
  void acquire(const void* p, size_t n, unsigned access) const {
    vmem::check(vmem_acquire(p, n, access, 0, stream_.get()));
  }
  void release(const void* p, size_t n) const { vmem::check(vmem_release(p, n, stream_.get())); }
  static char* at(const vmem::region& r, uint64_t offset) { return static_cast<char*>(r.data()) + offset; }
  // Calls fn(offset, bytes) for the parts of [0, bytes).
  template <typename Fn>
  static void parts(uint64_t bytes, uint64_t step, Fn fn) {
    for (uint64_t offset = 0; offset < bytes; offset += step) fn(offset, std::min(step, bytes - offset));
  }

  // ---- disk to device
  // -------------------------------------------------------------------------------------------------

  Sample stream_in(const std::string& path, uint64_t ahead) {
    vmem::region r(s_.bytes, path, 0, VMEM_MAP_READ);
    r.advise(VMEM_ADVISE_SEQUENTIAL);
    Meter m;
    uint64_t asked = 0;
    parts(s_.bytes, s_.part, [&](uint64_t offset, uint64_t n) {
      for (; asked < s_.bytes && asked <= offset + ahead * s_.part && ahead != 0; asked += s_.part)
        vmem::check(vmem_prefetch(at(r, asked), std::min(s_.part, s_.bytes - asked), 0, stream_.get()));
      acquire(at(r, offset), n, VMEM_READ);
      kernels_.check(stream_.get(), at(r, offset), n, offset, 1, false);
      release(at(r, offset), n);
    });
    stream_.synchronize();
    m.stop();
    return m.rate(s_.bytes);
  }
  Sample hand_in(const std::string& path) {
    HandLoop loop(app_, path, s_.part, false);
    Meter m;
    loop.in(s_.bytes,
            [&](char* p, uint64_t offset, size_t n, void* stream) { kernels_.check(stream, p, n, offset, 1, true); });
    m.stop();
    return m.rate(s_.bytes);
  }
  void from_disk() {
    for (const auto& [path, name, direct] :
         {std::tuple{file_, "disk", true}, std::tuple{fast_, "a file in memory (tmpfs)", false}}) {
      const std::string key = direct ? "in" : "fast";
      if (!table_.wanted(key, true)) continue;
      if (!direct && access(s_.fast.c_str(), W_OK) != 0) continue;
      need_file(path);
      rawdisk::Plan p = plan();
      p.direct = direct;
      const auto limit = [&, p, path = path] { return raw(path, p); };
      const auto hand = [&, path = path] { return hand_in(path); };
      const std::string what = std::string(name) + " -> device, in order, ";
      for (const uint64_t ahead : {1, 2, 0}) {
        table_.row(key + "-ahead-" + std::to_string(ahead), what + std::to_string(ahead) + " parts ahead", "GB/s",
                   {{"raw", limit}, {"hand", hand}, {"vmem", [&, path = path] { return stream_in(path, ahead); }}});
      }
      if (!direct) unlink(path.c_str());
    }
  }

  // ---- device to disk
  // -------------------------------------------------------------------------------------------------

  Sample stream_out() {
    vmem::region r(s_.bytes);
    ++mark_;
    Meter m;
    parts(s_.bytes, s_.part, [&](uint64_t offset, uint64_t n) {
      acquire(at(r, offset), n, VMEM_WRITE);
      kernels_.set(stream_.get(), at(r, offset), n, offset, mark_, false);
      release(at(r, offset), n);
    });
    stream_.synchronize();
    r.sync();
    m.stop();
    parts(s_.bytes, s_.part, [&](uint64_t offset, uint64_t n) {  // what came back is what went out
      acquire(at(r, offset), n, VMEM_READ);
      kernels_.check(stream_.get(), at(r, offset), n, offset, mark_, false);
      release(at(r, offset), n);
    });
    stream_.synchronize();
    return m.rate(s_.bytes);
  }
  Sample hand_out() {
    HandLoop loop(app_, file_, s_.part, true);
    Meter m;
    loop.out(s_.bytes,
             [&](char* p, uint64_t offset, size_t n, void* stream) { kernels_.set(stream, p, n, offset, 1, true); });
    m.stop();
    return m.rate(s_.bytes);
  }
  // Changed in place: read, changed by a kernel, written; durable at the end.
  Sample change() {
    vmem::region r(s_.bytes, file_, 0, VMEM_MAP_SHARED);
    Meter m;
    uint64_t asked = 0;
    parts(s_.bytes, s_.part, [&](uint64_t offset, uint64_t n) {
      for (; asked < s_.bytes && asked <= offset + s_.part; asked += s_.part)
        vmem::check(vmem_prefetch(at(r, asked), std::min(s_.part, s_.bytes - asked), 0, stream_.get()));
      acquire(at(r, offset), n, VMEM_READ | VMEM_WRITE);
      kernels_.check(stream_.get(), at(r, offset), n, offset, file_mark_, false);
      kernels_.set(stream_.get(), at(r, offset), n, offset, file_mark_ + 1, false);
      release(at(r, offset), n);
    });
    stream_.synchronize();
    r.sync();
    m.stop();
    ++file_mark_;
    r.free();
    return m.rate(s_.bytes);
  }
  void to_disk() {
    if (table_.wanted("out")) {
      need_file(file_);
      rawdisk::Plan writes = plan();
      writes.write = true;
      table_.row("out", "device -> SSD, new data, until all of it has a copy there", "GB/s",
                 {{"raw", [&, writes] { return raw(file_, writes); }},
                  {"hand", [&] { return hand_out(); }},
                  {"vmem", [&] { return stream_out(); }}});
      unlink(file_.c_str());  // the raw writes were of no stamps
    }
    if (table_.wanted("change")) {
      need_file(file_);
      file_mark_ = 1;
      rawdisk::Plan mixed = plan();
      mixed.write_back = true;
      table_.row("change", "file -> device, changed there, -> file, durable (bytes read; as many are written)", "GB/s",
                 {{"raw", [&, mixed] { return raw(file_, mixed, true); }}, {"vmem", [&] { return change(); }}});
      unlink(file_.c_str());
    }
  }

  // ---- blocks at random
  // -----------------------------------------------------------------------------------------------

  std::vector<uint64_t> shuffled() {
    std::vector<uint64_t> order(s_.bytes / kBlock);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random_);
    return order;
  }
  Sample random_acquire(size_t ahead) {
    const auto order = shuffled();
    vmem::region r(s_.bytes, file_, 0, VMEM_MAP_READ);
    r.advise(VMEM_ADVISE_RANDOM);
    std::vector<double> us;
    Meter m;
    size_t asked = 0;
    const size_t count = ahead != 0 ? order.size() : std::min<size_t>(order.size(), 400);
    for (size_t i = 0; i < count; ++i) {
      for (; ahead != 0 && asked < count && asked <= i + ahead; ++asked)
        vmem::check(vmem_prefetch(at(r, order[asked] * kBlock), kBlock, 0, stream_.get()));
      const double start = rawdisk::now();
      acquire(at(r, order[i] * kBlock), kBlock, VMEM_READ);
      kernels_.check(stream_.get(), at(r, order[i] * kBlock), kBlock, order[i] * kBlock, 1, false);
      release(at(r, order[i] * kBlock), kBlock);
      if (ahead == 0) {
        stream_.synchronize();
        us.push_back((rawdisk::now() - start) * 1e6);
      }
    }
    stream_.synchronize();
    m.stop();
    return ahead != 0 ? m.rate(count * kBlock) : latency(us);
  }
  // One direct read into a pinned buffer, one copy, one kernel, one after the other.
  Sample random_by_hand() {
    const auto order = shuffled();
    int fd = open(file_.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
    if (fd < 0) fd = open(file_.c_str(), O_RDONLY | O_CLOEXEC);
    gpuapp::Pinned host(app_, kBlock);
    gpuapp::Plain device(app_, kBlock);
    std::vector<double> us;
    std::string failed;
    for (size_t i = 0; i < std::min<size_t>(order.size(), 400) && failed.empty(); ++i) {
      const uint64_t offset = order[i] * kBlock;
      const double start = rawdisk::now();
      if (pread(fd, host.data(), kBlock, static_cast<off_t>(offset)) != static_cast<ssize_t>(kBlock))
        failed = "read: " + std::string(strerror(errno));
      app_.copy(device.data(), host.data(), kBlock, stream_.get());
      kernels_.check(stream_.get(), device.data(), kBlock, offset, 1, true);
      stream_.synchronize();
      us.push_back((rawdisk::now() - start) * 1e6);
    }
    close(fd);
    return failed.empty() ? latency(us) : Sample{0, 0, 0, failed};
  }
  void random_blocks() {
    if (!table_.wanted("random", true)) return;
    need_file(file_);
    rawdisk::Plan p = plan();
    p.random = true;
    const auto deep = [&, p]() mutable {
      p.seed = random_();
      return raw(file_, p);
    };
    const auto shallow = [&, p]() mutable {
      p.seed = random_();
      p.depth = 1;
      p.total = std::min<uint64_t>(s_.bytes, 400 * kBlock);
      const auto r = rawdisk::run(file_, p);
      return Sample{r.p50_us, 0, r.p99_us, r.error};
    };
    table_.row("random-stream", "blocks of 2 MiB at random, SSD -> device, 16 ahead", "GB/s",
               {{"raw", deep}, {"vmem", [&] { return random_acquire(16); }}});
    table_.row(
        "random-one", "one block of 2 MiB at random, SSD -> device -> kernel done (raw: the read alone)", "us",
        {{"raw", shallow}, {"hand", [&] { return random_by_hand(); }}, {"vmem", [&] { return random_acquire(0); }}},
        true);
  }

  // ---- host frames and device
  // -----------------------------------------------------------------------------------------

  static constexpr int kTimes = 8;  // passes of a sample: one takes 5 ms

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
        vmem::check(vmem_prefetch(at(r, asked), std::min(step, from + bytes - asked), 0, stream_.get()));
      const uint64_t n = std::min(step, from + bytes - offset);
      acquire(at(r, offset), n, VMEM_READ);
      release(at(r, offset), n);
    }
  }
  void take(const vmem::region& r, uint64_t from, uint64_t bytes, uint64_t step, bool hints) const {
    for (uint64_t offset = from; offset < from + bytes; offset += step) {
      const uint64_t n = std::min(step, from + bytes - offset);
      hints ? vmem::check(vmem_prefetch(at(r, offset), n, VMEM_HOST, stream_.get()))
            : vmem::check(vmem_evict(at(r, offset), n, VMEM_HOST));
    }
    if (hints) vmem::check(vmem_evict(at(r, from), bytes, VMEM_HOST));  // waits for them
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
      stream_.synchronize();
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
#ifdef VMEM_HAVE_CUDA
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
#else
    return {0, 0, 0, "no CUDA"};
#endif
  }
  std::vector<Way> with_driver(std::vector<Way> ways, const std::function<Sample()>& way) const {
    if (!app_.simulated()) ways.emplace_back("other", way);
    return ways;
  }
  void host_and_device(uint64_t step) {
    const std::string size = std::to_string(step / kMiB), a_call = ", " + size + " MiB a call";
    if (!table_.wanted("h2d-" + size, true) && !table_.wanted("d2h-" + size, true)) return;
    const vmem::region r = on_device(span_);
    take(r, 0, span_, span_, false);
    bring(r, 0, span_, span_, false);  // the staging frames are there now
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
    const uint64_t half = span_ / 2;
    double seconds = 0, cpu = 0;
    for (int i = 0; i < kTimes; ++i) {
      const uint64_t away = i % 2 == 0 ? 0 : half, here = half - away;
      bring(r, away, half, half, false);
      stream_.synchronize();
      take(r, here, half, half, false);
      std::string failed;
      const double start = rawdisk::now(), before = Meter::cpu();
      std::thread other([&] {
        try {
          take(r, away, half, std::min<uint64_t>(half, 8 * kMiB), true);
        } catch (const std::exception& e) {
          failed = e.what();
        }
      });
      bring(r, here, half, std::min<uint64_t>(half, 8 * kMiB), true);
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
    table_.row("duplex", "host frames -> device and device -> host frames at once, 8 MiB a call (sum)", "GB/s",
               {{"raw", [&] { return raw_both(); }}, {"vmem", [&] { return vmem_both(r); }}});
  }

  // ---- no data to move
  // ------------------------------------------------------------------------------------------------

  void first_touch() {
    const uint64_t bytes = s_.budget / kBlock * kBlock;
    table_.row("touch", "first touch on the device, acquired part by part (other: managed memory, prefetched)", "GB/s",
               with_driver({{"vmem",
                             [&, bytes] {
                               vmem::region r(bytes);
                               Meter m;
                               bring(r, 0, bytes, s_.part, false);
                               stream_.synchronize();
                               m.stop();
                               return m.rate(bytes);
                             }}},
                           [&, bytes] {
#ifdef VMEM_HAVE_CUDA
                             const Managed managed(bytes);
                             Meter m;
                             parts(bytes, s_.part, [&](uint64_t offset, uint64_t n) {
                               managed.prefetch(offset, n, true, stream_.get());
                               stream_.synchronize();
                             });
                             m.stop();
                             return m.rate(bytes);
#else
                             return Sample{0, 0, 0, "no CUDA"};
#endif
                           }));
  }
  enum class Figure { acquire_cpu, acquire_time, release_cpu, process_cpu };
  // Leases of `bytes` each on all parts of the region, then a kernel under them, then the releases.
  Sample lease_cost(const vmem::region& r, size_t bytes, Figure figure) {
    const uint64_t count = r.size() / bytes, rounds = 4000 / count;
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
      if (figure != Figure::process_cpu) kernels_.read(stream_.get(), r.data(), bytes, false);
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
    const vmem::region r = on_device(std::min<uint64_t>(span_, 32 * kMiB));
    verify(r);  // leases for writing are over
    for (const size_t bytes : {kBlock, r.size()}) {
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

  void save() const {
    utsname u;
    uname(&u);
    struct statfs f = {};
    statfs(s_.folder.c_str(), &f);
    char when[64];
    const time_t t = time(nullptr);
    strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%SZ", gmtime(&t));
    char type[32];
    snprintf(type, sizeof type, "0x%lx", static_cast<unsigned long>(f.f_type));
    Json out{
        {"when", when},        {"device", app_.words()},         {"kernel", u.release},           {"file_system", type},
        {"bytes", s_.bytes},   {"device_budget", s_.budget},     {"host_budget", s_.host_budget}, {"part", s_.part},
        {"rounds", s_.rounds}, {"wrong_words", kernels_.wrong()}};
    out["rows"] = table_.json();
    std::ofstream(s_.json) << out.dump(1) << "\n";
  }

  const Settings s_;
  gpuapp::App& app_;
  Kernels kernels_;
  gpuapp::Stream stream_;
  Table table_;
  const std::string file_, fast_;
  const uint64_t span_;
  std::mt19937_64 random_{1};
  uint64_t mark_ = 10, file_mark_ = 1;
};

int run(Settings s) {
  std::string why;
  const auto app = gpuapp::make_app(s.device, &why);
  if (app == nullptr) {
    printf("SKIPPED: no CUDA device: %s\n", why.c_str());
    return 77;
  }
  const bool sim = app->simulated();
  const auto standard = [](uint64_t& value, uint64_t wanted) { value = value != 0 ? value : wanted; };
  standard(s.bytes, sim ? 128 * kMiB : 2048 * kMiB);
  standard(s.budget, s.bytes / 4);
  standard(s.host_budget, sim ? 192 * kMiB : 2048 * kMiB);
  standard(s.part, sim ? 4 * kMiB : 32 * kMiB);
  if (s.bytes % s.part != 0 || s.part % kBlock != 0) {
    fprintf(stderr, "--bytes must be a multiple of --part, and that of 2 MiB\n");
    return 1;
  }
  if (!sim) vmem::gpu::require_managed(s.bytes, vmem::gpu::managed_limit());
  vmem::set("device", app->setting());
  vmem::set("ssd_path", s.folder);
  vmem::set("device_budget", std::to_string(s.budget));
  vmem::set("host_budget", std::to_string(s.host_budget));
  vmem::check(vmem_init());
  bool good = false;
  {
    printf("%s; %llu MiB of data, device_budget %llu MiB, host_budget %llu MiB, parts of %llu MiB, median of %d\n\n",
           app->words().c_str(), static_cast<unsigned long long>(s.bytes / kMiB),
           static_cast<unsigned long long>(s.budget / kMiB), static_cast<unsigned long long>(s.host_budget / kMiB),
           static_cast<unsigned long long>(s.part / kMiB), s.rounds);
    TierBench bench(*app, s);
    good = bench.run();
  }
  vmem_shutdown();
  return good ? 0 : 1;
}

}  // namespace

}  // namespace gpubench

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  setvbuf(stderr, nullptr, _IOLBF, 0);
  CLI::App app{"The device tier beside raw limits, the loop written by hand, and CUDA's own prefetch."};
  gpubench::Settings s;
  const auto size = CLI::AsSizeValue(false);
  app.add_option("--device", s.device, "auto, cuda, or sim: for the logic alone")
      ->check(CLI::IsMember({"auto", "cuda", "sim"}));
  app.add_option("--bytes", s.bytes, "data on the disk, and the largest region (2 GiB)")->transform(size);
  app.add_option("--budget", s.budget, "device_budget (a quarter of the data)")->transform(size);
  app.add_option("--host-budget", s.host_budget, "host_budget (2 GiB)")->transform(size);
  app.add_option("--part", s.part, "bytes leased at once where data is streamed (32 MiB)")->transform(size);
  app.add_option("--rounds", s.rounds, "times each row is measured")->check(CLI::Range(1, 100));
  app.add_option("--folder", s.folder, "where the disk's files are made ($TMPDIR, or /var/tmp)");
  app.add_option("--fast", s.fast, "a folder in memory for the rows named fast (/dev/shm)");
  app.add_option("--only", s.only,
                 "rows whose keys begin so, comma-separated: in,fast,out,change,random,h2d,d2h,duplex,"
                 "touch,lease,kernel");
  app.add_option("-o,--json", s.json, "also write the figures there");
  CLI11_PARSE(app, argc, argv);
  try {
    return gpubench::run(s);
  } catch (const std::exception& e) {
    fprintf(stderr, "tier_bench: %s\n", e.what());
    return 1;
  }
}
