// vmem-cache: a key-value cache four times larger than the memory it may use. Values live in a
// vmem::pool, and values not used lately go to the SSD automatically. When the pool is full, the
// cache drops the least recently used values.
//
// A hit is a lookup in a hash table and a pointer: no system call, unless the value is on the SSD
// and the access traps. The rest of the program asks for keys, of which few are popular, or for
// those of a list, and verifies every value. Values come from a text, "key, tab, value" a line, or
// are generated.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <list>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <unordered_map>
#include <vector>

#include "common/command_line.h"
#include "common/input.h"
#include "common/lines.h"
#include "common/pairs.h"
#include "common/progress.h"
#include "core/text.h"
#include "vmem/pool.hpp"

namespace {

constexpr uint64_t kLargest = 8 << 10;  // value
constexpr uint64_t kRegion = 2 << 20;   // sizes of pools are multiples of this
using Value = std::span<uint64_t>;

struct Settings {
  std::string file, ask;
  uint64_t capacity = 256 << 20, budget = 0, keys = 200000, gets = 200000;
  bool spoil = false;
};

// For one thread. Several threads would share a pool and have a cache for each part of the keys.
class Cache {
 public:
  explicit Cache(uint64_t capacity)
      : capacity_(capacity / kRegion * kRegion),
        pool_({.region_bytes = std::min<uint64_t>(capacity, 64 << 20),
               .limit_bytes = capacity,
               .flags = VMEM_HOST_ONLY,
               .name = "cache",
               .block_size = 2 * kLargest}) {}
  // Returns the value, valid until the next put(); empty if the key is absent.
  Value get(uint64_t key) {
    const auto found = entries_.find(key);
    if (found == entries_.end()) return {};
    order_.splice(order_.begin(), order_, found->second.used);
    return found->second.value;
  }
  // Returns space for the value of an absent key. Drops other values until there is space.
  Value put(uint64_t key, size_t size) {
    for (;;) {
      try {
        const Value value(static_cast<uint64_t*>(pool_.allocate(size)), size / 8);
        order_.push_front(key);
        entries_[key] = {value, order_.begin()};
        return value;
      } catch (const vmem::pool_error&) {
        if (entries_.empty() && size > capacity_)
          throw input::Refused("a value of " + std::to_string(size) + " bytes is larger than --capacity");
        if (entries_.empty()) throw;
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
  uint64_t capacity_;
  vmem::pool pool_;
  std::list<uint64_t> order_;  // most recently used first
  std::unordered_map<uint64_t, Entry> entries_;
};

// The source of values. Their sizes are multiples of 8.
class Database {
 public:
  virtual ~Database() = default;
  virtual uint64_t keys() const = 0;
  virtual size_t size(uint64_t key) const = 0;
  virtual void read(uint64_t key, Value to) const = 0;
  virtual bool equal(uint64_t key, Value value) const = 0;
};

// Generates words from the key.
class MadeDatabase final : public Database {
 public:
  explicit MadeDatabase(uint64_t keys) : keys_(keys) {}
  uint64_t keys() const override { return keys_; }
  size_t size(uint64_t key) const override { return 8 + (word(key, 1) >> 20) % (kLargest / 8) * 8; }
  void read(uint64_t key, Value to) const override {
    for (size_t i = 0; i < to.size(); ++i) to[i] = word(key, i);
  }
  bool equal(uint64_t key, Value value) const override {
    uint64_t wrong = value.size_bytes() ^ size(key);
    for (size_t i = 0; i < value.size(); ++i) wrong |= value[i] ^ word(key, i);
    return wrong == 0;
  }

 private:
  static uint64_t word(uint64_t key, uint64_t i) { return (key + 1) * 0x9e3779b97f4a7c15u ^ (i * 0xbf58476d1ce4e5b9u); }
  uint64_t keys_;
};

// The lines of a text. Keeps in memory the names of the keys, and the place and hash of each value.
class TextDatabase final : public Database {
 public:
  // longest: the longest line in bytes.
  TextDatabase(const std::string& path, size_t longest) : file_(path) {
    const Progress progress("reading keys");
    pairs::read(file_, longest, [&](const std::string& key, std::string_view value, uint64_t at) {
      const auto [found, fresh] = names_.try_emplace(key, places_.size());
      if (fresh) places_.emplace_back();
      places_[found->second] = {at, value.size(), std::hash<std::string_view>()(value)};  // the last counts
    });
    if (places_.empty()) throw input::Refused(path + " has no keys");
  }
  uint64_t keys() const override { return places_.size(); }
  size_t size(uint64_t key) const override { return (places_[key].size + 8) / 8 * 8; }
  void read(uint64_t key, Value to) const override {
    const Place& place = places_[key];
    plain_.resize(place.size);
    file_.read(plain_.data(), place.size, place.at);
    to.back() = 0;
    memcpy(to.data(), plain_.data(), place.size);
  }
  bool equal(uint64_t key, Value value) const override {
    const std::string_view text(reinterpret_cast<const char*>(value.data()), places_[key].size);
    return std::hash<std::string_view>()(text) == places_[key].hash;
  }
  // Returns keys() if there is no such name.
  uint64_t find(const std::string& name) const {
    const auto found = names_.find(name);
    return found == names_.end() ? keys() : found->second;
  }

 private:
  struct Place {
    uint64_t at, size, hash;
  };
  input::File file_;
  mutable std::string plain_;  // read into plain memory: a system call must not wait for a block of the pool
  std::vector<Place> places_;
  std::unordered_map<std::string, uint64_t> names_;
};

// A key, and a value that fits into the cache.
size_t longest_line(const Settings& s) {
  return s.capacity + (uint64_t{1} << 20);
}

// Returns the keys to ask for, in order.
std::vector<uint64_t> questions(const Settings& s, const Database& database) {
  std::vector<uint64_t> keys;
  if (s.ask.empty()) {
    std::mt19937_64 random(1);
    // Zipf's law: the probability of a key is proportional to one over its rank.
    for (uint64_t n = 0; n < s.gets; ++n) {
      const auto rank = std::pow(static_cast<double>(database.keys()), 0x1p-64 * static_cast<double>(random()));
      keys.push_back(std::min(static_cast<uint64_t>(rank), database.keys()) - 1);
    }
    return keys;
  }
  Lines list(s.ask, longest_line(s));
  uint64_t unknown = 0;
  for (std::string name; list.next(&name);) {
    const uint64_t key = static_cast<const TextDatabase&>(database).find(std::string(without_cr(name)));
    if (key < database.keys()) {
      keys.push_back(key);
    } else {
      ++unknown;
    }
  }
  if (unknown != 0)
    printf("vmem-cache: %zu keys of %s are not in %s\n", unknown, vmem::core::printable(s.ask).c_str(),
           vmem::core::printable(s.file).c_str());
  return keys;
}

int run(Settings s) {
  if (s.budget == 0) s.budget = std::max<uint64_t>(s.capacity / 4, 8 << 20);
  vmem::set("host_budget", std::to_string(s.budget));
  vmem::set("readahead", "0");  // the next value cannot be predicted
  std::unique_ptr<Database> database;
  if (s.file.empty()) {
    if (!s.ask.empty()) throw input::Refused("--ask needs a file with keys and values");
    database = std::make_unique<MadeDatabase>(s.keys);
  } else {
    database = std::make_unique<TextDatabase>(s.file, longest_line(s));
  }
  const std::vector<uint64_t> keys = questions(s, *database);
  Cache cache(s.capacity);
  std::vector<float> latencies;  // of hits, in us
  uint64_t wrong = 0;
  const struct vmem_stats before = vmem::stats();
  for (size_t n = 0; n < keys.size(); ++n) {
    const uint64_t key = keys[n];
    const auto start = std::chrono::steady_clock::now();
    if (const auto value = cache.get(key); !value.empty()) {
      if (s.spoil && n > keys.size() / 2) value[0] ^= 1, s.spoil = false;
      wrong += !database->equal(key, value);
      latencies.push_back(std::chrono::duration<float, std::micro>(std::chrono::steady_clock::now() - start).count());
    } else {
      database->read(key, cache.put(key, database->size(key)));
    }
  }
  const struct vmem_stats after = vmem::stats();
  if (latencies.empty()) throw input::Refused("no key was asked for twice: ask for more");
  const auto hits = static_cast<double>(latencies.size());
  std::sort(latencies.begin(), latencies.end());
  const auto at = [&](double share) { return latencies[static_cast<size_t>(share * (hits - 1))]; };
  const double waits = static_cast<double>((after.faults - after.soft_faults) - (before.faults - before.soft_faults));
  printf("vmem-cache: %zu values in %.1f MB, memory budget %.1f MB, %.1f MB read from the SSD\n",
         cache.memory().allocations, 1e-6 * static_cast<double>(cache.memory().in_use_bytes),
         1e-6 * static_cast<double>(s.budget), 1e-6 * static_cast<double>(after.read_bytes - before.read_bytes));
  printf("vmem-cache: %zu gets, %.1f %% hits, %.1f %% waited for the SSD\n", keys.size(),
         100 * hits / static_cast<double>(keys.size()), 100 * waits / static_cast<double>(keys.size()));
  printf("vmem-cache: hits and their verification: %.1f us at the median, %.1f at 99 %%\n", at(0.5), at(0.99));
  printf("vmem-cache: verified: %zu mismatches in %zu values\n", wrong, latencies.size());
  return wrong == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"A key-value cache whose values are larger than the memory it may use: they go to the SSD."};
  Settings s;
  app.add_option("file", s.file, "text with \"key, tab, value\" in each line; without it values are made");
  app.add_option("--ask", s.ask, "keys to ask for, one a line (default: --gets of them, few of them popular)");
  app.add_option("--capacity", s.capacity, "bytes of values (256MiB)")->transform(size_from(kRegion));
  app.add_option("--budget", s.budget, "host memory (default: a quarter of it)")
      ->transform(size_of(vmem::core::Option::host_budget));
  app.add_option("--keys", s.keys, "different keys, where values are made (200000)")
      ->check(CLI::Range(uint64_t{2}, uint64_t{1} << 40));
  app.add_option("--gets", s.gets, "keys asked for (200000); 12 bytes of memory each")
      ->check(CLI::Range(uint64_t{1}, uint64_t{1} << 30));
  app.add_flag("--spoil", s.spoil, "change a value before it is verified: exit code 1");
  return run_program(app, "vmem-cache", argc, argv, [&] { return run(s); });
}
