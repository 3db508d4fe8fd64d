// Advice about places between two devices (PREFERRED_LOCATION, ACCESSED_BY, READ_MOSTLY): the same
// work with it and without, the time of a turn, and how much it moves. Each kernel checks every
// word that it reads.
//
//   places_bench [--device handles] [--block 8MiB] [--budget 512MiB] [--turns 4] [--rounds 3] [--limit 50]
//
// --limit: after so many seconds no measurement begins; eight seconds later the program is ended.
// sim and sim-handles run it on two simulated devices, only to test its logic.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "bench_kernels.h"
#include "common/hooks.h"
#include "vmem/vmem.hpp"

namespace gpubench {

namespace {

constexpr uint64_t kMiB = 1 << 20;
constexpr unsigned kBoth = VMEM_READ | VMEM_WRITE;

struct Settings {
  std::string device = "handles";
  std::string folder = getenv("TMPDIR") != nullptr ? getenv("TMPDIR") : "/var/tmp";
  uint64_t block = 8 * kMiB, budget = 0;
  int turns = 4, rounds = 3, limit = 50;
};

// The bytes moved since the previous look.
struct Moved {
  uint64_t host_to_device = 0, device_to_host = 0, between = 0, read = 0;
};

struct Figures {
  std::vector<double> ms;
  std::vector<Moved> moved;
};

class Device {
 public:
  Device(gpuapp::App& app, int number) : app_(app), number_(number) {
    current();
    stream_ = app.simulated() ? gpuapp::SimApp::sim().create_stream(number) : app.stream();
    if (!app.simulated()) vmem::gpu::load_all();
    stats();  // marks it as used from now on
  }
  ~Device() {
    current();
    app_.destroy(stream_);
  }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  void current() const {
    if (!app_.simulated()) gpuapp::must(cudaSetDevice(number_), "cudaSetDevice");
  }
  int number() const { return number_; }
  void* stream() const { return stream_; }
  void synchronize() const { app_.synchronize(stream_); }
  struct vmem_device_stats stats() const {
    struct vmem_device_stats s = {};
    s.size = sizeof s;
    vmem::check(vmem_device_stats(number_, &s));
    return s;
  }

 private:
  gpuapp::App& app_;
  const int number_;
  void* stream_ = nullptr;
};

class PlacesBench {
 public:
  PlacesBench(gpuapp::App& app, const Settings& s) : s_(s), app_(app), first_(app, 0), second_(app, 1), kernels_(app) {
    begun_ = rawdisk::now();
  }

  // False: a word was wrong.
  bool run() {
    printf("| what | way | ms a turn (low to high) | MiB a turn: host to device | device to host | between | read |\n");
    printf("|---|---|---|---|---|---|---|\n");
    stays();
    home();
    both_read();
    read_mostly();
    if (kernels_.wrong() != 0) printf("\nWRONG: %llu words were not what had been written\n", kernels_.wrong());
    return kernels_.wrong() == 0;
  }

 private:
  // ---- what a turn is made of
  static char* at(const vmem::region& r, uint64_t offset) { return static_cast<char*>(r.data()) + offset; }
  uint64_t whole(uint64_t bytes) const { return std::max(bytes / s_.block, uint64_t{1}) * s_.block; }
  void use(const Device& d, const vmem::region& r, uint64_t offset, uint64_t bytes, uint64_t round,
           unsigned access = VMEM_READ) {
    vmem::check(vmem_acquire(at(r, offset), bytes, access, d.number(), d.stream()));
    d.current();
    kernels_.check(d.stream(), at(r, offset), bytes, offset, round, false);
    if ((access & VMEM_WRITE) != 0) kernels_.set(d.stream(), at(r, offset), bytes, offset, round + 1, false);
    vmem::check(vmem_release(at(r, offset), bytes, d.stream()));
  }
  // Visits all of it, in parts that leave room for others.
  void pass(const Device& d, const vmem::region& r, uint64_t round, unsigned access = VMEM_READ) {
    const uint64_t step = whole(s_.budget / 8);
    for (uint64_t offset = 0; offset < r.size(); offset += step)
      use(d, r, offset, std::min(step, r.size() - offset), round, access);
    d.synchronize();
  }
  void fill(const vmem::region& r, uint64_t round) {
    const uint64_t step = whole(s_.budget / 8);
    for (uint64_t offset = 0; offset < r.size(); offset += step) {
      const uint64_t n = std::min(step, r.size() - offset);
      vmem::check(vmem_acquire(at(r, offset), n, VMEM_WRITE, 0, first_.stream()));
      first_.current();
      kernels_.set(first_.stream(), at(r, offset), n, offset, round, false);
      vmem::check(vmem_release(at(r, offset), n, first_.stream()));
    }
    first_.synchronize();
  }

  // ---- figures
  Moved now() const {
    const auto all = vmem::stats();
    Moved m{all.host_to_device_bytes, all.device_to_host_bytes, 0, all.read_bytes};
    for (const Device* d : {&first_, &second_}) m.between += d->stats().in_bytes;
    m.between -= m.host_to_device;
    return m;
  }
  bool in_time() const { return rawdisk::now() - begun_ < s_.limit; }
  Figures measure(const std::function<void()>& turn) {
    turn();  // everything is in its place
    Figures f;
    const Moved before = now();
    for (int i = 0; i < s_.turns && (i == 0 || in_time()); ++i) {
      const double start = rawdisk::now();
      turn();
      f.ms.push_back((rawdisk::now() - start) * 1e3);
    }
    const Moved after = now();
    const uint64_t n = f.ms.size();
    f.moved.push_back({(after.host_to_device - before.host_to_device) / n,
                       (after.device_to_host - before.device_to_host) / n, (after.between - before.between) / n,
                       (after.read - before.read) / n});
    return f;
  }
  using Ways = std::vector<std::pair<std::string, std::function<Figures()>>>;
  // Alternates the ways, so that other work on the machine affects all of them alike.
  void row(const std::string& what, const Ways& ways) {
    std::vector<Figures> sums(ways.size());
    for (int round = 0; round < s_.rounds; ++round) {
      for (size_t i = 0; i < ways.size(); ++i) {
        if (!in_time()) continue;
        const Figures f = ways[i].second();
        sums[i].ms.insert(sums[i].ms.end(), f.ms.begin(), f.ms.end());
        sums[i].moved.insert(sums[i].moved.end(), f.moved.begin(), f.moved.end());
      }
    }
    for (size_t i = 0; i < ways.size(); ++i) print(what, ways[i].first, sums[i]);
  }
  static void print(const std::string& what, const std::string& way, Figures& f) {
    if (f.ms.empty()) {
      printf("| %s | %s | no time was left | | | | |\n", what.c_str(), way.c_str());
      return;
    }
    std::sort(f.ms.begin(), f.ms.end());
    const auto median = [&](uint64_t Moved::*part) {
      std::vector<uint64_t> all;
      for (const Moved& m : f.moved) all.push_back(m.*part);
      std::sort(all.begin(), all.end());
      return static_cast<double>(all[all.size() / 2]) / static_cast<double>(kMiB);
    };
    printf("| %s | %s | %.1f (%.1f to %.1f) | %.0f | %.0f | %.0f | %.0f |\n", what.c_str(), way.c_str(),
           f.ms[f.ms.size() / 2], f.ms.front(), f.ms.back(), median(&Moved::host_to_device),
           median(&Moved::device_to_host), median(&Moved::between), median(&Moved::read));
  }

  // ---- rows
  // A region of half the budget is used after each eighth of the others, which have twice the
  // budget and are in host memory.
  void stays() {
    const auto way = [this](bool advised) {
      return [this, advised] {
        const vmem::region wanted(whole(s_.budget / 2)), others(whole(s_.budget * 2));
        fill(wanted, 1);
        fill(others, 2);
        if (advised) wanted.advise(VMEM_ADVISE_SET_PREFERRED_LOCATION, 0);
        const uint64_t step = whole(s_.budget / 4);
        return measure([&] {
          for (uint64_t offset = 0; offset < others.size(); offset += step) {
            use(first_, others, offset, std::min(step, others.size() - offset), 2);
            use(first_, wanted, 0, wanted.size(), 1);
          }
          first_.synchronize();
        });
      };
    };
    row("half a budget, used between parts of twice the budget",
        {{"no advice", way(false)}, {"preferred: GPU 0", way(true)}});
  }
  // GPU 1 changes data that GPU 0 then reads; in between it needs its memory for other data.
  void home() {
    const auto way = [this](bool advised, const char* neighbours) {
      return [this, advised, neighbours] {
        vmem::set("peer_spill_percent", neighbours);
        const vmem::region data(whole(s_.budget / 2)), own(whole(s_.budget));
        fill(data, 1);
        fill(own, 2);
        if (advised) data.advise(VMEM_ADVISE_SET_PREFERRED_LOCATION, 0);
        uint64_t round = 1;
        const Figures f = measure([&] {
          pass(second_, data, round++, kBoth);
          pass(second_, own, 2);
          pass(first_, data, round);
        });
        vmem::set("peer_spill_percent", "50");
        return f;
      };
    };
    row("GPU 1 changes half a budget and uses all of its own, GPU 0 reads what changed",
        {{"no advice, no neighbours", way(false, "0")},
         {"no advice", way(false, "50")},
         {"preferred: GPU 0", way(true, "50")}});
  }
  // Both devices read the same data, one after the other, every turn.
  void both_read() {
    const auto moved = [this] {
      const vmem::region data(whole(s_.budget / 2));
      fill(data, 1);
      return measure([&] {
        use(first_, data, 0, data.size(), 1);
        first_.synchronize();
        use(second_, data, 0, data.size(), 1);
        second_.synchronize();
      });
    };
    const auto reached = [this] {
      const vmem::region data(whole(s_.budget / 2));
      fill(data, 1);
      data.advise(VMEM_ADVISE_SET_ACCESSED_BY, 1);
      return measure([&] {
        vmem::check(vmem_acquire(data.data(), data.size(), VMEM_READ, 0, first_.stream()));
        first_.current();
        kernels_.check(first_.stream(), data.data(), data.size(), 0, 1, false);
        first_.synchronize();
        second_.current();
        kernels_.check(second_.stream(), data.data(), data.size(), 0, 1, false);
        second_.synchronize();
        vmem::check(vmem_release(data.data(), data.size(), first_.stream()));
      });
    };
    row("both GPUs read half a budget, one after the other",
        {{"each leases it", moved}, {"leased at GPU 0, accessed by GPU 1", reached}});
  }
  // Host memory has room for one of two sets. The one that is read mostly is used twice a turn.
  void read_mostly() {
    const auto way = [this](bool advised) {
      return [this, advised] {
        const vmem::region weights(whole(s_.budget * 5 / 4)), others(whole(s_.budget * 3 / 2));
        fill(weights, 1);
        fill(others, 2);
        weights.evict(VMEM_SSD);
        others.evict(VMEM_SSD);
        if (advised) weights.advise(VMEM_ADVISE_SET_READ_MOSTLY);
        return measure([&] {
          pass(first_, weights, 1);
          pass(first_, others, 2);
        });
      };
    };
    row("weights and others in turn, of which host memory holds about half",
        {{"no advice", way(false)}, {"weights: read mostly", way(true)}});
  }

  const Settings s_;
  gpuapp::App& app_;
  const Device first_, second_;
  Kernels kernels_;
  double begun_ = 0;
};

int run(Settings s) {
  std::string why;
  const auto app = gpuapp::make_app(s.device, &why);
  if (app == nullptr) {
    printf("SKIPPED: no CUDA device: %s\n", why.c_str());
    return 77;
  }
  int devices = 2;
  if (app->simulated()) {
    vmem::api::test_hooks().make_devices = [handles = s.device != "sim"](size_t unit, auto* out) {
      vmem::device::SimOptions options;
      options.devices = 2;
      options.handles = handles;
      options.unit = unit;
      std::unique_ptr<vmem::device::SimDevices> made;
      vmem::core::Status status = vmem::device::make_sim_devices(options, &made);
      *out = std::move(made);
      return status;
    };
  } else if (cudaGetDeviceCount(&devices) != cudaSuccess || devices < 2) {
    printf("SKIPPED: it takes two GPUs\n");
    return 0;
  }
  if (s.budget == 0) s.budget = (app->simulated() ? 32 : 512) * kMiB;
  if (app->simulated()) s.block = std::min(s.block, 2 * kMiB);
  for (const auto& [name, value] :
       std::vector<std::pair<const char*, std::string>>{{"device", app->setting()},
                                                        {"device_block_size", std::to_string(s.block)},
                                                        {"device_budget", std::to_string(s.budget)},
                                                        {"peer_spill_percent", "50"},
                                                        {"host_budget", std::to_string(s.budget * 3 + 64 * kMiB)},
                                                        {"ssd_path", s.folder}})
    vmem::set(name, value);
  vmem::check(vmem_init());
  bool good = false;
  {
    printf("%s; device=%s, blocks of %llu MiB, device_budget %llu MiB, %d rounds of %d turns\n\n", app->words().c_str(),
           s.device.c_str(), static_cast<unsigned long long>(s.block / kMiB),
           static_cast<unsigned long long>(s.budget / kMiB), s.rounds, s.turns);
    PlacesBench bench(*app, s);
    good = bench.run();
  }
  vmem_shutdown();
  return good ? 0 : 1;
}

}  // namespace

}  // namespace gpubench

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  CLI::App app{"Advice about places between two devices: the same work with it and without."};
  gpubench::Settings s;
  const auto size = CLI::AsSizeValue(false);
  app.add_option("--device", s.device, "handles, or sim and sim-handles: for the logic alone")
      ->check(CLI::IsMember({"handles", "sim", "sim-handles"}));
  app.add_option("--block", s.block, "device_block_size (8 MiB)")->transform(size);
  app.add_option("--budget", s.budget, "device_budget of each device (512 MiB)")->transform(size);
  app.add_option("--turns", s.turns, "turns of a measurement")->check(CLI::Range(1, 100));
  app.add_option("--rounds", s.rounds, "times each way is measured")->check(CLI::Range(1, 100));
  app.add_option("--limit", s.limit, "seconds after which no measurement begins")->check(CLI::Range(1, 600));
  app.add_option("--folder", s.folder, "where what leaves host memory is written ($TMPDIR, or /var/tmp)");
  CLI11_PARSE(app, argc, argv);
  alarm(static_cast<unsigned>(s.limit) + 8);  // in any case
  try {
    return gpubench::run(s);
  } catch (const std::exception& e) {
    fprintf(stderr, "places_bench: %s\n", e.what());
    return 1;
  }
}
