// The cost of the block size: the same accesses with blocks of 2 MiB, of 64 KiB and of "auto", in
// turns, on data half as large again as the budget. Byte counts are exact, and CPU time (of all
// threads, the library's too) is nearly so on a machine with other work. Wall time is not: compare
// it within a row, and check the load, which is printed.
//
// It does not measure: a device tier, the page cache (files are read with O_DIRECT if possible),
// other machines' disks.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory_resource>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/raw_disk.h"
#include "vmem/pool.hpp"
#include "vmem/vmem.hpp"

namespace {

using Json = nlohmann::ordered_json;

constexpr uint64_t kMiB = uint64_t{1} << 20, kWord = sizeof(uint64_t);

struct Settings {
  std::string folder = getenv("TMPDIR") != nullptr ? getenv("TMPDIR") : "/var/tmp";
  uint64_t bytes = 600 * kMiB;
  int rounds = 5;
  std::string only, json;
};

struct Size {
  const char* name;
  size_t bytes;
};
constexpr Size kSizes[] = {{"2 MiB", 2 << 20}, {"64 KiB", 64 << 10}, {"auto", VMEM_BLOCK_AUTO}};

// The results of an operation.
struct Sample {
  double cpu_us = 0, us = 0, read = 0, written = 0;
};

template <typename F>
Sample measured(uint64_t operations, F&& work) {
  const auto before = vmem::stats();
  const double start = rawdisk::now(), cpu = rawdisk::cpu_seconds();
  work();
  const double n = static_cast<double>(operations), us = (rawdisk::now() - start) * 1e6;
  const auto after = vmem::stats();
  return {(rawdisk::cpu_seconds() - cpu) * 1e6 / n, us / n,
          static_cast<double>(after.read_bytes - before.read_bytes) / n,
          static_cast<double>(after.write_bytes - before.write_bytes) / n};
}

double median(std::vector<double> all) {
  std::sort(all.begin(), all.end());
  return all[all.size() / 2];
}

class Random {
 public:
  uint64_t below(uint64_t bound) {
    state_ ^= state_ << 13, state_ ^= state_ >> 7, state_ ^= state_ << 17;
    return state_ % bound;
  }

 private:
  uint64_t state_ = 88172645463325252u;
};

volatile uint64_t sink;

class Bench {
 public:
  explicit Bench(const Settings& s) : s_(s), file_(s.folder + "/vmem-blocks." + std::to_string(getpid())) {
    FILE* out = fopen(file_.c_str(), "wb");
    if (out == nullptr) throw std::runtime_error(file_ + " cannot be made");
    std::vector<uint64_t> piece(kMiB / kWord);
    for (uint64_t at = 0; at < s_.bytes; at += kMiB) {
      for (size_t i = 0; i < piece.size(); ++i) piece[i] = at + i;
      if (fwrite(piece.data(), kMiB, 1, out) != 1) throw std::runtime_error(file_ + " cannot be written");
    }
    if (fflush(out) != 0 || fsync(fileno(out)) != 0 || fclose(out) != 0)
      throw std::runtime_error(file_ + " cannot be written");
    vmem::set("device", "none");
    set_budget(s_.bytes / 3 * 2);
    vmem::set("ssd_path", s_.folder);
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;
  ~Bench() {
    unlink(file_.c_str());
    unlink((file_ + ".new").c_str());
  }

  void run() {
    printf("%-38s %-8s %12s %12s %12s %12s %14s\n", "operation", "blocks", "CPU us", "least-most", "read KiB",
           "written KiB", "time us");
    compare("8 bytes at random", [&](Size z) { return words(z, s_.bytes); });
    compare("1000 times 8 bytes at random, in memory", [&](Size z) { return words(z, s_.bytes / 3); });
    compare("record of 512 KiB at random", [&](Size z) { return records(z); });
    compare("scan, the second", [&](Size z) { return scan(z, VMEM_ADVISE_NORMAL); });
    compare("scan, the second, SEQUENTIAL", [&](Size z) { return scan(z, VMEM_ADVISE_SEQUENTIAL); });
    compare("new memory, written in order", [&](Size z) { return fill(z); });
    compare("word of each 64 KiB of a new file, sync", [&](Size z) { return scattered(z); });
    compare("lease of 32 MiB, one after the other", [&](Size z) { return leases(z); });
    compare("row asked of a hash table on a pool", [&](Size z) { return join(z); });
    set_budget(s_.bytes / 3 * 2);
  }
  Json result() const { return result_; }

 private:
  void compare(const std::string& name, const std::function<Sample(Size)>& of) {
    if (name.find(s_.only) == std::string::npos) return;
    std::vector<Sample> all[std::size(kSizes)];
    for (int round = 0; round < s_.rounds; ++round) {
      for (size_t i = 0; i < std::size(kSizes); ++i) all[i].push_back(of(kSizes[i]));
    }
    for (size_t i = 0; i < std::size(kSizes); ++i) {
      const auto values = [&](double Sample::*what) {
        std::vector<double> v;
        for (const Sample& s : all[i]) v.push_back(s.*what);
        return v;
      };
      const auto cpu = values(&Sample::cpu_us);
      const double least = *std::min_element(cpu.begin(), cpu.end()), most = *std::max_element(cpu.begin(), cpu.end());
      const double read = median(values(&Sample::read)), written = median(values(&Sample::written));
      const double us = median(values(&Sample::us));
      printf("%-38s %-8s %12.1f %5.0f-%-6.0f %12.1f %12.1f %14.1f\n", name.c_str(), kSizes[i].name, median(cpu), least,
             most, read / 1024, written / 1024, us);
      result_[name][kSizes[i].name] = {{"cpu_us", median(cpu)}, {"cpu_us_least", least},    {"cpu_us_most", most},
                                       {"read_bytes", read},    {"written_bytes", written}, {"us", us}};
    }
    fflush(stdout);
  }

  vmem::region mapped(Size z, uint64_t bytes, int advice) const {
    return vmem::region(
        bytes,
        vmem::attributes{
            .flags = VMEM_HOST_ONLY | VMEM_MAP_READ, .block_size = z.bytes, .advice = advice, .path = file_.c_str()});
  }
  static void read_through(const vmem::region& r) {
    uint64_t sum = 0;
    for (const uint64_t w : r.view<const uint64_t>()) sum += w;
    sink = sum;
  }

  // Runs after one pass, so that memory is full. If the data fits, it is read once more, so that
  // all of it is present.
  Sample words(Size z, uint64_t bytes) const {
    const vmem::region r = mapped(z, bytes, VMEM_ADVISE_NORMAL);
    const bool fits = bytes < s_.bytes;
    read_through(r);
    if (fits) read_through(r);
    const uint64_t operations = fits ? 4000000 : 2000;
    Random random;
    return measured(fits ? operations / 1000 : operations, [&] {
      uint64_t sum = 0;
      for (uint64_t i = 0; i < operations; ++i) sum += r.view<const uint64_t>()[random.below(bytes / kWord)];
      sink = sum;
    });
  }
  Sample records(Size z) const {
    constexpr uint64_t kRecord = 512 << 10, kOperations = 1000;
    const vmem::region r = mapped(z, s_.bytes, VMEM_ADVISE_NORMAL);
    read_through(r);
    Random random;
    return measured(kOperations, [&] {
      uint64_t sum = 0;
      for (uint64_t i = 0; i < kOperations; ++i) {
        const uint64_t first = random.below(s_.bytes / kRecord) * (kRecord / kWord);
        for (uint64_t w = 0; w < kRecord / kWord; ++w) sum += r.view<const uint64_t>()[first + w];
      }
      sink = sum;
    });
  }
  Sample scan(Size z, int advice) const {
    const vmem::region r = mapped(z, s_.bytes, advice);
    read_through(r);
    return measured(1, [&] { read_through(r); });
  }
  Sample fill(Size z) const {
    vmem::region r(s_.bytes, vmem::attributes{.flags = VMEM_HOST_ONLY, .block_size = z.bytes});
    return measured(1, [&] {
      uint64_t next = 1;
      for (uint64_t& w : r.view<uint64_t>()) w = next++;
    });
  }
  Sample scattered(Size z) const {
    const std::string path = file_ + ".new";
    unlink(path.c_str());
    FILE* made = fopen(path.c_str(), "wb");
    if (made == nullptr || ftruncate(fileno(made), static_cast<off_t>(s_.bytes)) != 0 || fclose(made) != 0)
      throw std::runtime_error(path + " cannot be made");
    vmem::region r(
        s_.bytes,
        vmem::attributes{.flags = VMEM_HOST_ONLY | VMEM_MAP_SHARED, .block_size = z.bytes, .path = path.c_str()});
    constexpr uint64_t kStep = 64 << 10;
    return measured(s_.bytes / kStep, [&] {
      for (uint64_t at = 0; at < s_.bytes; at += kStep) r.view<uint64_t>()[at / kWord] = at + 1;
      r.sync();
    });
  }
  // Leases all of the data, 32 MiB at a time.
  Sample leases(Size z) const {
    constexpr uint64_t kLease = 32 * kMiB;
    const vmem::region r = mapped(z, s_.bytes, VMEM_ADVISE_NORMAL);
    read_through(r);
    return measured(s_.bytes / kLease, [&] {
      for (uint64_t at = 0; at + kLease <= s_.bytes; at += kLease) {
        char* const from = static_cast<char*>(r.data()) + at;
        if (vmem_acquire(from, kLease, VMEM_READ, VMEM_HOST, nullptr) != 0 || vmem_release(from, kLease, nullptr) != 0)
          throw std::runtime_error(vmem_last_error());
      }
    });
  }
  // A hash join on pmr containers: random lookups in a table a sixth larger than the budget. The
  // budget is a sixth of the other rows', because the join takes long with large blocks.
  Sample join(Size z) const {
    const uint64_t budget = s_.bytes / 9, rows = budget / 6 * 7 / 32;  // a node has 24 bytes, a bucket 8
    set_budget(budget);
    vmem::pool pool({.region_bytes = 64 * kMiB, .flags = VMEM_HOST_ONLY, .block_size = z.bytes});
    std::pmr::unsynchronized_pool_resource small(&pool);
    std::pmr::unordered_map<uint64_t, uint64_t> table(&small);
    Random random;
    table.reserve(rows);
    for (uint64_t i = 0; i < rows; ++i) table.emplace(i, i);
    constexpr uint64_t kAsked = 20000;
    return measured(kAsked, [&] {
      uint64_t sum = 0;
      for (uint64_t i = 0; i < kAsked; ++i) sum += table.at(random.below(rows));
      sink = sum;
    });
  }
  static void set_budget(uint64_t bytes) { vmem::set("host_budget", std::to_string(bytes / kMiB * kMiB)); }

  Settings s_;
  std::string file_;
  Json result_;
};

}  // namespace

int main(int argc, char** argv) {
  Settings s;
  CLI::App app("Time and bytes of the same accesses with blocks of 2 MiB, 64 KiB and auto.");
  app.add_option("--folder", s.folder, "where the data are")->capture_default_str();
  app.add_option("--bytes", s.bytes, "data; the budget is two thirds of it")->transform(CLI::AsSizeValue(false));
  app.add_option("--rounds", s.rounds)->capture_default_str()->check(CLI::PositiveNumber);
  app.add_option("--only", s.only, "rows whose name has this in it");
  app.add_option("--json", s.json, "figures, to this file");
  CLI11_PARSE(app, argc, argv);
  try {
    Bench bench(s);
    bench.run();
    double load = 0;
    if (getloadavg(&load, 1) == 1) printf("load %.1f\n", load);
    if (!s.json.empty()) {
      FILE* out = fopen(s.json.c_str(), "w");
      const std::string text = bench.result().dump(2) + "\n";
      if (out == nullptr || fputs(text.c_str(), out) < 0 || fclose(out) != 0) throw std::runtime_error(s.json);
    }
  } catch (const std::exception& e) {
    fprintf(stderr, "blocks_bench: %s\n", e.what());
    return 1;
  }
  return 0;
}
