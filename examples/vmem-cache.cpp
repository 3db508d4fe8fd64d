// vmem-cache: a key-value cache four times larger than the memory it may use. Values live in a vmem::pool; those that
// were not asked for lately go to the SSD by themselves. What does not fit into the pool either is dropped, the least
// recently used first.
//
// A hit is a look into a hash table and a pointer: no system call, unless the value is on the SSD and a touch of it
// traps. The rest of the program asks for keys of which few are popular, and verifies every value it gets.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <list>
#include <random>
#include <stdexcept>
#include <unordered_map>
#include <vector>

#include "vmem/pool.hpp"

namespace {

constexpr uint64_t kLargest = 8 << 10;  // value
using Value = std::span<uint64_t>;

struct Settings {
  uint64_t capacity = 256 << 20, budget = 0, keys = 200000, gets = 200000;
  bool spoil = false;
};

// For one thread; several would share a pool, and have a cache for each part of the keys.
class Cache {
 public:
  explicit Cache(uint64_t capacity)
      : pool_({.region_bytes = std::min<uint64_t>(capacity, 64 << 20),
               .limit_bytes = capacity,
               .flags = VMEM_HOST_ONLY,
               .name = "cache"}) {}
  // The value, until the next put(); empty: it is not there.
  Value get(uint64_t key) {
    const auto found = entries_.find(key);
    if (found == entries_.end()) return {};
    order_.splice(order_.begin(), order_, found->second.used);
    return found->second.value;
  }
  // Room for the value of a key that is not there. Drops others until there is some.
  Value put(uint64_t key, size_t size) {
    for (;;) {
      try {
        const Value value(static_cast<uint64_t*>(pool_.allocate(size)), size / 8);
        order_.push_front(key);
        entries_[key] = {value, order_.begin()};
        return value;
      } catch (const vmem::pool_error&) {
        if (entries_.empty()) throw;  // larger than the cache
        drop();
      }
    }
  }
  vmem::pool_stats memory() const { return pool_.stats(); }

 private:
  struct Entry {
    Value value;
    std::list<uint64_t>::iterator used;
  };
  void drop() {
    const auto last = entries_.find(order_.back());
    pool_.deallocate(last->second.value.data(), last->second.value.size_bytes());
    entries_.erase(last);
    order_.pop_back();
  }
  vmem::pool pool_;
  std::list<uint64_t> order_;  // of use, the latest first
  std::unordered_map<uint64_t, Entry> entries_;
};

// Values as a database would give them: a size, a multiple of 8, and words that follow from the key.
struct Database {
  static uint64_t word(uint64_t key, uint64_t i) { return (key + 1) * 0x9e3779b97f4a7c15u ^ (i * 0xbf58476d1ce4e5b9u); }
  static size_t size(uint64_t key) { return 8 + (word(key, 1) >> 20) % (kLargest / 8) * 8; }
  static void read(uint64_t key, Value to) {
    for (size_t i = 0; i < to.size(); ++i) to[i] = word(key, i);
  }
  static bool equal(uint64_t key, Value value) {
    uint64_t wrong = value.size_bytes() ^ size(key);
    for (size_t i = 0; i < value.size(); ++i) wrong |= value[i] ^ word(key, i);
    return wrong == 0;
  }
};

int run(Settings s) {
  if (s.budget == 0) s.budget = std::max<uint64_t>(s.capacity / 4, 8 << 20);
  vmem::set("host_budget", std::to_string(s.budget));
  vmem::set("block_size", std::to_string(2 * kLargest));
  vmem::set("readahead", "0");  // the next value is anybody's guess
  Cache cache(s.capacity);
  std::mt19937_64 random(1);
  std::vector<float> latencies;  // of hits, in us
  uint64_t wrong = 0;
  const struct vmem_stats before = vmem::stats();
  for (uint64_t n = 0; n < s.gets; ++n) {
    // Zipf's law: a key is asked for as often as one over its rank.
    const auto key = static_cast<uint64_t>(std::pow(s.keys, 0x1p-64 * static_cast<double>(random())));
    const auto start = std::chrono::steady_clock::now();
    if (const auto value = cache.get(key); !value.empty()) {
      if (s.spoil && n > s.gets / 2) value[0] ^= 1, s.spoil = false;
      wrong += !Database::equal(key, value);
      latencies.push_back(std::chrono::duration<float, std::micro>(std::chrono::steady_clock::now() - start).count());
    } else {
      Database::read(key, cache.put(key, Database::size(key)));
    }
  }
  const struct vmem_stats after = vmem::stats();
  if (latencies.empty()) throw std::runtime_error("no key was asked for twice: give more --gets");
  const auto hits = static_cast<double>(latencies.size());
  std::sort(latencies.begin(), latencies.end());
  const auto at = [&](double share) { return latencies[static_cast<size_t>(share * (hits - 1))]; };
  const double waits = static_cast<double>((after.faults - after.soft_faults) - (before.faults - before.soft_faults));
  printf("vmem-cache: %zu values in %.1f MB, memory budget %.1f MB, %.1f MB read from the SSD\n",
         cache.memory().allocations, 1e-6 * static_cast<double>(cache.memory().in_use_bytes),
         1e-6 * static_cast<double>(s.budget), 1e-6 * static_cast<double>(after.read_bytes - before.read_bytes));
  printf("vmem-cache: %zu gets, %.1f %% hits, %.1f %% waited for the SSD\n", s.gets,
         100 * hits / static_cast<double>(s.gets), 100 * waits / static_cast<double>(s.gets));
  printf("vmem-cache: hits and their verification: %.1f us at the median, %.1f at 99 %%\n", at(0.5), at(0.99));
  printf("vmem-cache: %s: %zu values of %zu were not what was put in\n", wrong == 0 ? "right" : "WRONG", wrong,
         latencies.size());
  return wrong == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"A key-value cache whose values are larger than the memory it may use: they go to the SSD."};
  Settings s;
  app.add_option("--capacity", s.capacity, "bytes of values (256MiB)")->transform(CLI::AsSizeValue(false));
  app.add_option("--budget", s.budget, "host memory (default: a quarter of it)")->transform(CLI::AsSizeValue(false));
  app.add_option("--keys", s.keys, "different keys (200000)")->check(CLI::Range(uint64_t{2}, uint64_t{1} << 40));
  app.add_option("--gets", s.gets, "keys asked for (200000)")->check(CLI::Range(uint64_t{1}, uint64_t{1} << 40));
  app.add_flag("--spoil", s.spoil, "change a value before it is verified: exit code 1");
  CLI11_PARSE(app, argc, argv);
  try {
    return run(s);
  } catch (const std::exception& e) {
    fprintf(stderr, "vmem-cache: %s\n", e.what());
    return 1;
  }
}
