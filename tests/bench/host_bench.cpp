// The host and SSD tiers, compared with the limit (raw io_uring with huge-page buffers) and with
// mmap with the best advice under an equal memory limit, in one run, as ratios.
//
// It does not measure: other machines' disks, memory pressure from other processes, and anything
// after the first few GiB.
#include <sys/stat.h>
#include <sys/wait.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <cstdio>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <thread>

#include "common/raw_disk.h"
#include "external_sort.h"
#include "memory_limit.h"
#include "vmem/vmem.hpp"

namespace {

using Json = nlohmann::ordered_json;

struct Settings {
  std::string folder = getenv("TMPDIR") != nullptr ? getenv("TMPDIR") : "/var/tmp";
  uint64_t bytes = uint64_t{2} << 30;
  int rounds = 3;
  std::string only, json, fast = "/dev/shm", peer;
  uint64_t operations = 40000;
};

struct Sample {
  double value = 0;          // GB/s, operations/s or us
  double cores_per_gbs = 0;  // 0: not measured
  double p99 = 0;
  std::string error;
};

uint64_t sum_words(const void* p, size_t bytes) {
  const auto* w = static_cast<const uint64_t*>(p);
  uint64_t s = 0;
  for (size_t i = 0; i < bytes / 8; ++i) s += w[i];
  return s;
}

volatile uint64_t sink;

// ---- the measured operations; each takes plain memory of any kind

Sample sequential_read(const void* p, uint64_t bytes) {
  const double start = rawdisk::now(), cpu = rawdisk::cpu_seconds();
  sink = sum_words(p, bytes);
  const double seconds = rawdisk::now() - start, gbs = static_cast<double>(bytes) / 1e9 / seconds;
  return {gbs, (rawdisk::cpu_seconds() - cpu) / seconds / gbs, 0, ""};
}

Sample read_modify_write(void* p, uint64_t bytes, const std::function<void()>& sync) {
  const double start = rawdisk::now(), cpu = rawdisk::cpu_seconds();
  auto* w = static_cast<uint64_t*>(p);
  for (size_t i = 0; i < bytes / 8; ++i) w[i] += i;
  sync();
  const double seconds = rawdisk::now() - start, gbs = static_cast<double>(bytes) / 1e9 / seconds;
  return {gbs, (rawdisk::cpu_seconds() - cpu) / seconds / gbs, 0, ""};
}

Sample random_reads(const void* p, uint64_t bytes, unsigned threads, uint64_t operations) {
  const auto* w = static_cast<const volatile uint64_t*>(p);
  const double start = rawdisk::now();
  std::vector<std::thread> team;
  for (unsigned t = 0; t < threads; ++t) {
    team.emplace_back([=] {
      uint64_t state = (t + 1) * 0x9e3779b97f4a7c15u, total = 0;
      for (uint64_t i = 0; i < operations / threads; ++i) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        total += w[state % (bytes / 8)];
      }
      sink = total;
    });
  }
  for (std::thread& t : team) t.join();
  return {static_cast<double>(operations / threads * threads) / (rawdisk::now() - start), 0, 0, ""};
}

Sample touch_latency(const void* p, uint64_t bytes, size_t block, uint64_t touches) {
  const auto* b = static_cast<const volatile unsigned char*>(p);
  std::vector<double> times;
  uint64_t state = 88172645463325252u;
  for (uint64_t i = 0; i < touches; ++i) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    const double start = rawdisk::now();
    sink = b[state % (bytes / block) * block];
    const double us = (rawdisk::now() - start) * 1e6;
    if (us > 10) times.push_back(us);  // a hit says nothing about a miss
  }
  std::sort(times.begin(), times.end());
  if (times.empty()) return {0, 0, 0, "no miss"};
  return {times[times.size() / 2], 0, times[times.size() * 99 / 100], ""};
}

Sample timed_sort(const extsort::Memory& m, uint64_t bytes, const std::function<void()>& sync) {
  const double start = rawdisk::now(), cpu = rawdisk::cpu_seconds();
  extsort::sort(m);
  sync();
  const double seconds = rawdisk::now() - start, gbs = static_cast<double>(bytes) / 1e9 / seconds;
  Sample s{gbs, (rawdisk::cpu_seconds() - cpu) / seconds / gbs, 0, ""};
  if (!extsort::right(m.input, m.output, m.count)) s.error = "sorted wrong";
  return s;
}

// ---- programs that need a memory limit run in a child inside a memory cgroup

Sample peer(const Settings& s, const std::string& what, const std::string& file, uint64_t limit) {
  const memlimit::Group group(limit);
  if (!group) return {0, 0, 0, "no permission to make a memory cgroup"};
  int out[2];
  if (pipe(out) != 0) return {0, 0, 0, "pipe"};
  const pid_t child = fork();
  if (child == 0) {
    group.enter();
    dup2(out[1], 1);
    execl("/proc/self/exe", "host_bench", "--peer", what.c_str(), "--folder", file.c_str(), "--bytes",
          std::to_string(s.bytes).c_str(), "--operations", std::to_string(s.operations).c_str(), nullptr);
    _exit(1);
  }
  close(out[1]);
  Sample sample;
  FILE* f = fdopen(out[0], "r");
  if (fscanf(f, "%lf %lf %lf", &sample.value, &sample.cores_per_gbs, &sample.p99) != 3) sample.error = "peer failed";
  fclose(f);
  int status;
  waitpid(child, &status, 0);
  return sample;
}

Sample mmap_sort(const std::string& file, uint64_t bytes, uint64_t memory) {
  memlimit::MappedFile files[] = {{file, O_RDONLY, bytes},
                                  {file + ".runs", O_RDWR | O_CREAT | O_TRUNC, bytes},
                                  {file + ".out", O_RDWR | O_CREAT | O_TRUNC, bytes}};
  for (const memlimit::MappedFile& f : files)
    if (f.data() == nullptr) return {0, 0, 0, "no file to map"};
  const auto of = [&](const void* p) -> memlimit::MappedFile& {
    return *std::ranges::find_if(files, [&](auto& f) { return f.has(p); });
  };
  extsort::Memory m = extsort::plan(files[0].data(), files[1].data(), files[2].data(), bytes, memory);
  m.fetch = [&](const void* p, size_t n) { of(p).fetch(p, n); };
  m.done_with = [&](const void* p, size_t n) { of(p).drop(p, n); };
  m.write_out = [&](const void* p, size_t n) { of(p).write(p, n); };
  return timed_sort(m, bytes, [&] { files[2].sync(); });
}

int run_peer(const Settings& s) {
  if (s.peer == "sort") {
    const Sample r = mmap_sort(s.folder, s.bytes, s.bytes / 4);
    if (!r.error.empty()) fprintf(stderr, "mmap: %s\n", r.error.c_str());
    if (r.error.empty()) printf("%f %f %f\n", r.value, r.cores_per_gbs, r.p99);
    fflush(stdout);
    _exit(!r.error.empty());
  }
  const bool write = s.peer == "rmw";
  const int fd = open(s.folder.c_str(), write ? O_RDWR : O_RDONLY);
  posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
  void* p = mmap(nullptr, s.bytes, write ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
  if (p == MAP_FAILED) return 1;
  const bool random = s.peer.starts_with("random") || s.peer.starts_with("latency");
  madvise(p, s.bytes, random ? MADV_RANDOM : MADV_SEQUENTIAL);
  Sample r;
  if (s.peer == "read") r = sequential_read(p, s.bytes);
  if (write) r = read_modify_write(p, s.bytes, [&] { msync(p, s.bytes, MS_SYNC); });
  if (s.peer == "random1") r = random_reads(p, s.bytes, 1, s.operations / 8);
  if (s.peer == "random8") r = random_reads(p, s.bytes, 8, s.operations);
  printf("%f %f %f\n", r.value, r.cores_per_gbs, r.p99);
  fflush(stdout);
  _exit(0);
}

// ---- the report

struct Row {
  std::string what, unit;
  bool lower_is_better = false;
  std::vector<Sample> raw, vmem, mmap;
};

struct Spread {
  double median = 0, low = 0, high = 0, cores = 0, p99 = 0;
};

Spread spread(const std::vector<Sample>& samples) {
  std::vector<double> v;
  Spread s;
  std::vector<double> cores, p99;
  for (const Sample& x : samples) {
    if (!x.error.empty()) continue;
    v.push_back(x.value);
    cores.push_back(x.cores_per_gbs);
    p99.push_back(x.p99);
  }
  if (v.empty()) return s;
  for (auto* l : {&v, &cores, &p99}) std::sort(l->begin(), l->end());
  return {v[v.size() / 2], v.front(), v.back(), cores[cores.size() / 2], p99[p99.size() / 2]};
}

class Bench {
 public:
  explicit Bench(const Settings& s)
      : s_(s), budget_(s.bytes / 4), file_(s.folder + "/vmem-bench." + std::to_string(getpid())) {}
  ~Bench() {
    unlink(file_.c_str());
    if (!fast_.empty()) unlink(fast_.c_str());
  }

  void run() {
    if (const std::string e = rawdisk::fill(file_, s_.bytes, 1); !e.empty()) throw std::runtime_error(e);
    vmem::set("ssd_path", s_.folder);
    for (const char* block : {"2MiB"}) {
      row(
          "sequential read of a file, 2 MiB", "GB/s", "read-file", [&] { return raw(false, false); },
          [&] { return vmem_file_read(file_, block, "auto"); }, "read");
      row(
          "sequential read of anonymous memory, 2 MiB, verified", "GB/s", "read-anon",
          [&] { return raw(false, false); }, [&] { return vmem_anon_read(block, "auto"); }, "read");
      row(
          "read-modify-write + sync, shared file, 2 MiB", "GB/s", "rmw-file", [&] { return raw(true, false); },
          [&] { return vmem_rmw(block, true); }, "rmw");
      row(
          "read-modify-write + sync, anonymous, 2 MiB", "GB/s", "rmw-anon", [&] { return raw(true, false); },
          [&] { return vmem_rmw(block, false); }, "");
      row(
          "sequential read of a file, 2 MiB, UFFDIO_COPY forced", "GB/s", "read-copy",
          [&] { return raw(false, false); }, [&] { return vmem_file_read(file_, block, "copy"); }, "read");
    }
    row(
        "sort of 64-byte records, one thread, 2 MiB", "GB/s", "sort", [&] { return raw_sort(); },
        [&] { return vmem_sort(); }, "sort");
    for (const auto& [block, text] : {std::pair<size_t, const char*>{65536, "64 KiB"}, {4096, "4 KiB"}}) {
      for (unsigned threads : {1u, 8u}) {
        row(
            "random 8-byte reads, " + std::string(text) + " blocks, " + std::to_string(threads) + " threads", "op/s",
            "random-" + std::to_string(block) + "-" + std::to_string(threads),
            [&, b = block] { return raw_random(b, threads); }, [&, b = block] { return vmem_random(b, threads); },
            threads == 8 ? "random8" : "random1");
      }
    }
    for (const auto& [block, text] :
         {std::pair<size_t, const char*>{4096, "4 KiB"}, {65536, "64 KiB"}, {2 << 20, "2 MiB"}}) {
      row(
          "fault latency, " + std::string(text) + ", p50", "us", "latency-" + std::to_string(block),
          [&, b = block] { return raw_latency(b); }, [&, b = block] { return vmem_latency(b); }, "", true);
    }
    if (access(s_.fast.c_str(), W_OK) == 0 && wanted("fast")) {
      fast_ = s_.fast + "/vmem-bench." + std::to_string(getpid());
      if (const std::string e = rawdisk::fill(fast_, s_.bytes / 2, 1); e.empty()) {
        row(
            "sequential read, source in memory (tmpfs), 2 MiB", "GB/s", "fast", [&] { return raw_fast(); },
            [&] { return vmem_file_read(fast_, "2MiB", "auto"); }, "");
      }
    }
    row(
        "resident memory, no faults", "GB/s", "hits", [&] { return plain_memory(); }, [&] { return vmem_resident(); },
        "");
    report();
  }

 private:
  bool wanted(const std::string& key) const { return s_.only.empty() || key.find(s_.only) != std::string::npos; }

  void row(const std::string& what, const char* unit, const std::string& key, const std::function<Sample()>& limit,
           const std::function<Sample()>& ours, const std::string& peer_name, bool lower = false) {
    if (!wanted(key)) return;
    Row r{what, unit, lower, {}, {}, {}};
    for (int i = 0; i < s_.rounds; ++i) {
      r.raw.push_back(limit());
      try {
        r.vmem.push_back(ours());
      } catch (const std::exception& e) {
        r.vmem.push_back({0, 0, 0, e.what()});
      }
      vmem_shutdown();
      if (!peer_name.empty()) r.mmap.push_back(peer(s_, peer_name, file_, budget_));
      fprintf(stderr, "%s: limit %.2f, libvmem %.2f%s%s, mmap %.2f %s\n", what.c_str(), r.raw.back().value,
              r.vmem.back().value, r.vmem.back().error.empty() ? "" : " ", r.vmem.back().error.c_str(),
              r.mmap.empty() ? 0 : r.mmap.back().value, unit);
    }
    rows_.push_back(std::move(r));
  }

  static Sample from(const rawdisk::Result& r, double value) { return {value, 0, r.p99_us, r.error}; }
  Sample raw(bool mixed, bool) const {
    rawdisk::Plan p;
    p.span = p.total = s_.bytes;
    p.write_back = mixed;
    const double cpu = rawdisk::cpu_seconds();
    const auto r = rawdisk::run(file_, p);
    Sample s = from(r, r.read_gbs);
    s.cores_per_gbs = (rawdisk::cpu_seconds() - cpu) / r.seconds / r.read_gbs;
    return s;
  }
  // The I/O of a sort: it reads and writes everything twice.
  Sample raw_sort() const {
    Sample s = raw(true, false);
    s.value /= 2;
    s.cores_per_gbs *= 2;
    return s;
  }
  Sample raw_fast() const {
    rawdisk::Plan p;
    p.span = p.total = s_.bytes / 2;
    p.direct = false;
    const auto r = rawdisk::run(fast_, p);
    return from(r, r.read_gbs);
  }
  Sample raw_random(size_t block, unsigned threads) const {
    rawdisk::Plan p;
    p.span = s_.bytes;
    p.block = block;
    p.depth = threads;
    p.random = true;
    p.total = (threads == 1 ? s_.operations / 8 : s_.operations) * block;
    p.seed = ++seed_;
    const auto r = rawdisk::run(file_, p);
    return from(r, r.operations);
  }
  Sample raw_latency(size_t block) const {
    rawdisk::Plan p;
    p.span = s_.bytes;
    p.block = block;
    p.depth = 1;
    p.random = true;
    p.total = (block > (1 << 20) ? 400 : 3000) * block;
    p.seed = ++seed_;
    const auto r = rawdisk::run(file_, p);
    return from(r, r.p50_us);
  }

  void configure(const std::string& block, const char* transfer, const char* readahead = "64MiB") const {
    vmem_shutdown();
    vmem::set("host_budget", std::to_string(budget_));
    vmem::set("block_size", block);
    vmem::set("transfer", transfer);
    vmem::set("readahead", readahead);
  }
  Sample vmem_file_read(const std::string& path, const char* block, const char* transfer) const {
    configure(block, transfer);
    const uint64_t bytes = path == fast_ ? s_.bytes / 2 : s_.bytes;
    vmem::region r(bytes, path, 0, VMEM_MAP_READ | VMEM_HOST_ONLY);
    r.advise(VMEM_ADVISE_SEQUENTIAL);
    return sequential_read(r.data(), bytes);
  }
  Sample vmem_anon_read(const char* block, const char* transfer) const {
    configure(block, transfer);
    vmem::region r(s_.bytes, VMEM_HOST_ONLY);
    auto* w = static_cast<uint64_t*>(r.data());
    for (size_t i = 0; i < s_.bytes / 8; ++i) w[i] = i * 0x9e3779b97f4a7c15u;
    r.evict();
    r.advise(VMEM_ADVISE_SEQUENTIAL);
    return sequential_read(r.data(), s_.bytes);
  }
  Sample vmem_rmw(const char* block, bool shared) const {
    configure(block, "auto");
    vmem::region r = shared ? vmem::region(s_.bytes, file_, 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY)
                            : vmem::region(s_.bytes, VMEM_HOST_ONLY);
    if (!shared) {
      auto* w = static_cast<uint64_t*>(r.data());
      for (size_t i = 0; i < s_.bytes / 8; ++i) w[i] = i * 0x9e3779b97f4a7c15u;
      r.evict();
    }
    r.advise(VMEM_ADVISE_SEQUENTIAL);
    const Sample s = read_modify_write(r.data(), s_.bytes, [&] { r.sync(); });
    r.free();
    return s;
  }
  Sample vmem_sort() const {
    configure("2MiB", "auto");
    const std::string out = file_ + ".out";
    const int fd = open(out.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
    const bool made = fd >= 0 && ftruncate(fd, static_cast<off_t>(s_.bytes)) == 0;
    if (fd >= 0) close(fd);
    if (!made) return {0, 0, 0, out + ": " + strerror(errno)};
    vmem::region input(s_.bytes, file_, 0, VMEM_MAP_READ | VMEM_HOST_ONLY), runs(s_.bytes, VMEM_HOST_ONLY),
        output(s_.bytes, out, 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY);
    unlink(out.c_str());
    extsort::Memory m = extsort::plan(input.data(), runs.data(), output.data(), s_.bytes, budget_);
    m.fetch = [&](const void* p, size_t n) { vmem::check(vmem_prefetch(p, n, VMEM_HOST, nullptr)); };
    m.done_with = [&](const void* p, size_t n) { vmem::check(vmem_advise(p, n, VMEM_ADVISE_DONT_NEED, 0)); };
    m.write_out = [&](const void* p, size_t n) { vmem::check(vmem_prefetch(p, n, VMEM_SSD, nullptr)); };
    return timed_sort(m, s_.bytes, [&] { output.sync(); });
  }
  Sample vmem_random(size_t block, unsigned threads) const {
    configure(std::to_string(block), "auto");
    vmem::region r(s_.bytes, file_, 0, VMEM_MAP_READ | VMEM_HOST_ONLY);
    r.advise(VMEM_ADVISE_RANDOM);
    return random_reads(r.data(), s_.bytes, threads, threads == 1 ? s_.operations / 8 : s_.operations);
  }
  Sample vmem_latency(size_t block) const {
    configure(std::to_string(block), "auto");
    vmem::region r(s_.bytes, file_, 0, VMEM_MAP_READ | VMEM_HOST_ONLY);
    r.advise(VMEM_ADVISE_RANDOM);
    return touch_latency(r.data(), s_.bytes, block, block > (1 << 20) ? 800 : 3000);
  }
  Sample plain_memory() const {
    const size_t bytes = 128 << 20;
    void* p = mmap(nullptr, bytes + (2 << 20), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    void* q = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(p) + (2 << 20) - 1) / (2 << 20) * (2 << 20));
    madvise(q, bytes, MADV_HUGEPAGE);
    memset(q, 1, bytes);
    const Sample s = resident(q, bytes);
    munmap(p, bytes + (2 << 20));
    return s;
  }
  Sample vmem_resident() const {
    configure("2MiB", "auto");
    vmem::region r(128 << 20, VMEM_HOST_ONLY);
    memset(r.data(), 1, r.size());
    return resident(r.data(), r.size());
  }
  // Not inlined, so that both kinds of memory run the same instructions.
  [[gnu::noinline]] static Sample resident(const void* p, size_t bytes) {
    const double start = rawdisk::now();
    uint64_t total = 0;
    for (int i = 0; i < 10; ++i) total += sum_words(p, bytes);
    sink = total;
    return {10 * static_cast<double>(bytes) / 1e9 / (rawdisk::now() - start), 0, 0, ""};
  }

  void report() const {
    printf(
        "| what | unit | limit | libvmem (low to high) | mmap, same memory limit | libvmem / limit | libvmem / mmap | "
        "cores "
        "per GB/s |\n|---|---|---|---|---|---|---|---|\n");
    Json out = Json::array();
    for (const Row& r : rows_) {
      const Spread raw = spread(r.raw), ours = spread(r.vmem), peer = spread(r.mmap);
      const int digits = r.unit == "op/s" ? 0 : r.unit == "us" ? 1 : 2;
      char mmap_text[64] = "-", ratio_text[32] = "-", cores[32] = "-";
      if (peer.median > 0) {
        snprintf(mmap_text, sizeof mmap_text, "%.*f", digits, peer.median);
        snprintf(ratio_text, sizeof ratio_text, "%.2f", ours.median / peer.median);
      }
      if (ours.cores > 0) snprintf(cores, sizeof cores, "%.2f (raw %.2f)", ours.cores, raw.cores);
      char versus[64];
      if (r.lower_is_better) {
        snprintf(versus, sizeof versus, "+%.0f us (p99 %.0f, raw %.0f)", ours.median - raw.median, ours.p99, raw.p99);
      } else {
        snprintf(versus, sizeof versus, "%.2f", raw.median > 0 ? ours.median / raw.median : 0);
      }
      printf("| %s | %s | %.*f | **%.*f** (%.*f to %.*f) | %s | %s | %s | %s |\n", r.what.c_str(), r.unit.c_str(),
             digits, raw.median, digits, ours.median, digits, ours.low, digits, ours.high, mmap_text, versus,
             ratio_text, cores);
      out.push_back({{"what", r.what},
                     {"unit", r.unit},
                     {"limit", raw.median},
                     {"libvmem", ours.median},
                     {"low", ours.low},
                     {"high", ours.high},
                     {"mmap", peer.median},
                     {"p99", ours.p99},
                     {"cores_per_gbs", ours.cores}});
    }
    if (!s_.json.empty()) std::ofstream(s_.json) << out.dump(2) << "\n";
  }

  const Settings& s_;
  const uint64_t budget_;
  const std::string file_;
  std::string fast_;
  std::vector<Row> rows_;
  mutable uint64_t seed_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Host and SSD tiers against raw io_uring and mmap."};
  Settings s;
  app.add_option("--folder", s.folder, "folder on the disk to measure");
  app.add_option("--bytes", s.bytes, "data; the memory budget is a quarter of it")->transform(CLI::AsSizeValue(false));
  app.add_option("--rounds", s.rounds);
  app.add_option("--operations", s.operations, "random reads of 8 threads");
  app.add_option("--only", s.only, "rows whose key contains this");
  app.add_option("--json", s.json, "file for the figures");
  app.add_option("--fast", s.fast, "folder in memory");
  app.add_option("--peer", s.peer)->group("");
  CLI11_PARSE(app, argc, argv);
  if (!s.peer.empty()) return run_peer(s);
  try {
    Bench(s).run();
  } catch (const std::exception& e) {
    fprintf(stderr, "host_bench: %s\n", e.what());
    return 1;
  }
}
