// Threads write, read, prefetch, evict, sync, lease, drop and free random ranges of several
// regions. A shadow copy checks every byte, and injected delays stretch every step of a transition.
// Exit 0: all bytes right.
//
// Locks of the test: a region is cut in cells of 64 KiB, and each cell has a mutex over its bytes
// and their shadow. A region is replaced only with its own lock held exclusively. libvmem never
// takes these locks, so a fault while one is held is fine.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <thread>
#include <vector>

#include "api/runtime.h"
#include "common.h"
#include "core/outside_lock.h"
#include "core/step.h"
#include "vmem/vmem.hpp"

namespace {

constexpr size_t kCell = 64 << 10;

struct Settings {
  double seconds = 10;
  unsigned threads = 8, regions = 4;
  uint64_t bytes = 48 << 20, seed = 1, operations = 0;
  std::string budget = "24MiB", transfer = "auto", engine = "auto", compression = "none";
  std::vector<std::string> blocks = {"4KiB", "64KiB", "2MiB"};
  bool delays = true;
};

struct Random {
  uint64_t state;
  uint64_t operator()() {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state;
  }
  uint64_t below(uint64_t n) { return operator()() % n; }
};

struct Shadowed {
  std::shared_mutex life;  // shared: the region exists; exclusive: it is being replaced
  void* memory = nullptr;
  size_t size = 0;
  std::vector<unsigned char> shadow;
  std::unique_ptr<std::mutex[]> cells;
};

std::atomic<uint64_t> operations{0}, failures{0};
std::atomic<bool> stop{false};

void fail(const char* what, const Shadowed& r, size_t at, int rc) {
  ++failures;
  fprintf(stderr, "FAILED: %s at byte %zu of region %p: rc %d (%s)\n", what, at, r.memory, rc, vmem_last_error());
  fflush(stderr);
  stop = true;
}

void expect_ok(int rc, const char* what, const Shadowed& r, size_t at) {
  if (rc != 0 && rc != -EBUSY && rc != -ENOMEM) fail(what, r, at, rc);
}

void make(Shadowed& r, const Settings& s, Random& random) {
  vmem_set("block_size", s.blocks[random.below(s.blocks.size())].c_str());
  r.size = s.bytes / s.regions + random.below(100000);
  const int rc = vmem_alloc(&r.memory, r.size, VMEM_HOST_ONLY);
  if (rc != 0) {
    fail("alloc", r, 0, rc);
    return;
  }
  r.shadow.assign(r.size, 0);
  r.cells = std::make_unique<std::mutex[]>(r.size / kCell + 1);
}

// Picks a random [at, at + n) inside one cell.
void piece(const Shadowed& r, Random& random, size_t* at, size_t* n) {
  *at = random.below(r.size);
  const size_t room = std::min(r.size, *at / kCell * kCell + kCell) - *at;
  *n = 1 + random.below(std::min<size_t>(room, random.below(4) == 0 ? kCell : 200));
}

void one(Shadowed& r, const Settings& s, Random& random, void* stream) {
  const uint64_t kind = random.below(1000);
  if (kind < 2) {
    std::unique_lock life(r.life);
    const int rc = vmem_free(r.memory);
    if (rc == -EBUSY) return;  // a lease outlived the lock; never in this test, but not a memory error
    if (rc != 0) {
      fail("free", r, 0, rc);
      return;
    }
    make(r, s, random);
    return;
  }
  std::shared_lock life(r.life);
  auto* bytes = static_cast<unsigned char*>(r.memory);
  size_t at, n;
  piece(r, random, &at, &n);
  if (kind < 420) {
    std::lock_guard cell(r.cells[at / kCell]);
    const uint64_t value = random();
    for (size_t i = 0; i < n; ++i) bytes[at + i] = r.shadow[at + i] = static_cast<unsigned char>(value >> (i % 8 * 8));
  } else if (kind < 860) {
    std::lock_guard cell(r.cells[at / kCell]);
    if (memcmp(bytes + at, r.shadow.data() + at, n) != 0) fail("bytes differ", r, at, 0);
  } else {
    // Mostly short: a long range of small blocks occupies a thread for a tenth of a second.
    const size_t from = random.below(r.size), most = random.below(8) == 0 ? 3 << 20 : 192 << 10;
    const size_t length = 1 + random.below(std::min<size_t>(r.size - from, most));
    if (kind < 890) {
      expect_ok(vmem_prefetch(bytes + from, length, VMEM_HOST, nullptr), "prefetch", r, from);
    } else if (kind < 910) {
      expect_ok(vmem_prefetch(bytes + from, length, VMEM_SSD, nullptr), "prefetch to the SSD", r, from);
    } else if (kind < 935) {
      expect_ok(vmem_evict(bytes + from, length, VMEM_SSD), "evict", r, from);
    } else if (kind < 950) {
      expect_ok(vmem_sync(bytes + from, length), "sync", r, from);
    } else if (kind < 980) {
      const size_t few = std::min<size_t>(length, 256 << 10);
      const unsigned access = VMEM_READ | (random.below(2) != 0 ? VMEM_WRITE : 0u);
      const int rc = vmem_acquire(bytes + from, few, access, VMEM_HOST, stream);
      expect_ok(rc, "acquire", r, from);
      if (rc == 0) {
        {
          const size_t m = std::min(few, kCell - from % kCell);
          std::lock_guard cell(r.cells[from / kCell]);
          if (memcmp(bytes + from, r.shadow.data() + from, m) != 0) fail("leased bytes differ", r, from, 0);
          if ((access & VMEM_WRITE) != 0) memset(bytes + from, 0x33, m), memset(r.shadow.data() + from, 0x33, m);
        }
        if (const int rel = vmem_release(bytes + from, few, stream); rel != 0) fail("release", r, from, rel);
      }
    } else if (kind < 992) {
      static const int kAdvice[] = {VMEM_ADVISE_SEQUENTIAL,   VMEM_ADVISE_RANDOM,       VMEM_ADVISE_NORMAL,
                                    VMEM_ADVISE_COLD,         VMEM_ADVISE_HOT,          VMEM_ADVISE_PIN,
                                    VMEM_ADVISE_PRIORITY_LOW, VMEM_ADVISE_PRIORITY_HIGH};
      const int rc = vmem_advise(bytes + from, length, kAdvice[random.below(std::size(kAdvice))], 0);
      if (rc != 0 && rc != -ENOSPC) fail("advise", r, from, rc);
    } else {
      // Dropping needs the locks of all cells of whole blocks: take them for a unit of the largest
      // block, in the order of addresses.
      constexpr size_t kUnit = 2 << 20;
      const size_t unit = random.below(r.size / kUnit + 1) * kUnit;
      const size_t m = std::min(r.size - unit, kUnit);
      if (m == 0) return;
      std::vector<std::unique_lock<std::mutex>> locks;
      for (size_t c = unit / kCell; c <= (unit + m - 1) / kCell; ++c) locks.emplace_back(r.cells[c]);
      const int rc = vmem_advise(bytes + unit, m, VMEM_ADVISE_DONT_NEED, 0);
      if (rc == 0) {
        memset(r.shadow.data() + unit, 0, m);
      } else if (rc == -EBUSY) {
        // Some blocks are leased and stay. Each byte must be zero (dropped) or the old one.
        for (size_t i = unit; i < unit + m; ++i) {
          if (bytes[i] != 0 && bytes[i] != r.shadow[i]) fail("dropped bytes differ", r, i, rc);
          r.shadow[i] = bytes[i];
        }
      } else {
        fail("dont-need", r, unit, rc);
      }
    }
  }
}

int run(const Settings& s) {
  vmem::set("host_budget", s.budget);
  vmem::set("transfer", s.transfer);
  vmem::set("io_engine", s.engine);
  vmem::set("compression", s.compression);
  vmem::set("evict_threads", "2");
  vmem::set("io_threads", "2");
  if (const int rc = vmem_init(); rc == -EPERM || rc == -ENOSYS || rc == -ENOTSUP) {
    printf("skipped: %s\n", vmem_last_error());
    return 77;
  } else if (rc != 0) {
    throw vmem::error(rc);
  }
  if (s.delays) vmem::core::step_hook.store(stress::delay);
  std::vector<Shadowed> regions(s.regions);
  Random first{s.seed * 0x9e3779b97f4a7c15u + 1};
  for (Shadowed& r : regions) make(r, s, first);
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < s.threads; ++t) {
    threads.emplace_back([&, t] {
      Random random{(s.seed + t + 1) * 0xbf58476d1ce4e5b9u + 7};
      int stream = 0;
      while (!stop) {
        one(regions[random.below(regions.size())], s, random, &stream);
        if (operations.fetch_add(1) + 1 == s.operations) stop = true;
      }
    });
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(s.seconds);
  while (!stop && std::chrono::steady_clock::now() < end) usleep(20000);
  stop = true;
  for (std::thread& t : threads) t.join();
  vmem::core::step_hook.store(nullptr);
  for (Shadowed& r : regions) {
    if (r.memory != nullptr && memcmp(r.memory, r.shadow.data(), r.size) != 0) fail("bytes differ at the end", r, 0, 0);
  }
  const struct vmem_stats v = vmem::stats();
  const std::string check = vmem::api::Runtime::get().check();
  if (!check.empty()) {
    fprintf(stderr, "FAILED: %s\n", check.c_str());
    ++failures;
  }
  printf(
      "%llu operations, %llu faults, %llu evictions (%llu clean), %.1f MiB read, %.1f MiB written, host %.1f of %.1f "
      "MiB, "
      "%llu failures\n",
      static_cast<unsigned long long>(operations.load()), static_cast<unsigned long long>(v.faults),
      static_cast<unsigned long long>(v.evictions), static_cast<unsigned long long>(v.clean_drops),
      static_cast<double>(v.read_bytes) / 1048576, static_cast<double>(v.write_bytes) / 1048576,
      static_cast<double>(v.host_bytes) / 1048576, static_cast<double>(v.host_budget) / 1048576,
      static_cast<unsigned long long>(failures.load()));
  vmem_shutdown();
  return failures == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  vmem::core::be_strict_about_big_locks(true);
  CLI::App app{"Every byte against a shadow copy while blocks move."};
  Settings s;
  app.add_option("--seconds", s.seconds);
  app.add_option("--operations", s.operations, "stop after so many (0: time decides)");
  app.add_option("--threads", s.threads);
  app.add_option("--regions", s.regions);
  app.add_option("--bytes", s.bytes, "of all regions")->transform(CLI::AsSizeValue(false));
  app.add_option("--budget", s.budget);
  app.add_option("--transfer", s.transfer);
  app.add_option("--engine", s.engine);
  app.add_option("--compression", s.compression);
  app.add_option("--blocks", s.blocks);
  app.add_option("--seed", s.seed);
  app.add_flag("!--no-delays", s.delays);
  CLI11_PARSE(app, argc, argv);
  try {
    return run(s);
  } catch (const std::exception& e) {
    fprintf(stderr, "FAILED: %s\n", e.what());
    return 1;
  }
}
