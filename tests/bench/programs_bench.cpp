// Programs as users wrote them, on libvmem and on mmap under an equal memory limit. Each runs in
// its own process and memory cgroup, so that the figures include the first pass after the start.
// io_uring on the same file is the limit.
//
// It does not measure: other processes that want memory, more than a few GiB, a GPU.
#include <sys/wait.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory_resource>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/raw_disk.h"
#include "external_sort.h"
#include "memory_limit.h"
#include "vmem/pool.hpp"
#include "vmem/vmem.hpp"

namespace {

using Json = nlohmann::ordered_json;

constexpr uint64_t kMiB = uint64_t{1} << 20;

struct Settings {
  std::string folder = getenv("TMPDIR") != nullptr ? getenv("TMPDIR") : "/var/tmp";
  uint64_t bytes = 2048 * kMiB;
  int rounds = 5;
  std::string only, json, program, body, file;
};

// Prints a timed part of a body: its seconds, the CPU time of all threads, and a sum that must be
// the same for all bodies of a program (0: none).
void say(const char* what, double seconds, double cpu, uint64_t sum) {
  printf("%s %.6f %.6f %llu\n", what, seconds, cpu, static_cast<unsigned long long>(sum));
  fflush(stdout);
}

template <typename F>
void timed(const char* what, F&& work) {
  const double start = rawdisk::now(), cpu = rawdisk::cpu_seconds();
  const uint64_t sum = work();
  const double seconds = rawdisk::now() - start;
  say(what, seconds, rawdisk::cpu_seconds() - cpu, sum);
}

// One run of a program on one body.
struct Run {
  const std::string& body;
  const std::string& file;  // of random words
  uint64_t bytes;           // size of the file
  uint64_t limit;           // limit of the cgroup
  bool vmem() const { return body.starts_with("libvmem"); }
  bool says(const char* word) const { return body.find(word) != std::string::npos; }
  // The budget of libvmem: the rest of the limit is for the program and for what the kernel charges
  // to it.
  uint64_t budget() const { return limit - 32 * kMiB; }
};

void raw(const Run& run, const char* what, size_t block, uint64_t buffers, bool write_back = false) {
  rawdisk::Plan plan;
  plan.span = plan.total = run.bytes;
  plan.block = block;
  plan.buffers = static_cast<unsigned>(buffers);
  plan.write_back = write_back;
  const double cpu = rawdisk::cpu_seconds();
  const rawdisk::Result r = rawdisk::run(run.file, plan);
  if (!r.error.empty()) throw std::runtime_error(r.error);
  say(what, r.seconds, rawdisk::cpu_seconds() - cpu, 0);
}

// Sums the words of `bytes`, in equal parts, one thread each.
uint64_t sum_in_threads(const void* data, uint64_t bytes, unsigned threads) {
  std::vector<uint64_t> sums(threads * 8);  // one cache line per thread
  extsort::in_threads(threads, [&](unsigned t) {
    const uint64_t words = bytes / 8 / threads;
    const auto* w = static_cast<const uint64_t*>(data) + t * words;
    uint64_t sum = 0;
    for (uint64_t i = 0; i < words; ++i) sum += w[i];
    sums[t * 8] = sum;
  });
  uint64_t sum = 0;
  for (const uint64_t s : sums) sum += s;
  return sum;
}

// Runs with the file, open for reading, on the requested body.
template <typename F>
void with_file(const Run& run, const vmem::attributes& how, int mmap_advice, F&& work) {
  if (!run.vmem()) {
    const memlimit::MappedFile map(run.file, O_RDONLY, run.bytes);
    if (map.data() == nullptr) throw std::runtime_error(run.file + " cannot be mapped");
    if (mmap_advice >= 0) map.advise(mmap_advice);
    return work(map.data());
  }
  vmem::attributes all = how;
  all.flags = VMEM_HOST_ONLY | VMEM_MAP_READ;
  all.path = run.file;
  const vmem::region region(run.bytes, all);
  work(region.data());
}

void sequential(const Run& run) {
  if (run.body == "raw, 16 buffers") return raw(run, "read", 2 << 20, 0);
  if (run.body == "raw, a buffer a frame") return raw(run, "read", 2 << 20, run.budget() / (2 << 20));
  with_file(run, {.advice = run.says("SEQUENTIAL") ? VMEM_ADVISE_SEQUENTIAL : 0}, MADV_SEQUENTIAL, [&](void* p) {
    timed("first", [&] { return sum_in_threads(p, run.bytes, 1); });
    if (run.vmem()) timed("second", [&] { return sum_in_threads(p, run.bytes, 1); });
  });
}

void sequential_small(const Run& run) {
  if (run.says("raw")) return raw(run, "read", 64 << 10, 0);
  with_file(run, {.block_size = run.says("auto") ? VMEM_BLOCK_AUTO : size_t{64} << 10}, -1, [&](void* p) {
    timed("first", [&] { return sum_in_threads(p, run.bytes, 2); });
    timed("second", [&] { return sum_in_threads(p, run.bytes, 2); });
  });
}

void scattered(const Run& run) {
  const std::string path = run.file + ".new";
  if (run.says("raw")) {  // whole blocks, as libvmem writes blocks of 64 KiB and more
    const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(run.bytes)) != 0) throw std::runtime_error(path + " cannot be made");
    rawdisk::Plan plan;
    plan.span = plan.total = run.bytes;
    plan.write = true;
    timed("all", [&] {
      const rawdisk::Result r = rawdisk::run(path, plan);
      if (!r.error.empty()) throw std::runtime_error(r.error);
      fsync(fd);
      return uint64_t{0};
    });
    close(fd);
    unlink(path.c_str());
    return;
  }
  const auto store = [&](void* p) {
    for (uint64_t at = 0; at < run.bytes; at += 64 << 10) static_cast<uint64_t*>(p)[at / 8] = at + 1;
  };
  if (!run.vmem()) {
    memlimit::MappedFile map(path, O_RDWR | O_CREAT | O_TRUNC, run.bytes);
    if (map.data() == nullptr) throw std::runtime_error(path + " cannot be made");
    return timed("all", [&] {
      store(map.data());
      map.unmap_and_sync();
      return uint64_t{0};
    });
  }
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
  unlink(path.c_str());
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(run.bytes)) != 0) throw std::runtime_error(path + " cannot be made");
  vmem::region region(run.bytes, vmem::attributes{.flags = VMEM_HOST_ONLY | VMEM_MAP_SHARED,
                                                  .block_size = run.says("64 KiB") ? size_t{64} << 10 : 0,
                                                  .fd = fd});
  timed("all", [&] {
    store(region.data());
    region.free();
    fsync(fd);
    return uint64_t{0};
  });
  close(fd);
}

// Lloyd's algorithm, two rounds: points with 16 coordinates of 12 bits, 4 centres, a share of the
// points per thread.
struct Point {
  uint32_t at[16];
};
struct Clusters {
  int32_t centre[4][16];
  int64_t sum[4][16], count[4];
};

void assign(const Point* from, const Point* to, Clusters* all) {
  for (const Point* p = from; p < to; ++p) {
    int32_t v[16], best = INT32_MAX;
    int nearest = 0;
    for (int k = 0; k < 16; ++k) v[k] = static_cast<int32_t>(p->at[k] >> 20);
    for (int c = 0; c < 4; ++c) {
      int32_t d = 0;
      for (int k = 0; k < 16; ++k) d += (v[k] - all->centre[c][k]) * (v[k] - all->centre[c][k]);
      if (d < best) best = d, nearest = c;
    }
    for (int k = 0; k < 16; ++k) all->sum[nearest][k] += v[k];
    ++all->count[nearest];
  }
}

uint64_t find_centres(const void* p, uint64_t bytes, unsigned threads, unsigned rounds) {
  const auto* points = static_cast<const Point*>(p);
  const uint64_t part = bytes / sizeof(Point) / threads;
  Clusters now = {};
  for (int i = 0; i < 64; ++i) now.centre[i / 16][i % 16] = i * 61;
  for (unsigned round = 0; round < rounds; ++round) {
    std::vector<Clusters> all(threads, now);
    extsort::in_threads(threads, [&](unsigned t) { assign(points + t * part, points + (t + 1) * part, &all[t]); });
    for (int i = 0; i < 64; ++i) {
      int64_t sum = 0, count = 0;
      for (const Clusters& each : all) sum += each.sum[i / 16][i % 16], count += each.count[i / 16];
      if (count != 0) now.centre[i / 16][i % 16] = static_cast<int32_t>(sum / count);
    }
  }
  uint64_t sum = 1;
  for (int i = 0; i < 64; ++i) sum = sum * 31 + static_cast<uint64_t>(now.centre[i / 16][i % 16]);
  return sum;
}

void kmeans(const Run& run) {
  constexpr unsigned kThreads = 8, kRounds = 2;
  if (run.says("raw")) {
    return raw(run, "one round", 2 << 20, run.budget() / (2 << 20));
  }
  with_file(run, {.advice = run.says("SEQUENTIAL") ? VMEM_ADVISE_SEQUENTIAL : 0},
            run.says("SEQUENTIAL") ? MADV_SEQUENTIAL : -1,
            [&](void* p) { timed("all", [&] { return find_centres(p, run.bytes, kThreads, kRounds); }); });
}

// Allocates from a mapped file and never frees.
class MappedResource final : public std::pmr::memory_resource {
 public:
  MappedResource(const memlimit::MappedFile& file, uint64_t bytes) : at_(file.data()), end_(at_ + bytes) {}

 private:
  void* do_allocate(size_t bytes, size_t align) override {
    std::byte* const p = reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(at_) + align - 1) / align * align);
    if (bytes > static_cast<size_t>(end_ - p)) throw std::bad_alloc();
    at_ = p + bytes;
    return p;
  }
  void do_deallocate(void*, size_t, size_t) override {}
  bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override { return this == &other; }
  std::byte *at_, *end_;
};

// A table a sixth larger than memory, built in key order, with 70,000 random lookups.
[[noreturn]] void join_on(std::pmr::memory_resource* memory, uint64_t rows) {
  std::pmr::unsynchronized_pool_resource small(memory);
  std::pmr::unordered_map<uint64_t, uint64_t> table(&small);
  timed("build", [&] {
    table.reserve(rows);
    for (uint64_t i = 0; i < rows; ++i) table.emplace(i, i);
    return uint64_t{0};
  });
  timed("probe", [&] {
    uint64_t sum = 0, state = 88172645463325252u;
    for (int i = 0; i < 70000; ++i) {
      state ^= state << 13, state ^= state >> 7, state ^= state << 17;
      sum += table.at(state % rows);
    }
    return sum;
  });
  _exit(0);  // skip the destructors, which would free node by node
}

void join(const Run& run) {
  const uint64_t rows = run.budget() / 6 * 7 / 32;  // a node has 24 bytes, a bucket 8
  if (run.vmem()) {
    vmem::pool pool({.flags = VMEM_HOST_ONLY, .advice = run.says("RANDOM") ? VMEM_ADVISE_RANDOM : 0});
    join_on(&pool, rows);
  }
  const memlimit::MappedFile map(run.file + ".table", O_RDWR | O_CREAT | O_TRUNC, 2 * run.limit);
  if (map.data() == nullptr) throw std::runtime_error("no file to map");
  if (run.says("RANDOM")) map.advise(MADV_RANDOM);
  MappedResource resource(map, 2 * run.limit);
  join_on(&resource, rows);
}

void time_sort(const extsort::Memory& m, const std::function<void()>& sync) {
  timed("all", [&] {
    extsort::sort(m);
    sync();
    return uint64_t{0};
  });
  if (!extsort::right(m.input, m.output, m.count)) throw std::runtime_error("sorted wrong");
}

void sort(const Run& run) {
  constexpr unsigned kThreads = 2;
  // The I/O of a sort, halved: a sort reads and writes everything twice.
  if (run.says("raw")) return raw(run, "read and written once", 2 << 20, 0, true);
  const std::string out = run.file + ".out";
  if (!run.vmem()) {
    memlimit::MappedFile files[] = {{run.file, O_RDONLY, run.bytes},
                                    {run.file + ".runs", O_RDWR | O_CREAT | O_TRUNC, run.bytes},
                                    {out, O_RDWR | O_CREAT | O_TRUNC, run.bytes}};
    for (const memlimit::MappedFile& f : files)
      if (f.data() == nullptr) throw std::runtime_error("no file to map");
    const auto of = [&](const void* p) -> memlimit::MappedFile& {
      return *std::ranges::find_if(files, [&](auto& f) { return f.has(p); });
    };
    extsort::Memory m =
        extsort::plan(files[0].data(), files[1].data(), files[2].data(), run.bytes, run.budget(), kThreads);
    m.fetch = [&](const void* p, size_t n) { of(p).fetch(p, n); };
    m.done_with = [&](const void* p, size_t n) { of(p).drop(p, n); };
    m.write_out = [&](const void* p, size_t n) { of(p).write(p, n); };
    return time_sort(m, [&] { files[2].sync(); });
  }
  const int fd = open(out.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
  unlink(out.c_str());
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(run.bytes)) != 0) throw std::runtime_error(out + " cannot be made");
  const vmem::region input(run.bytes, run.file, 0, VMEM_MAP_READ | VMEM_HOST_ONLY), runs(run.bytes, VMEM_HOST_ONLY),
      output(run.bytes, vmem::attributes{.flags = VMEM_MAP_SHARED | VMEM_HOST_ONLY, .fd = fd});
  extsort::Memory m = extsort::plan(input.data(), runs.data(), output.data(), run.bytes, run.budget(), kThreads);
  m.fetch = [&](const void* p, size_t n) { vmem::check(vmem_prefetch(p, n, VMEM_HOST, nullptr)); };
  m.done_with = [&](const void* p, size_t n) { vmem::check(vmem_advise(p, n, VMEM_ADVISE_DONT_NEED, 0)); };
  m.write_out = [&](const void* p, size_t n) { vmem::check(vmem_prefetch(p, n, VMEM_SSD, nullptr)); };
  time_sort(m, [&] { output.sync(); });
}

struct Program {
  const char *name, *says;
  double share;    // of --bytes
  uint64_t limit;  // memory limit: MiB for 2 GiB of --bytes
  std::vector<const char*> bodies;
  void (*run)(const Run&);
};

const std::vector<Program>& programs() {
  static const std::vector<Program> all = {
      {"sequential",
       "a file read in order, blocks of 2 MiB, one thread",
       1,
       512,
       {"raw, 16 buffers", "raw, a buffer a frame", "libvmem", "libvmem SEQUENTIAL", "mmap SEQUENTIAL"},
       sequential},
      {"small",
       "a file read in order, blocks of 64 KiB, two threads with a half each",
       1,
       480,
       {"raw", "libvmem", "libvmem auto", "mmap"},
       sequential_small},
      {"scattered",
       "a word of each 64 KiB of a new file, unmapped and synced",
       1,
       480,
       {"raw", "libvmem", "libvmem, 64 KiB blocks", "mmap"},
       scattered},
      {"kmeans",
       "k-means of a file, two rounds, 8 threads",
       2,
       1024,
       {"raw", "libvmem", "libvmem SEQUENTIAL", "mmap", "mmap SEQUENTIAL"},
       kmeans},
      {"join",
       "a hash table on a pool, a sixth larger than its memory",
       0.29,
       544,
       {"libvmem", "libvmem RANDOM", "mmap RANDOM"},
       join},
      {"sort", "an external sort, two threads", 0.75, 480, {"raw", "libvmem", "mmap"}, sort},
  };
  return all;
}

int run_here(const Settings& s, const std::string& file) {
  for (const Program& p : programs()) {
    if (s.program != p.name) continue;
    const uint64_t limit = s.bytes / 2048 * p.limit;
    const auto bytes = static_cast<uint64_t>(static_cast<double>(s.bytes) * p.share) / (2 * kMiB) * (2 * kMiB);
    const Run run = {s.body, file, bytes, limit};
    if (run.vmem()) {
      vmem::set("device", "none");
      vmem::set("publish", "off");
      vmem::set("host_budget", std::to_string(run.budget()));
      vmem::set("ssd_path", s.folder);
    }
    p.run(run);
    return 0;
  }
  throw std::runtime_error("no program '" + s.program + "'");
}

struct Part {
  double seconds, cpu;
};
struct Body {
  std::map<std::string, std::vector<Part>> parts;
  std::vector<std::string> order;
  std::string error;
};

// Runs a body once, in its own process, limited by the cgroup.
void sample(const Settings& s, const Program& p, const char* name, const std::string& file, Body* body, uint64_t* sum) {
  const memlimit::Group group(s.bytes / 2048 * p.limit);
  if (!group) throw std::runtime_error("no memory cgroup can be made: without one the limits are not equal");
  int out[2];
  if (pipe(out) != 0) throw std::runtime_error("pipe");
  const pid_t child = fork();
  if (child == 0) {
    if (!group.enter()) _exit(3);
    dup2(out[1], 1);
    execl("/proc/self/exe", "programs_bench", "--program", p.name, "--body", name, "--file", file.c_str(), "--folder",
          s.folder.c_str(), "--bytes", std::to_string(s.bytes).c_str(), nullptr);
    _exit(1);
  }
  close(out[1]);
  FILE* f = fdopen(out[0], "r");
  char line[200];
  while (fgets(line, sizeof line, f) != nullptr) {
    // The name of a part may have spaces in it: the figures are the last three words.
    std::vector<std::string> words;
    for (char* w = strtok(line, " \n"); w != nullptr; w = strtok(nullptr, " \n")) words.emplace_back(w);
    if (words.size() < 4) continue;
    const size_t n = words.size() - 3;
    std::string what = words[0];
    for (size_t i = 1; i < n; ++i) what += " " + words[i];
    if (body->parts[what].empty()) body->order.push_back(what);
    body->parts[what].push_back({atof(words[n].c_str()), atof(words[n + 1].c_str())});
    const uint64_t got = strtoull(words[n + 2].c_str(), nullptr, 10);
    if (got != 0 && *sum != 0 && got != *sum) body->error = "another result than the others'";
    if (got != 0) *sum = got;
  }
  fclose(f);
  int status;
  waitpid(child, &status, 0);
  if (WIFSIGNALED(status)) body->error = "signal " + std::to_string(WTERMSIG(status));
  if (WIFEXITED(status) && WEXITSTATUS(status) != 0) body->error = "exit code " + std::to_string(WEXITSTATUS(status));
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

// Returns false if a body failed, or if its result differs from the others'.
bool compare(const Settings& s, const Program& p, const std::string& file, Json* rows) {
  std::map<std::string, Body> bodies;
  uint64_t sum = 0;
  for (int round = 0; round < s.rounds; ++round)
    for (const char* name : p.bodies) sample(s, p, name, file, &bodies[name], &sum);
  printf("\n%s: %s (%.2f GiB, %llu MiB of memory)\n\n| | s | lowest to highest | CPU s |\n|---|---|---|---|\n", p.name,
         p.says, static_cast<double>(s.bytes) * p.share / 1073741824.0,
         static_cast<unsigned long long>(s.bytes / 2048 * p.limit / kMiB));
  bool right = true;
  for (const char* name : p.bodies) {
    const Body& body = bodies[name];
    right &= body.error.empty();
    if (!body.error.empty()) printf("| %s: %s | | | |\n", name, body.error.c_str());
    for (const std::string& part : body.order) {
      std::vector<double> seconds, cpu;
      for (const Part& x : body.parts.at(part)) seconds.push_back(x.seconds), cpu.push_back(x.cpu);
      const auto [low, high] = std::minmax_element(seconds.begin(), seconds.end());
      const std::string what = body.parts.size() > 1 ? std::string(name) + ", " + part : name;
      printf("| %s | **%.2f** | %.2f to %.2f | %.2f |\n", what.c_str(), median(seconds), *low, *high, median(cpu));
      (*rows)[what] = {{"s", median(seconds)}, {"low", *low}, {"high", *high}, {"cpu_s", median(cpu)}};
    }
  }
  fflush(stdout);
  return right;
}

bool wanted(const std::string& only, const std::string& name) {
  for (size_t at = 0; at < only.size();) {
    const size_t end = std::min(only.find(',', at), only.size());
    if (name.starts_with(only.substr(at, end - at))) return true;
    at = end + 1;
  }
  return only.empty();
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Programs on libvmem and on mmap, in cgroups of equal memory."};
  Settings s;
  app.add_option("--folder", s.folder, "folder on the disk to measure");
  app.add_option("--bytes", s.bytes, "of the file that most programs use; limits of memory follow")
      ->transform(CLI::AsSizeValue(false));
  app.add_option("--rounds", s.rounds)->check(CLI::PositiveNumber);
  app.add_option("--only", s.only, "programs, by beginnings of their names, with commas");
  app.add_option("--json", s.json, "file for the figures");
  app.add_option("--program", s.program, "run this one here, without a limit, for a profile: with --body");
  app.add_option("--body", s.body, "such as \"libvmem SEQUENTIAL\"");
  app.add_option("--file", s.file, "the file, made if it is not there, and kept");
  CLI11_PARSE(app, argc, argv);
  const std::string file = s.file.empty() ? s.folder + "/vmem-programs." + std::to_string(getpid()) : s.file;
  bool right = true;
  try {
    if (access(file.c_str(), R_OK) != 0) {
      if (const std::string e = rawdisk::fill(file, 2 * s.bytes, 1); !e.empty()) throw std::runtime_error(e);
    }
    if (!s.program.empty()) return run_here(s, file);
    Json out;
    for (const Program& p : programs()) {
      if (wanted(s.only, p.name)) right &= compare(s, p, file, &out[p.name]);
    }
    if (!s.json.empty()) std::ofstream(s.json) << out.dump(2) << "\n";
  } catch (const std::exception& e) {
    fprintf(stderr, "programs_bench: %s\n", e.what());
    right = false;
  }
  if (s.file.empty()) unlink(file.c_str());
  return right ? 0 : 1;
}
