// How long a fault of one thread waits while another thread makes long calls: acquiring and
// releasing a large range of small blocks, accessing and freeing a large region. Each row has two
// control runs of the same length: an idle run, and a run in which the other thread only computes.
// Waits that show up there are due to the machine.
//
// It does not measure: faults that read (the bystander's blocks are zeros), a device tier,
// eviction.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "vmem/vmem.hpp"

namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

constexpr size_t kPage = 4096, kMiB = size_t{1} << 20;

struct Settings {
  uint64_t lease = uint64_t{1} << 30, region = uint64_t{16} << 30, budget = uint64_t{2} << 30;
  int rounds = 3;
  std::string json;
};

double us(Clock::duration d) {
  return std::chrono::duration<double, std::micro>(d).count();
}

double load() {
  double now = 0;
  return getloadavg(&now, 1) == 1 ? now : -1;
}

struct Waits {
  std::vector<double> us;
  void add(const Waits& more) { us.insert(us.end(), more.us.begin(), more.us.end()); }
  double at(double share) {
    if (us.empty()) return 0;
    std::sort(us.begin(), us.end());
    return us[std::min(us.size() - 1, static_cast<size_t>(share * static_cast<double>(us.size())))];
  }
  size_t above(double limit) const {
    return static_cast<size_t>(std::count_if(us.begin(), us.end(), [&](double one) { return one > limit; }));
  }
};

// Accesses absent blocks of its own, one after another, until `work` ends. After the last block it
// makes its region anew, which is not timed.
Waits beside(const std::function<void()>& work) {
  Waits waits;
  std::atomic<bool> over = false, begun = false;
  std::thread bystander([&] {
    while (!over) {
      vmem::region mine(64 * kMiB, VMEM_HOST_ONLY);
      mine.advise(VMEM_ADVISE_RANDOM);
      auto* const at = static_cast<volatile char*>(mine.data());
      for (size_t i = 0; i < 64 * kMiB && !over; i += kPage) {
        const auto from = Clock::now();
        at[i] = 1;
        waits.us.push_back(us(Clock::now() - from));
        begun = true;
      }
    }
  });
  while (!begun) std::this_thread::yield();
  work();
  over = true;
  bystander.join();
  return waits;
}

struct Row {
  const char* name;
  double ms = 0;  // time of the call, all rounds
  Waits beside, idle, spinning;
};

class Bench {
 public:
  explicit Bench(const Settings& s) : s_(s) {}
  std::vector<Row> rows;

  void run() {
    for (int i = 0; i < s_.rounds; ++i) {
      leases();
      region();
    }
  }

 private:
  Row& row(const char* name) {
    for (Row& r : rows) {
      if (std::string(r.name) == name) return r;
    }
    rows.push_back({name, 0, {}, {}, {}});
    return rows.back();
  }
  void measure(const char* name, const std::function<void()>& work) {
    Clock::duration took{};
    Row& r = row(name);
    r.beside.add(beside([&] {
      const auto from = Clock::now();
      work();
      took = Clock::now() - from;
    }));
    r.ms += us(took) / 1000;
    const auto length = std::max<Clock::duration>(took, std::chrono::milliseconds(20));
    r.idle.add(beside([&] { std::this_thread::sleep_for(length); }));
    r.spinning.add(beside([&] {
      for (const auto end = Clock::now() + length; Clock::now() < end;) {
      }
    }));
    fprintf(stderr, "%s: %.1f ms, worst fault %.2f ms, idle %.2f ms, load %.2f\n", name, us(took) / 1000,
            r.beside.at(1) / 1000, r.idle.at(1) / 1000, load());
  }
  void leases() {
    vmem::region r(s_.lease, VMEM_HOST_ONLY);
    r.advise(VMEM_ADVISE_RANDOM);
    const auto acquire = [&] { check(vmem_acquire(r.data(), s_.lease, VMEM_READ | VMEM_WRITE, VMEM_HOST, nullptr)); };
    const auto release = [&] { check(vmem_release(r.data(), s_.lease, nullptr)); };
    measure("acquire, nothing present", acquire);
    measure("release", release);
    measure("acquire, all present", acquire);
    release();
  }
  // Accesses one block for each page of the region's table.
  void region() {
    void* at = nullptr;
    measure("make and access a region", [&] {
      check(vmem_alloc(&at, s_.region, VMEM_HOST_ONLY));
      check(vmem_advise(at, s_.region, VMEM_ADVISE_RANDOM, VMEM_HOST));
      for (size_t i = 0; i < s_.region; i += 128 * kPage) static_cast<volatile char*>(at)[i] = 1;
    });
    measure("free it", [&] { check(vmem_free(at)); });
  }
  static void check(int result) {
    if (result != 0) throw std::runtime_error(vmem_last_error());
  }
  Settings s_;
};

int run(int argc, char** argv) {
  Settings s;
  CLI::App app("The worst fault of a bystander beside long calls");
  app.allow_extras();
  app.add_option("--lease", s.lease, "bytes of the lease")->transform(CLI::AsSizeValue(false));
  app.add_option("--region", s.region, "bytes of the region that is accessed and freed")
      ->transform(CLI::AsSizeValue(false));
  app.add_option("--budget", s.budget, "host_budget")->transform(CLI::AsSizeValue(false));
  app.add_option("--rounds", s.rounds);
  app.add_option("--json", s.json, "adds the figures to this file");
  CLI11_PARSE(app, argc, argv);
  vmem::set("host_budget", std::to_string(s.budget));
  vmem::set("block_size", "4KiB");
  vmem::set("readahead", "0");
  const double before = load();
  Bench bench(s);
  bench.run();
  vmem_shutdown();

  printf(
      "worst fault of a bystander, blocks of 4 KiB, lease of %llu MiB, region of %llu MiB, load %.2f to %.2f, %ld "
      "CPUs\n",
      static_cast<unsigned long long>(s.lease / kMiB), static_cast<unsigned long long>(s.region / kMiB), before, load(),
      sysconf(_SC_NPROCESSORS_ONLN));
  printf(
      "| beside | ms of the call | faults | p50 us | p99 us | worst ms | above 5 ms | idle: worst ms | spinning: worst "
      "ms |\n");
  printf("|---|---|---|---|---|---|---|---|---|\n");
  Json all = Json::array();
  for (Row& r : bench.rows) {
    const double ms = r.ms / s.rounds;
    printf("| %s | %.1f | %zu | %.1f | %.1f | **%.2f** | %zu | %.2f | %.2f |\n", r.name, ms, r.beside.us.size(),
           r.beside.at(0.5), r.beside.at(0.99), r.beside.at(1) / 1000, r.beside.above(5000), r.idle.at(1) / 1000,
           r.spinning.at(1) / 1000);
    all.push_back({{"beside", r.name},
                   {"call_ms", ms},
                   {"faults", r.beside.us.size()},
                   {"p50_us", r.beside.at(0.5)},
                   {"p99_us", r.beside.at(0.99)},
                   {"worst_ms", r.beside.at(1) / 1000},
                   {"above_5_ms", r.beside.above(5000)},
                   {"idle_worst_ms", r.idle.at(1) / 1000},
                   {"spinning_worst_ms", r.spinning.at(1) / 1000}});
  }
  if (!s.json.empty()) std::ofstream(s.json) << all.dump(2) << '\n';
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& e) {
    fprintf(stderr, "bystander_bench: %s\n", e.what());
    return 1;
  }
}
