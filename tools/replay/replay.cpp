// vmem-replay: replays a trace against each eviction policy and read-ahead.
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>

#include "common/command_line.h"
#include "core/text.h"
#include "replay/simulate.h"

namespace {

using namespace vmem;
using core::printable;
using replay::Trace;

constexpr char kMagic[] = "VMEMTRC1";

bool read_text(std::istream& in, Trace* trace, std::string* why) {
  std::string line;
  for (uint64_t number = 1; std::getline(in, line); ++number) {
    if (line.empty() || line[0] == '#') continue;
    char* end = nullptr;
    const uint64_t block = strtoull(line.c_str(), &end, 10);
    while (*end == ' ' || *end == '\t') ++end;
    const bool known = *end == '\0' || *end == '\r' || ((*end == 'r' || *end == 'w') && end[1] <= ' ');
    if (end == line.c_str() || line[0] == '-' || !known) {
      *why = "line " + std::to_string(number) + " is not 'block [r|w]': " + line.substr(0, 80);
      return false;
    }
    trace->push_back({block, *end == 'w'});
  }
  return true;
}

bool read_trace(const std::string& path, Trace* trace, std::string* why) {
  if (path == "-") return read_text(std::cin, trace, why);
  std::ifstream in(path, std::ios::binary);
  char magic[8] = {};
  if (!in) {
    *why = strerror(errno);
    return false;
  }
  in.read(magic, sizeof magic);
  if (in.gcount() != sizeof magic || memcmp(magic, kMagic, sizeof magic) != 0) {
    in.clear();
    in.seekg(0);
    return read_text(in, trace, why);
  }
  unsigned char entry[8];
  while (in.read(reinterpret_cast<char*>(entry), sizeof entry)) {
    uint64_t value = 0;
    for (int i = 7; i >= 0; --i) value = value << 8 | entry[i];
    trace->push_back({value >> 1, (value & 1) != 0});
  }
  if (in.gcount() == 0) return true;
  *why = "it ends inside an access";
  return false;
}

bool write_trace(const std::string& path, const Trace& trace, bool binary) {
  std::ofstream out(path, std::ios::binary);
  if (binary) out.write(kMagic, 8);
  for (const replay::Touch& t : trace) {
    if (!binary) {
      out << t.block << (t.write ? " w\n" : " r\n");
      continue;
    }
    char entry[8];
    for (int i = 0; i < 8; ++i) entry[i] = static_cast<char>((t.block << 1 | t.write) >> (8 * i));
    out.write(entry, sizeof entry);
  }
  return static_cast<bool>(out.flush());
}

// A trace may use block numbers of a whole address space: renumber them densely, in address order.
void make_dense(Trace* trace) {
  if (replay::blocks_of(*trace) <= 16 * trace->size() + 4096) return;
  std::vector<uint64_t> names;
  for (const auto& t : *trace) names.push_back(t.block);
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  for (auto& t : *trace) {
    t.block = static_cast<uint64_t>(std::lower_bound(names.begin(), names.end(), t.block) - names.begin());
  }
}

double percent(uint64_t part, uint64_t whole) {
  return whole == 0 ? 0 : 100.0 * static_cast<double>(part) / static_cast<double>(whole);
}

int run(int argc, char** argv) {
  CLI::App app(
      "Replays a trace of accesses of blocks, or a generated one, through every eviction policy and the read-ahead.");
  std::string file, save;
  replay::Pattern pattern;
  std::vector<double> fractions = {0.1, 0.25, 0.5};
  uint64_t block_kib = 2048, warmup = 0, batch = 1;
  uint32_t window = 32;
  bool no_probes = false, binary = false, no_yardsticks = false;
  app.add_option("trace", file, "Trace file, text or binary; - reads text from standard input");
  app.add_option("--pattern", pattern.name,
                 "Generate: all, or one of seq, cyclic, uniform, zipf, scan, mixed, phase, "
                 "stride, two-tenants, rewrite, merge, loops");
  app.add_option("--blocks", pattern.blocks, "Generated: blocks of data")->check(CLI::Range(2, 1 << 26));
  app.add_option("--length", pattern.length, "Generated: accesses")->check(CLI::Range(1, 1 << 28));
  app.add_option("--seed", pattern.seed, "Generated: seed");
  app.add_option("--skew", pattern.skew, "Generated: exponent of zipf")->check(between(0, 100));
  app.add_option("--hot", pattern.hot,
                 "Generated: blocks of the hot set (scan, mixed) or of a phase; default 1/8 of all");
  app.add_option("--stride", pattern.stride, "Generated: blocks")->check(CLI::Range(1, 1 << 20));
  app.add_option("--budget", fractions, "Memory as fractions of the data")->delimiter(',')->check(between(1e-6, 1));
  app.add_option("--block-kib", block_kib, "Size of a block")->check(CLI::Range(4, 32768));
  app.add_option("--batch", batch, "Blocks evicted at a time")->check(CLI::Range(1, 4096));
  app.add_option("--warmup", warmup, "Touches not counted at the start");
  app.add_option("--window", window, "Largest read-ahead window, blocks; 0: off");
  app.add_flag("--no-probes", no_probes, "As for small blocks that are copied");
  app.add_flag("--no-yardsticks", no_yardsticks, "Leave out lru*, sieve* and opt*, which see what no pager can see");
  app.add_option("--save", save, "Write the trace to this file");
  app.add_flag("--binary", binary, "Write it in the binary format");
  if (const auto status = command_line(app, "vmem-replay", argc, argv)) return *status;

  std::vector<std::string> names = {pattern.name};
  if (!file.empty()) {
    names = {file};
  } else if (pattern.name == "all") {
    names = replay::pattern_names();
  }
  printf("%-12s %6s %-10s %7s %9s %9s %7s %8s %8s\n", "trace", "budget", "policy", "hit %", "misses", "probes",
         "soft %", "ahead %", "waste %");
  for (const std::string& name : names) {
    Trace trace;
    std::string why;
    if (file.empty()) {
      pattern.name = name;
      trace = replay::generate(pattern);
      why = "unknown pattern, or of length 0";
    } else if (!read_trace(file, &trace, &why)) {
      throw input::Refused(why.insert(0, file + ": "));
    }
    if (trace.empty()) throw input::Refused(name + ": no accesses: " + (why.empty() ? "empty trace" : why));
    if (!save.empty() && !write_trace(save, trace, binary))
      throw std::runtime_error(save + " could not be written: " + strerror(errno));
    make_dense(&trace);
    const uint64_t blocks = replay::blocks_of(trace);
    for (const double fraction : fractions) {
      replay::Setup setup;
      setup.capacity = std::max<uint64_t>(1, static_cast<uint64_t>(static_cast<double>(blocks) * fraction));
      setup.weight = static_cast<uint32_t>(block_kib / 4);
      setup.probes = !no_probes;
      setup.batch = batch;
      auto print = [&](const replay::Result& r, const replay::Result* ahead) {
        printf("%-12.12s %6.3g %-10s %7.2f %9" PRIu64 " %9" PRIu64 " %7.2f", printable(name).c_str(), fraction,
               r.policy.c_str(), 100 * r.hit_rate(), r.misses, r.probes, percent(r.soft_faults, r.touches));
        if (ahead != nullptr) {
          printf(" %8.2f %8.2f", percent(ahead->covered, ahead->covered + ahead->misses),
                 percent(ahead->read_ahead - ahead->covered, ahead->read_ahead));
        }
        printf("\n");
      };
      for (const replay::MakePolicy policy : replay::kPolicies) {
        setup.make = policy;
        setup.window = 0;
        const replay::Result plain = replay::simulate(trace, setup, warmup);
        setup.window = window;
        const replay::Result ahead = replay::simulate(trace, setup, warmup);
        print(plain, window != 0 ? &ahead : nullptr);
      }
      if (no_yardsticks) continue;
      print(replay::simulate_lru(trace, setup.capacity, warmup), nullptr);
      print(replay::simulate_sieve(trace, setup.capacity, warmup), nullptr);
      print(replay::simulate_opt(trace, setup.capacity, warmup), nullptr);
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return run_to_end("vmem-replay", [&] { return run(argc, argv); });
}
