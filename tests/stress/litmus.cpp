// Litmus tests of x86-TSO on regions whose blocks leave and return all the time: message passing,
// store and load buffering, coherence and others, as litmus7 has them. An outcome that the
// architecture forbids, or a value that no thread wrote, is a difference; the counts of the other
// outcomes are printed.
//
// The model: P. Sewell et al., "x86-TSO: A Rigorous and Usable Programmer's Model for x86 Multiprocessors", CACM 53(7),
// 2010.
#include <CLI/CLI.hpp>
#include <array>
#include <chrono>
#include <map>

#include "common.h"

namespace {

using stress::differs;
using stress::Random;

// Volatile: each access is one instruction, in program order. Atomic: not a data race for the
// compiler.
struct Word {
  volatile uint64_t* at;
  operator uint64_t() const { return __atomic_load_n(at, __ATOMIC_RELAXED); }
  void operator=(uint64_t v) const { __atomic_store_n(at, v, __ATOMIC_RELAXED); }
  void exchange(uint64_t v) const { __atomic_exchange_n(at, v, __ATOMIC_SEQ_CST); }
};

struct Settings {
  double seconds = 10;
  uint64_t seed = 1;
  std::string budget = "24MiB", transfer = "auto", trap = "uffd";
  bool delays = true;
};

// The values that the threads read, and the final values.
struct Seen {
  uint64_t r[4], x, y;
};

// Both words held `old` before; a test writes old + 1 and old + 2.
struct Test {
  const char* name;
  unsigned threads;
  void (*body)(unsigned thread, Word x, Word y, uint64_t old, Seen& s);
  bool (*forbidden)(const Seen& s, uint64_t old);
};

void fence() {
  __sync_synchronize();
}

const Test kTests[] = {
    {"SB", 2,  // both may be old: stores wait in buffers
     [](unsigned t, Word x, Word y, uint64_t old, Seen& s) {
       if (t == 0) x = old + 1, s.r[0] = y;
       if (t == 1) y = old + 1, s.r[1] = x;
     },
     [](const Seen&, uint64_t) { return false; }},
    {"SB+mfences", 2,
     [](unsigned t, Word x, Word y, uint64_t old, Seen& s) {
       if (t == 0) x = old + 1, fence(), s.r[0] = y;
       if (t == 1) y = old + 1, fence(), s.r[1] = x;
     },
     [](const Seen& s, uint64_t old) { return s.r[0] == old && s.r[1] == old; }},
    {"SB+xchgs", 2,
     [](unsigned t, Word x, Word y, uint64_t old, Seen& s) {
       if (t == 0) x.exchange(old + 1), s.r[0] = y;
       if (t == 1) y.exchange(old + 1), s.r[1] = x;
     },
     [](const Seen& s, uint64_t old) { return s.r[0] == old && s.r[1] == old; }},
    {"MP", 2,
     [](unsigned t, Word x, Word y, uint64_t old, Seen& s) {
       if (t == 0) x = old + 1, y = old + 1;
       if (t == 1) s.r[0] = y, s.r[1] = x;
     },
     [](const Seen& s, uint64_t old) { return s.r[0] != old && s.r[1] == old; }},
    {"LB", 2,
     [](unsigned t, Word x, Word y, uint64_t old, Seen& s) {
       if (t == 0) s.r[0] = x, y = old + 1;
       if (t == 1) s.r[1] = y, x = old + 1;
     },
     [](const Seen& s, uint64_t old) { return s.r[0] != old && s.r[1] != old; }},
    {"S", 2,
     [](unsigned t, Word x, Word y, uint64_t old, Seen& s) {
       if (t == 0) x = old + 2, y = old + 1;
       if (t == 1) s.r[0] = y, x = old + 1;
     },
     [](const Seen& s, uint64_t old) { return s.r[0] != old && s.x == old + 2; }},
    {"2+2W", 2,
     [](unsigned t, Word x, Word y, uint64_t old, Seen&) {
       if (t == 0) x = old + 1, y = old + 2;
       if (t == 1) y = old + 1, x = old + 2;
     },
     [](const Seen& s, uint64_t old) { return s.x == old + 1 && s.y == old + 1; }},
    {"CoRR", 2,
     [](unsigned t, Word x, Word, uint64_t old, Seen& s) {
       if (t == 0) x = old + 1;
       if (t == 1) s.r[0] = x, s.r[1] = x;
     },
     [](const Seen& s, uint64_t old) { return s.r[0] != old && s.r[1] == old; }},
    {"CoWR", 2,
     [](unsigned t, Word x, Word, uint64_t old, Seen& s) {
       if (t == 0) x = old + 1, s.r[0] = x;
       if (t == 1) x = old + 2;
     },
     [](const Seen& s, uint64_t old) { return s.r[0] == old; }},
    {"WRC", 3,
     [](unsigned t, Word x, Word y, uint64_t old, Seen& s) {
       if (t == 0) x = old + 1;
       if (t == 1) {
         s.r[0] = x;
         if (s.r[0] != old) y = old + 1;
       }
       if (t == 2) s.r[1] = y, s.r[2] = x;
     },
     [](const Seen& s, uint64_t old) { return s.r[0] != old && s.r[1] != old && s.r[2] == old; }},
    {"IRIW", 4,
     [](unsigned t, Word x, Word y, uint64_t old, Seen& s) {
       if (t == 0) x = old + 1;
       if (t == 1) y = old + 1;
       if (t == 2) s.r[0] = x, s.r[1] = y;
       if (t == 3) s.r[2] = y, s.r[3] = x;
     },
     [](const Seen& s, uint64_t old) { return s.r[0] != old && s.r[1] == old && s.r[2] != old && s.r[3] == old; }},
};

struct Pair {
  uint64_t *x, *y;
  uint64_t old = 0;
};

// All threads of a test meet here before and after each instance.
class Barrier {
 public:
  explicit Barrier(unsigned n) : threads_(n) {}
  void wait() {
    const uint64_t turn = turn_.load();
    if (here_.fetch_add(1) + 1 == threads_) {
      here_ = 0;
      ++turn_;
      return;
    }
    for (unsigned i = 0; turn_.load() == turn; ++i)
      if (i % 256 == 255) std::this_thread::yield();
  }

 private:
  const unsigned threads_;
  std::atomic<uint64_t> turn_{0};
  std::atomic<unsigned> here_{0};
};

std::atomic<uint64_t> alive{0};

// Judges one instance and makes both words equal again.
void conclude(const Test& test, Pair& p, Seen& seen, std::map<std::string, uint64_t>& outcomes) {
  seen.x = Word{p.x}, seen.y = Word{p.y};
  std::string key;
  for (const uint64_t v : {seen.r[0], seen.r[1], seen.r[2], seen.r[3], seen.x, seen.y}) {
    if (v < p.old || v > p.old + 2)
      differs("%s: %llu was never written; %llu to %llu were", test.name, static_cast<unsigned long long>(v),
              static_cast<unsigned long long>(p.old), static_cast<unsigned long long>(p.old + 2));
    key += static_cast<char>('0' + (v - p.old));
  }
  if (test.forbidden(seen, p.old))
    differs("%s: forbidden outcome, r0 r1 r2 r3 x y %s, of words at %p and %p", test.name, key.c_str(),
            static_cast<void*>(p.x), static_cast<void*>(p.y));
  ++outcomes[key];
  p.old += 3;
  Word{p.x} = p.old, Word{p.y} = p.old;
}

// Runs the test on the pairs until the time is over. Counts outcomes by which of the values seen
// are old (0) or new.
void run_test(const Test& test, std::vector<Pair>& pairs, double seconds, uint64_t seed,
              std::map<std::string, uint64_t>& outcomes) {
  Barrier barrier(test.threads);
  std::atomic<bool> end{false};
  std::vector<Seen> seen(pairs.size());
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < test.threads; ++t) {
    threads.emplace_back([&, t] {
      Random draws(seed);             // the same in all threads: they start at the same pair
      Random own(seed * 31 + t + 1);  // for this thread's delays
      const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
      for (;;) {
        const size_t from = draws.below(pairs.size());
        if (t == 0) {
          for (size_t i = 0; i < pairs.size(); ++i)
            seen[i] = {{pairs[i].old, pairs[i].old, pairs[i].old, pairs[i].old}, 0, 0};
          end = std::chrono::steady_clock::now() > until;
        }
        barrier.wait();
        if (end) return;
        // The threads run over all pairs, near each other but not in step.
        for (uint64_t i = own.below(100); i != 0; --i) __builtin_ia32_pause();
        for (size_t i = 0; i < pairs.size(); ++i) {
          const size_t at = (from + i) % pairs.size();
          test.body(t, {pairs[at].x}, {pairs[at].y}, pairs[at].old, seen[at]);
        }
        barrier.wait();
        if (t == 0) {
          ++alive;
          for (size_t i = 0; i < pairs.size(); ++i) conclude(test, pairs[i], seen[i], outcomes);
        }
      }
    });
  }
  for (std::thread& t : threads) t.join();
}

int run(const Settings& settings) {
  stress::catch_sigbus();
  vmem_log([](int, const char*, void*) {}, nullptr);
  for (const auto& [name, value] :
       std::initializer_list<std::pair<const char*, std::string>>{{"device", "none"},
                                                                  {"host_budget", settings.budget},
                                                                  {"trap", settings.trap},
                                                                  {"transfer", settings.transfer},
                                                                  {"evict_threads", "1"},
                                                                  {"io_threads", "1"},
                                                                  {"readahead", "0"}})
    stress::configure(name, value);
  stress::start();
  if (settings.delays) vmem::core::step_hook.store(stress::delay);
  Random first(settings.seed);
  std::vector<Pair> pairs;
  for (const auto& [name, block] :
       std::initializer_list<std::pair<const char*, size_t>>{{"4KiB", 4096}, {"64KiB", 65536}, {"2MiB", 2 << 20}}) {
    stress::configure("block_size", name);
    void* p = nullptr;
    const size_t size = 8 << 20;
    if (const int rc = vmem_alloc(&p, size, VMEM_HOST_ONLY); rc != 0) differs("alloc: %d %s", rc, vmem_last_error());
    char* at = static_cast<char*>(p);
    for (size_t i = 0; i < size; i += 4096) *reinterpret_cast<uint64_t*>(at + i + 8) = first();
    // In two blocks, in one block, in one cache line.
    for (size_t i = 0; i < 21; ++i) {
      const size_t line = 256 + i * 128, in = (i * block) % (size - block);
      const size_t other = i % 3 == 0 ? in + block + line : i % 3 == 1 ? in + line + 64 : in + line + 8;
      pairs.push_back({reinterpret_cast<uint64_t*>(at + in + line), reinterpret_cast<uint64_t*>(at + other)});
      pairs.back().old = 1;
      *pairs.back().x = *pairs.back().y = 1;
    }
  }
  std::atomic<bool> stop{false};
  std::thread watcher = stress::watch(alive, stop, 90);
  std::thread mover([&, random = Random(settings.seed + 1)]() mutable {
    while (!stop) {
      const Pair& p = pairs[random.below(pairs.size())];
      uint64_t* const at = random.one_in(2) ? p.x : p.y;
      const int rc = random.one_in(8)   ? vmem_sync(at, 8)
                     : random.one_in(8) ? vmem_prefetch(at, 8, VMEM_HOST, nullptr)
                                        : vmem_evict(at, 8, VMEM_SSD);
      if (rc != 0) differs("moving: %d %s", rc, vmem_last_error());
    }
  });
  const double each = settings.seconds / static_cast<double>(std::size(kTests));
  uint64_t all = 0, seed = settings.seed;
  for (const Test& test : kTests) {
    std::map<std::string, uint64_t> outcomes;
    run_test(test, pairs, each, ++seed, outcomes);
    uint64_t count = 0;
    std::string line;
    for (const auto& [key, n] : outcomes) count += n, line += " " + key + ":" + std::to_string(n);
    printf("%-11s %8llu times; r0 r1 r2 r3 x y:%s\n", test.name, static_cast<unsigned long long>(count), line.c_str());
    if (count == 0) differs("%s never ran", test.name);
    all += count;
  }
  stop = true;
  mover.join();
  watcher.join();
  vmem::core::step_hook.store(nullptr);
  struct vmem_stats s = {};
  s.size = sizeof s;
  vmem_stats(&s);
  vmem_shutdown();
  printf("seed %llu: %llu instances, %llu faults, %llu evictions, no difference\n",
         static_cast<unsigned long long>(settings.seed), static_cast<unsigned long long>(all),
         static_cast<unsigned long long>(s.faults), static_cast<unsigned long long>(s.evictions));
  if (s.evictions < 20) differs("too little was evicted to be worth anything");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Litmus tests of x86-TSO in memory that moves."};
  Settings settings;
  app.add_option("--seconds", settings.seconds);
  app.add_option("--budget", settings.budget);
  app.add_option("--transfer", settings.transfer);
  app.add_option("--trap", settings.trap);
  app.add_option("--seed", settings.seed);
  app.add_flag("!--no-delays", settings.delays);
  CLI11_PARSE(app, argc, argv);
  return run(settings);
}
