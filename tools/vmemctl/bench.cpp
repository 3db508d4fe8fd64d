// vmemctl bench: finds the I/O depth and block size that suit this SSD and this GPU, and writes
// them as settings. It measures through the library, beside the disk's own limit, in rounds until
// the figures are steady, so that noise decides nothing.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <functional>
#include <optional>
#include <sstream>
#include <system_error>

#include "commands.h"
#include "common/own_files.h"
#include "common/raw_disk.h"
#include "core/options.h"
#include "core/status.h"
#include "figures.h"
#include "ssd_path.h"
#include "vmem/vmem.hpp"

namespace vmemctl {

namespace {

constexpr size_t kMiB = 1 << 20;
constexpr size_t kPart = 32 * kMiB;  // leased at once for the GPU

void must(int rc) {
  if (rc != 0) throw Failure{kFailed, vmem_last_error()};
}

void set(const char* name, const std::string& value) {
  must(vmem_set(name, value.c_str()));
}

struct Row {
  unsigned depth;
  size_t block;
  Figure host_gbs, random, device_gbs;  // empty: not measured; GB = 1e9 bytes
};

class Bench {
 public:
  Bench(const BenchOptions& options, std::string file, size_t size)
      : options_(options), file_(std::move(file)), size_(size) {}
  // Chooses the depth with large blocks, then the block size at that depth, then measures the
  // device.
  void run();
  const std::vector<Row>& rows() const { return rows_; }
  const Figure& raw_gbs() const { return raw_gbs_; }
  unsigned depth() const { return depth_; }
  size_t block() const { return block_; }
  const std::string& device_words() const { return device_words_; }
  // Why nothing was chosen, or "".
  const std::string& unsteady() const { return unsteady_; }

 private:
  double rate(const std::function<size_t()>& step) const;
  double sequential(size_t block);
  double random_touches(size_t block);
  double to_device();
  void measure();
  void measure_device();
  size_t choose(std::vector<Row>& rows, Figure Row::*figure, const char* what,
                const std::function<void(Row&)>& measure);

  const BenchOptions& options_;
  const std::string file_;
  const size_t size_;
  std::vector<Row> rows_;
  Figure raw_gbs_;
  std::string unsteady_;
  unsigned depth_ = 16;
  size_t block_ = 2 * kMiB;
  std::string device_words_ = "not measured";
};

// Rate of `step` (which returns the bytes it moved) in 1e9 bytes a second, measured for the
// requested time.
double Bench::rate(const std::function<size_t()>& step) const {
  const double began = rawdisk::now();
  size_t moved = 0;
  double took = 0;
  while (took < options_.seconds) {
    moved += step();
    took = rawdisk::now() - began;
  }
  return took > 0 ? static_cast<double>(moved) / took / 1e9 : 0;
}

double Bench::sequential(size_t block) {
  set("block_size", std::to_string(block));
  vmem::region r(size_, file_, 0, VMEM_MAP_READ | VMEM_HOST_ONLY);
  must(vmem_advise(r.data(), size_, VMEM_ADVISE_SEQUENTIAL, 0));
  const auto* bytes = static_cast<const volatile unsigned char*>(r.data());
  size_t at = 0;
  return rate([&]() -> size_t {
    if (at == size_) {
      must(vmem_evict(r.data(), size_, VMEM_SSD));
      at = 0;
    }
    const size_t n = std::min<size_t>(8 * kMiB, size_ - at);
    for (size_t i = at; i < at + n; i += 4096) (void)bytes[i];
    at += n;
    return n;
  });
}

// Random touches a second of one thread: the cost of a block of which only a few bytes are used.
double Bench::random_touches(size_t block) {
  set("block_size", std::to_string(block));
  vmem::region r(size_, file_, 0, VMEM_MAP_READ | VMEM_HOST_ONLY);
  must(vmem_advise(r.data(), size_, VMEM_ADVISE_RANDOM, 0));
  const auto* bytes = static_cast<const volatile unsigned char*>(r.data());
  uint64_t state = 88172645463325252u;
  size_t since = 0;
  return 1e9 * rate([&]() -> size_t {
           state ^= state << 13, state ^= state >> 7, state ^= state << 17;
           (void)bytes[state % size_];
           if (++since % (size_ / block) == 0) must(vmem_evict(r.data(), size_, VMEM_SSD));
           return 1;
         });
}

// Streams from SSD to GPU in order, one part ahead.
double Bench::to_device() {
  vmem::region r(size_, file_, 0, VMEM_MAP_READ);
  auto* bytes = static_cast<unsigned char*>(r.data());
  size_t at = 0;
  return rate([&]() -> size_t {
    if (at == size_) {
      must(vmem_evict(r.data(), size_, VMEM_SSD));
      at = 0;
    }
    const size_t n = std::min(kPart, size_ - at);
    if (at + n < size_) must(vmem_prefetch(bytes + at + n, std::min(kPart, size_ - at - n), 0, nullptr));
    must(vmem_acquire(bytes + at, n, VMEM_READ, 0, nullptr));
    must(vmem_release(bytes + at, n, nullptr));
    at += n;
    return n;
  });
}

void Bench::measure_device() {
  struct vmem_device_stats stats = {};
  stats.size = sizeof stats;
  if (vmem_device_stats(0, &stats) != 0) {
    device_words_ = vmem_last_error();
    return;
  }
  device_words_ = "measured";
  std::vector<Row> tried;
  for (const unsigned depth : {std::max(1u, depth_ / 2), depth_, std::min(1024u, depth_ * 2)})
    tried.push_back({depth, 2 * kMiB, {}, {}, {}});
  const size_t chosen = choose(tried, &Row::device_gbs, "SSD to GPU", [&](Row& row) {
    set("io_depth", std::to_string(row.depth));
    row.device_gbs.add(to_device());
  });
  depth_ = std::max(depth_, tried[chosen].depth);
  rows_.insert(rows_.end(), tried.begin(), tried.end());
}

// Measures the rows in turns, so that a passing disturbance affects all of them, until `figure` is
// steady for every row that could be chosen.
size_t Bench::choose(std::vector<Row>& rows, Figure Row::*figure, const char* what,
                     const std::function<void(Row&)>& measure) {
  std::vector<const Figure*> figures;
  figures.reserve(rows.size());
  for (const Row& row : rows) figures.push_back(&(row.*figure));
  Verdict verdict;
  for (int round = 1; round <= kMaxRounds && !verdict.steady; ++round) {
    for (Row& row : rows) measure(row);
    verdict = decide(figures, options_.spread / 100);
    if (isatty(STDERR_FILENO) == 1)
      fprintf(stderr, "%s: round %d, +-%.0f %%\033[K\r", what, round, verdict.error * 100);
  }
  if (!verdict.steady) {
    unsteady_ = vmem::core::strprintf(
        "nothing is chosen: after %d rounds, figures of %s may still be off by %.0f %%, more than %g %%; measure when "
        "the "
        "machine has less to do, longer (--seconds), or accept it (--spread)",
        kMaxRounds, what, verdict.error * 100, options_.spread);
  }
  return verdict.chosen;
}

// Stops at the first choice that noise would decide.
void Bench::measure() {
  std::vector<Row> tried;
  for (const unsigned depth : {4u, 8u, 16u, 32u, 64u}) tried.push_back({depth, 2 * kMiB, {}, {}, {}});
  size_t chosen = choose(tried, &Row::host_gbs, "depth", [&](Row& row) {
    set("io_depth", std::to_string(row.depth));
    row.host_gbs.add(sequential(row.block));
  });
  depth_ = tried[chosen].depth;
  rows_ = std::move(tried);
  if (!unsteady_.empty()) return;
  set("io_depth", std::to_string(depth_));
  tried.clear();
  for (size_t block = 256 << 10; block <= 8 * kMiB; block *= 2) tried.push_back({depth_, block, {}, {}, {}});
  chosen = choose(tried, &Row::host_gbs, "block size", [&](Row& row) {
    row.host_gbs.add(sequential(row.block));
    row.random.add(random_touches(row.block));
  });
  block_ = tried[chosen].block;
  const double host_gbs = tried[chosen].host_gbs.median();
  rows_.insert(rows_.end(), tried.begin(), tried.end());
  if (unsteady_.empty()) measure_device();
  if (!unsteady_.empty()) return;
  rawdisk::Plan plan;
  plan.span = size_;
  plan.total = std::max<uint64_t>(plan.block,
                                  static_cast<uint64_t>(host_gbs * 1e9 * options_.seconds) / plan.block * plan.block);
  plan.depth = depth_;
  for (int round = 0; round < kMinRounds; ++round) raw_gbs_.add(rawdisk::run(file_, plan).read_gbs);
}

void Bench::run() {
  set("publish", "off");
  set("readahead", "64MiB");
  set("device", options_.device);
  set("host_budget", std::to_string(std::clamp<size_t>(size_ / 4, 128 * kMiB, 1024 * kMiB)));
  measure();
  if (isatty(STDERR_FILENO) == 1) fputs("\033[K", stderr);
  vmem_shutdown();
}

std::string settings_file(const Bench& bench, const BenchOptions& options, const std::string& folder) {
  char date[32];
  const time_t now = time(nullptr);
  tm parts{};
  strftime(date, sizeof date, "%Y-%m-%d", gmtime_r(&now, &parts));
  std::string out = std::string("# Settings of libvmem, measured by `vmemctl bench` on ") + date +
                    ". Source it before the program: . FILE\n";
  if (!options.path.empty()) out += "export VMEM_SSD_PATH=" + shell_word(folder) + "\n";
  out += "export VMEM_IO_DEPTH=" + std::to_string(bench.depth()) + "\n";
  out += "export VMEM_BLOCK_SIZE=" + std::to_string(bench.block()) + "\n";
  return out;
}

Failure not_written(const std::string& path, int err) {
  return {err == EACCES || err == EPERM ? kForbidden : kFailed, path + ": " + strerrordesc_np(err)};
}

// --force overwrites only a regular file under its own name: another user may have chosen where a
// link leads.
void check_output(const std::string& path, bool force) {
  struct stat s {};
  if (lstat(path.c_str(), &s) != 0) return;
  if (!force) throw Failure{kTaken, path + " is there already; --force writes over it"};
  if (!S_ISREG(s.st_mode)) throw Failure{kTaken, path + " is a link, a folder or a device; give the name of a file"};
}

// Writes a new file and renames it over the old one; another user may own that. The file is meant to
// be sourced, so no other user may be able to write to it, by its mode or through a descriptor that
// is open already.
void write_settings(const std::string& path, const std::string& text, bool force) {
  check_output(path, force);
  const auto write_to = [&](int fd) {
    return write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size()) && fchmod(fd, 0644) == 0;
  };
  if (!force) {
    const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (fd < 0) throw not_written(path, errno);
    const bool good = write_to(fd);
    if (close(fd) == 0 && good) return;
    unlink(path.c_str());
    throw Failure{kFailed, path + " could not be written"};
  }
  try {
    ownfiles::OwnFile file(path);
    if (!write_to(file.fd())) throw Failure{kFailed, path + " could not be written"};
    file.put_in_place_of(path);
  } catch (const std::system_error& e) {
    throw not_written(path, e.code().value());
  }
}

// "2.04 (1.98-2.10)": the median, and the lowest and highest of all rounds.
std::string spread(const Figure& f, const char* format) {
  if (f.count() == 0) return "-";
  const auto number = [&](double v) {
    char text[32];
    snprintf(text, sizeof text, format, v);
    return std::string(text);
  };
  return number(f.median()) + " (" + number(f.low()) + "-" + number(f.high()) + ")";
}

void print(const Bench& bench) {
  printf("%7s %10s %22s %26s %22s\n", "depth", "block", "SSD to host, GB/s", "random accesses /s", "SSD to GPU, GB/s");
  for (const Row& r : bench.rows()) {
    printf("%7u %10s %22s %26s %22s\n", r.depth, vmem::core::human_bytes(r.block).c_str(),
           spread(r.host_gbs, "%.2f").c_str(), spread(r.random, "%.0f").c_str(), spread(r.device_gbs, "%.2f").c_str());
  }
  printf("in brackets: the least and the most of %d to %d rounds\n", kMinRounds, kMaxRounds);
  if (bench.raw_gbs().count() != 0) {
    printf("the disk alone (io_uring, depth %u), GB/s: %s\nGPU: %s\n", bench.depth(),
           spread(bench.raw_gbs(), "%.2f").c_str(), printable(bench.device_words()).c_str());
  }
  if (bench.unsteady().empty())
    printf("chosen: io_depth=%u block_size=%s\n", bench.depth(), vmem::core::human_bytes(bench.block()).c_str());
}

// KEY is the median; KEY_spread the lowest and the highest.
void write_figure(Json& json, const std::string& key, const Figure& f) {
  json.field(key, f.median()).key(key + "_spread").array();
  json.value(f.low()).value(f.high()).end();
}

}  // namespace

int bench(const Common& common, const BenchOptions& options) {
  uint64_t size = 0;
  if (vmem::core::Status s = vmem::core::parse_bytes(options.size, &size); !s.ok() || size < 64 * kMiB)
    throw Failure{kUsage, "--size " + printable(options.size) + ": give a size from 64MiB, such as 1GiB"};
  size = size / (8 * kMiB) * (8 * kMiB);
  const std::string all = ssd_path(options.path), folder = all.substr(0, all.find(':'));
  struct statvfs room {};
  if (statvfs(folder.c_str(), &room) != 0) throw Failure{kAbsent, folder + ": " + strerrordesc_np(errno)};
  if (!options.output.empty()) {
    check_output(options.output, options.force);
    try {
      const ownfiles::OwnFile trial(options.output);  // removed again; an error shows before anything is measured
    } catch (const std::system_error& e) {
      throw not_written(options.output, e.code().value());
    }
  }
  const uint64_t free_bytes = uint64_t{room.f_bavail} * room.f_frsize;
  if (free_bytes < 2 * size) {
    throw Failure{kFailed, folder + " has " + vmem::core::human_bytes(free_bytes) + " free, the test file of " +
                               vmem::core::human_bytes(size) + " wants twice its size; give a smaller --size"};
  }
  ownfiles::handle_signals();
  std::optional<ownfiles::PrivateFolder> own;  // a private folder: a later open by name finds the file that was filled
  std::optional<ownfiles::OwnFile> file;
  try {
    own.emplace("vmemctl-bench", folder);
    file.emplace(own->path() + "/test");
  } catch (const std::system_error& e) {
    const int err = e.code().value();
    throw Failure{err == EACCES ? kForbidden : kFailed,
                  folder + ": " + strerrordesc_np(err) + "; give a folder with --path"};
  }
  if (std::string wrong = rawdisk::fill(file->path(), size, 1); !wrong.empty()) throw Failure{kFailed, wrong};
  Bench bench(options, file->path(), size);
  bench.run();
  const bool steady = bench.unsteady().empty();
  const std::string text = settings_file(bench, options, all);
  if (steady && !options.output.empty()) write_settings(options.output, text, options.force);
  if (!common.json) {
    print(bench);
    if (!steady) throw Failure{kFailed, bench.unsteady()};
    if (!options.output.empty()) printf("written to %s:\n", printable(options.output).c_str());
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) printf("%s\n", printable(line).c_str());
    return kDone;
  }
  Json json;
  json.object().key("rows").array();
  for (const Row& r : bench.rows()) {
    json.object().field("io_depth", r.depth).field("block_size", uint64_t{r.block});
    json.field("rounds", uint64_t{std::max(r.host_gbs.count(), r.device_gbs.count())});
    write_figure(json, "ssd_to_host_gbs", r.host_gbs);
    write_figure(json, "random_touches", r.random);
    write_figure(json, "ssd_to_device_gbs", r.device_gbs);
    json.end();
  }
  json.end();
  write_figure(json, "disk_gbs", bench.raw_gbs());
  json.field("device", bench.device_words());
  if (steady) {
    json.key("chosen").object().field("io_depth", bench.depth()).field("block_size", uint64_t{bench.block()}).end();
    json.field("output", options.output);
  } else {
    json.key("error").object().field("words", bench.unsteady()).field("exit", static_cast<int>(kFailed)).end();
  }
  printf("%s\n", json.end().text().c_str());
  return steady ? kDone : kFailed;
}

}  // namespace vmemctl
