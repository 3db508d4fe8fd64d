// vmem-sort: sorts a file several times larger than the memory it may use, through plain pointers and std algorithms.
//
// Runs of the file are sorted where they lie in a region, then merged into a second one that is mapped over the output
// file. libvmem moves the blocks; the program only says what it will read next and what it no longer needs.
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <queue>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "common/raw_disk.h"
#include "vmem/vmem.hpp"

namespace {

struct Record {
  unsigned char bytes[64];
  friend bool operator<(const Record& a, const Record& b) { return memcmp(a.bytes, b.bytes, sizeof a.bytes) < 0; }
};

struct Settings {
  std::string input, output;
  uint64_t make = uint64_t{4} << 30;
  std::string budget;
  bool lines = false, keep = false;
  unsigned threads = std::max(1u, std::thread::hardware_concurrency());
};

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class Progress {
 public:
  Progress(const char* what, uint64_t total) : what_(what), total_(std::max<uint64_t>(total, 1)) { show(0); }
  ~Progress() {
    if (tty_) fprintf(stderr, "\r\033[K");
  }
  void add(uint64_t n) {
    const uint64_t done = done_.fetch_add(n) + n;
    const uint64_t percent = done * 100 / total_;
    if (tty_ && shown_.exchange(percent) != percent) show(percent);
  }

 private:
  void show(uint64_t percent) {
    if (!tty_) return;
    char bar[41];
    for (unsigned i = 0; i < 40; ++i) bar[i] = i * 100 / 40 < percent ? '#' : '.';
    bar[40] = '\0';
    fprintf(stderr, "\r%-10s [%s] %3u %%", what_, bar, static_cast<unsigned>(percent));
  }
  const char* what_;
  const uint64_t total_;
  std::atomic<uint64_t> done_{0}, shown_{UINT64_MAX};
  const bool tty_ = isatty(STDERR_FILENO) != 0;
};

// Order-independent: the sum of one hash a record.
uint64_t hash(const unsigned char* p, size_t n) {
  uint64_t h = 0x9e3779b97f4a7c15u ^ n;
  for (; n >= 8; p += 8, n -= 8) {
    uint64_t w;
    memcpy(&w, p, 8);
    h = (h ^ w) * 0xbf58476d1ce4e5b9u;
    h ^= h >> 29;
  }
  for (; n != 0; ++p, --n) h = (h ^ *p) * 0x94d049bb133111ebu;
  return h ^ (h >> 32);
}

uint64_t file_size(const std::string& path) {
  struct stat s;
  if (stat(path.c_str(), &s) != 0) throw std::system_error(errno, std::generic_category(), path);
  return static_cast<uint64_t>(s.st_size);
}

// A view of sorted or unsorted items in memory: fixed records, or lines with their newline.
struct Cursor {
  const unsigned char* at;
  const unsigned char* end;
  bool lines;
  size_t length() const {
    if (!lines) return std::min<size_t>(sizeof(Record), static_cast<size_t>(end - at));
    const void* newline = memchr(at, '\n', static_cast<size_t>(end - at));
    return newline == nullptr ? static_cast<size_t>(end - at)
                              : static_cast<size_t>(static_cast<const unsigned char*>(newline) - at) + 1;
  }
};

// Compares without the newline, so that the last line of a file may lack one.
int compare(const unsigned char* a, size_t n, const unsigned char* b, size_t m) {
  const int c = memcmp(a, b, std::min(n, m));
  return c != 0 ? c : n < m ? -1 : n > m ? 1 : 0;
}

size_t key_length(const unsigned char* p, size_t n) {
  return n != 0 && p[n - 1] == '\n' ? n - 1 : n;
}

void sort_lines(const unsigned char* from, unsigned char* to, size_t size) {
  struct Line {
    const unsigned char* text;
    size_t length;
  };
  std::vector<Line> index;
  for (Cursor c{from, from + size, true}; c.at < c.end;) {
    const size_t n = c.length();
    index.push_back({c.at, key_length(c.at, n)});
    c.at += n;
  }
  std::sort(index.begin(), index.end(),
            [](const Line& a, const Line& b) { return compare(a.text, a.length, b.text, b.length) < 0; });
  for (size_t i = 0; i < index.size(); ++i) {
    memcpy(to, index[i].text, index[i].length);
    to += index[i].length;
    if (i + 1 < index.size() || from[size - 1] == '\n') *to++ = '\n';
  }
}

struct Run {
  size_t offset, size;
};

// Cuts [0, size) into runs that end with whole items. A file whose last line lacks its newline keeps lacking it.
std::vector<Run> cut(const unsigned char* data, size_t size, size_t target, bool lines) {
  std::vector<Run> runs;
  for (size_t at = 0; at < size;) {
    size_t n = std::min(target, size - at);
    if (at + n < size) {
      if (!lines) {
        n -= n % sizeof(Record);
      } else {
        const void* newline = memchr(data + at + n, '\n', size - at - n);
        n = newline == nullptr ? size - at
                               : static_cast<size_t>(static_cast<const unsigned char*>(newline) - (data + at)) + 1;
      }
    }
    runs.push_back({at, n});
    at += n;
  }
  return runs;
}

void sort_runs(const vmem::region& input, const vmem::region& sorted, const std::vector<Run>& runs, const Settings& s,
               uint64_t* checksum) {
  const auto* in = static_cast<const unsigned char*>(input.data());
  auto* out = static_cast<unsigned char*>(sorted.data());
  Progress progress("sorting", input.size());
  std::atomic<size_t> next{0};
  std::atomic<uint64_t> sum{0};
  const auto work = [&] {
    for (size_t i; (i = next.fetch_add(1)) < runs.size();) {
      const Run& run = runs[i];
      if (i + s.threads < runs.size()) {
        const Run& ahead = runs[i + s.threads];
        vmem::check(vmem_prefetch(in + ahead.offset, ahead.size, VMEM_HOST, nullptr));
      }
      uint64_t local = 0;
      for (Cursor c{in + run.offset, in + run.offset + run.size, s.lines}; c.at < c.end;) {
        const size_t n = c.length();
        local += hash(c.at, s.lines ? key_length(c.at, n) : n);
        if (!s.lines) memcpy(out + (c.at - in), c.at, n);
        c.at += n;
      }
      sum += local;
      if (s.lines) {
        sort_lines(in + run.offset, out + run.offset, run.size);
      } else {
        auto* first = reinterpret_cast<Record*>(out + run.offset);
        std::sort(first, first + run.size / sizeof(Record));
      }
      vmem::check(vmem_advise(in + run.offset, run.size, VMEM_ADVISE_COLD, 0));
      vmem::check(vmem_prefetch(out + run.offset, run.size, VMEM_SSD, nullptr));
      progress.add(run.size);
    }
  };
  std::vector<std::thread> threads;
  for (unsigned t = 1; t < s.threads; ++t) threads.emplace_back(work);
  work();
  for (std::thread& t : threads) t.join();
  *checksum = sum;
}

void merge(const vmem::region& sorted, const vmem::region& output, const std::vector<Run>& runs, bool lines,
           uint64_t budget) {
  struct Head {
    Cursor cursor;
    size_t length, key;
    const unsigned char* fetched;  // prefetch was asked up to here
    const unsigned char* done;     // dropped up to here
  };
  const auto* data = static_cast<const unsigned char*>(sorted.data());
  // Each run reads ahead by a share of an eighth of the budget: what is read, being read and being written stay
  // together.
  const size_t ahead = std::clamp<size_t>(budget / 8 / std::max<size_t>(runs.size(), 1), 1 << 20, 32 << 20);
  std::vector<Head> heads;
  for (const Run& run : runs) {
    Head h{{data + run.offset, data + run.offset + run.size, lines}, 0, 0, data + run.offset, data + run.offset};
    heads.push_back(h);
  }
  const auto load = [&](Head& h) {
    if (h.cursor.at + ahead / 2 >= h.fetched && h.fetched < h.cursor.end) {
      const size_t n = std::min<size_t>(ahead, static_cast<size_t>(h.cursor.end - h.fetched));
      vmem::check(vmem_prefetch(h.fetched, n, VMEM_HOST, nullptr));
      h.fetched += n;
      if (h.cursor.at > h.done) {  // what has been merged is of no more use
        vmem::check(vmem_advise(h.done, static_cast<size_t>(h.cursor.at - h.done), VMEM_ADVISE_DONT_NEED, 0));
        h.done = h.cursor.at;
      }
    }
    h.length = h.cursor.length();
    h.key = lines ? key_length(h.cursor.at, h.length) : h.length;
  };
  const auto later = [&](size_t a, size_t b) {
    const int c = compare(heads[a].cursor.at, heads[a].key, heads[b].cursor.at, heads[b].key);
    return c != 0 ? c > 0 : a > b;
  };
  std::priority_queue<size_t, std::vector<size_t>, decltype(later)> queue(later);
  for (size_t i = 0; i < heads.size(); ++i) {
    load(heads[i]);
    queue.push(i);
  }
  auto* to = static_cast<unsigned char*>(output.data());
  unsigned char* const end = to + output.size();
  Progress progress("merging", output.size());
  size_t unreported = 0;
  while (!queue.empty()) {
    const size_t i = queue.top();
    queue.pop();
    Head& h = heads[i];
    memcpy(to, h.cursor.at, h.key);
    to += h.key;
    if (lines && to < end) *to++ = '\n';
    unreported += h.length;
    if (unreported > 4 << 20) {
      progress.add(unreported);
      unreported = 0;
    }
    h.cursor.at += h.length;
    if (h.cursor.at < h.cursor.end) {
      load(h);
      queue.push(i);
    }
  }
}

bool verify(const vmem::region& output, bool lines, uint64_t checksum) {
  const auto* data = static_cast<const unsigned char*>(output.data());
  Progress progress("verifying", output.size());
  uint64_t sum = 0;
  const unsigned char* before = nullptr;
  size_t before_key = 0, unreported = 0;
  for (Cursor c{data, data + output.size(), lines}; c.at < c.end;) {
    const size_t n = c.length(), key = lines ? key_length(c.at, n) : n;
    if (before != nullptr && compare(before, before_key, c.at, key) > 0) {
      fprintf(stderr, "out of order at byte %zu\n", static_cast<size_t>(c.at - data));
      return false;
    }
    sum += hash(c.at, key);
    before = c.at;
    before_key = key;
    c.at += n;
    unreported += n;
    if (unreported > 4 << 20) {
      progress.add(unreported);
      unreported = 0;
    }
  }
  if (sum != checksum) fprintf(stderr, "the records of the output are not those of the input\n");
  return sum == checksum;
}

int run(Settings s) {
  const bool made = s.input.empty();
  const char* tmp = getenv("TMPDIR");
  const std::string folder = tmp != nullptr ? tmp : "/var/tmp";
  if (made) {
    s.input = folder + "/vmem-sort." + std::to_string(getpid()) + ".in";
    s.make -= s.make % sizeof(Record);
    if (const std::string e = rawdisk::fill(s.input, s.make, 1); !e.empty())
      throw std::runtime_error(s.input + ": " + e);
  }
  if (s.output.empty()) s.output = made ? s.input + ".sorted" : s.input + ".sorted";
  const uint64_t size = file_size(s.input);
  if (size == 0) throw std::runtime_error(s.input + " is empty: nothing to sort");
  if (!s.lines && size % sizeof(Record) != 0) s.lines = true;

  if (s.budget.empty()) s.budget = std::to_string(std::max<uint64_t>(size / 4, 64 << 20));
  vmem::set("host_budget", s.budget);
  const uint64_t memory = std::stoull(vmem::get("host_budget"));
  // Each thread sorts a run in memory, and the merge holds a few blocks of every run: both must fit.
  s.threads = static_cast<unsigned>(std::clamp<uint64_t>(memory / (64 << 20), 1, s.threads));
  uint64_t block = 2 << 20;
  while (block > (64 << 10) && 24 * s.threads * 4 * block > memory) block /= 2;
  vmem::set("block_size", std::to_string(block));
  vmem::check(vmem_init());
  const uint64_t budget = std::stoull(vmem::get("host_budget"));
  printf("vmem-sort: %s, %.2f GB of %s, memory budget %.2f GB (1/%.1f), %u threads\n", s.input.c_str(),
         static_cast<double>(size) / 1e9, s.lines ? "lines" : "64-byte records", static_cast<double>(budget) / 1e9,
         static_cast<double>(size) / static_cast<double>(budget), s.threads);
  fflush(stdout);

  // The limit: raw io_uring on the same file, in the same run.
  rawdisk::Plan plan;
  plan.span = plan.total = std::min<uint64_t>(size, uint64_t{2} << 30) / plan.block * plan.block;
  rawdisk::Result raw;
  if (plan.span != 0) raw = rawdisk::run(s.input, plan);

  if (FILE* f = fopen(s.output.c_str(), "we"); f != nullptr) {
    const int rc = ftruncate(fileno(f), static_cast<off_t>(size));
    fclose(f);
    if (rc != 0) throw std::system_error(errno, std::generic_category(), s.output);
  } else {
    throw std::system_error(errno, std::generic_category(), s.output);
  }
  const double start = now();
  uint64_t checksum = 0;
  bool good;
  double sorted_at, merged_at;
  {
    vmem::region input(size, s.input, 0, VMEM_MAP_READ | VMEM_HOST_ONLY);
    input.name("input");
    vmem::region sorted(size, VMEM_HOST_ONLY);
    sorted.name("runs");
    const auto runs = cut(static_cast<const unsigned char*>(input.data()), size,
                          std::max<uint64_t>(budget / (6 * s.threads), 1 << 20), s.lines);
    sort_runs(input, sorted, runs, s, &checksum);
    sorted_at = now();
    input.free();
    vmem::region output(size, s.output, 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY);
    output.name("output");
    merge(sorted, output, runs, s.lines, budget);
    sorted.free();
    output.sync();
    merged_at = now();
    output.advise(VMEM_ADVISE_SEQUENTIAL);
    good = verify(output, s.lines, checksum);
    output.free();
  }
  const double end = now();
  const struct vmem_stats v = vmem::stats();
  const double moved = static_cast<double>(v.read_bytes + v.write_bytes) / 1e9;
  const double gbs = moved / (end - start);
  const double touched = static_cast<double>(v.faults + v.prefetched_blocks);
  printf("\n| what | figure |\n|---|---|\n");
  printf("| sort runs / merge / verify | %.1f / %.1f / %.1f s |\n", sorted_at - start, merged_at - sorted_at,
         end - merged_at);
  printf("| total | %.1f s, %.2f GB/s of input |\n", end - start, static_cast<double>(size) / 1e9 / (end - start));
  printf("| SSD read / written | %.2f / %.2f GB |\n", static_cast<double>(v.read_bytes) / 1e9,
         static_cast<double>(v.write_bytes) / 1e9);
  printf("| faults (mean, longest) | %llu (%.0f us, %.1f ms) |\n", static_cast<unsigned long long>(v.faults),
         v.faults != 0 ? static_cast<double>(v.fault_ns_total) / 1e3 / static_cast<double>(v.faults) : 0,
         static_cast<double>(v.fault_ns_max) / 1e6);
  printf("| blocks read before they were asked for | %.1f %% (%llu used, %llu wasted) |\n",
         touched != 0 ? 100 * static_cast<double>(v.prefetched_blocks) / touched : 0,
         static_cast<unsigned long long>(v.prefetch_hits), static_cast<unsigned long long>(v.prefetch_wasted));
  printf("| evictions | %llu, %llu of them without a write |\n", static_cast<unsigned long long>(v.evictions),
         static_cast<unsigned long long>(v.clean_drops));
  printf("| disk traffic | %.2f GB/s |\n", gbs);
  if (raw.error.empty() && raw.read_gbs > 0) {
    printf("| raw limit in this run (io_uring, huge pages, reads) | %.2f GB/s: traffic is %.2f of it |\n", raw.read_gbs,
           gbs / raw.read_gbs);
  }
  printf("| result | %s |\n", good ? "sorted, every record accounted for" : "WRONG");
  if (made && !s.keep) {
    unlink(s.input.c_str());
    unlink(s.output.c_str());
  }
  return good ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Sorts a file larger than memory. Without a file it makes one of random 64-byte records."};
  Settings s;
  app.add_option("file", s.input, "file to sort; its size decides: a multiple of 64 bytes is records, else lines");
  app.add_option("-o,--output", s.output, "sorted file (default: FILE.sorted)");
  app.add_option("--make", s.make, "bytes to make when no file is given")->transform(CLI::AsSizeValue(false));
  app.add_option("--budget", s.budget, "memory libvmem may use (default: a quarter of the file, at least 64 MiB)");
  app.add_option("--threads", s.threads, "threads that sort runs")->check(CLI::Range(1, 256));
  app.add_flag("--lines", s.lines, "sort lines of text");
  app.add_flag("--keep", s.keep, "keep the files that were made");
  CLI11_PARSE(app, argc, argv);
  try {
    return run(s);
  } catch (const std::exception& e) {
    fprintf(stderr, "vmem-sort: %s\n", e.what());
    return 1;
  }
}
