// Hit rates of the eviction policies on known loads, measured with the replay tool's small pager.
// The reference policies marked * see what no pager can see.
#include <gtest/gtest.h>

#include "replay/simulate.h"

namespace vmem {
namespace {

using replay::kAdaptive;
using replay::kSimple;
using replay::MakePolicy;
using replay::Pattern;
using replay::Result;
using replay::Trace;

// Blocks. A sanitizer runs one size instead of three: it is ten times slower, and finds as much in
// one thread.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint64_t kCapacities[] = {1024};
#else
constexpr uint64_t kCapacities[] = {409, 1024, 2048};
#endif

Result run(const Trace& trace, uint64_t capacity, MakePolicy policy = kAdaptive, bool probes = true,
           uint64_t warmup = 0) {
  replay::Setup setup;
  setup.make = policy;
  setup.capacity = capacity;
  setup.probes = probes;
  return replay::simulate(trace, setup, warmup);
}

Trace make(const char* name, uint64_t blocks, uint64_t length, double skew = 0.9, uint64_t hot = 0) {
  Pattern p;
  p.name = name;
  p.blocks = blocks;
  p.length = length;
  p.skew = skew;
  p.hot = hot;
  return replay::generate(p);
}

// With and without probes.
class PolicyHitRate : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Probes, PolicyHitRate, testing::Bool(),
                         [](const auto& probes) { return std::string(probes.param ? "with" : "without"); });

TEST(PolicyTrace, TheLastNumberThatThereIsIsNoBlock) {
  EXPECT_EQ(replay::blocks_of({}), 0u);
  EXPECT_EQ(replay::blocks_of({{7, false}, {UINT64_MAX - 1, false}}), UINT64_MAX);
  EXPECT_THROW(replay::blocks_of({{7, false}, {UINT64_MAX, true}}), std::length_error);
}

TEST_P(PolicyHitRate, ALoopOfFourBudgetsKeepsAPartResident) {
  const Trace trace = make("cyclic", 2048, 20 * 2048);
  EXPECT_GE(run(trace, 512, kAdaptive, GetParam(), 2048).hit_rate(), GetParam() ? 0.23 : 0.21);
  for (const MakePolicy other : kSimple) EXPECT_LE(run(trace, 512, other, GetParam()).hit_rate(), 0.01);
}

TEST_P(PolicyHitRate, ALoopJustLargerThanMemoryMissesLittle) {
  const Trace trace = make("cyclic", 1100, 40 * 1100);
  EXPECT_GE(run(trace, 1000, kAdaptive, GetParam(), 1100).hit_rate(), GetParam() ? 0.83 : 0.80);
}

TEST_P(PolicyHitRate, ALoopSmallerThanMemoryIsAllHits) {
  EXPECT_EQ(run(make("cyclic", 500, 20 * 500), 512, kAdaptive, GetParam()).misses, 500u);
}

TEST_P(PolicyHitRate, OneScanOfTenBudgetsDoesNotFlushTheHotSet) {
  // A hot set of half the budget, then one pass over ten budgets, then the hot set again.
  const Trace trace = make("scan", 5376, 5120 + 2 * 8192, 0.9, 256);
  replay::Pager pager(replay::Setup{.capacity = 512, .probes = GetParam()}, 5376);
  size_t at = 0;
  for (; at < 8192 + 5120; ++at) pager.touch(trace[at].block);
  uint64_t kept = 0;
  for (uint64_t b = 0; b < 256; ++b) kept += pager.present(b);
  EXPECT_GE(kept, 250u);
  const uint64_t misses = pager.result().misses;
  for (; at < trace.size(); ++at) pager.touch(trace[at].block);
  EXPECT_LE(pager.result().misses - misses, 10u);
}

TEST_P(PolicyHitRate, AHotSetInUseSurvivesAnEndlessScanBesideIt) {
  const Trace trace = make("mixed", 8192, 60000, 0.9, 256);  // every second touch is the scan's
  EXPECT_GE(run(trace, 512, kAdaptive, GetParam(), 10000).hit_rate(), GetParam() ? 0.49 : 0.47);
}

TEST_P(PolicyHitRate, SkewedLoadsAreServedAsWellAsByTheBestOfTheOthers) {
  for (const double skew : {0.7, 0.9, 1.1}) {
    const Trace trace = make("zipf", 4096, 100000, skew);
    for (const uint64_t capacity : kCapacities) {
      const double mine = run(trace, capacity, kAdaptive, GetParam()).hit_rate();
      for (const MakePolicy other : kSimple) {
        const Result theirs = run(trace, capacity, other, GetParam());
        // Without probes it loses about half a percent to blocks that are used once.
        EXPECT_GE(mine, theirs.hit_rate() - (GetParam() ? 0.0 : 0.012))
            << theirs.policy << ' ' << skew << ' ' << capacity;
      }
    }
  }
}

TEST_P(PolicyHitRate, UniformLoadsGetTheShareOfMemory) {
  const Trace trace = make("uniform", 2048, 100000);
  EXPECT_NEAR(run(trace, 512, kAdaptive, GetParam(), 4096).hit_rate(), 0.25, 0.01);
}

TEST_P(PolicyHitRate, WrittenThenReadBackIsALoop) {
  EXPECT_GE(run(make("rewrite", 2048, 20 * 2048), 512, kAdaptive, GetParam(), 2048).hit_rate(), 0.21);
}

TEST_P(PolicyHitRate, AWorkingSetThatMovesIsFollowedWithinTwoBudgets) {
  // Four disjoint sets of half the budget, each looped over. Every set costs its first reads and at
  // most two more rounds.
  const Trace trace = make("loops", 4096, 4 * 16384, 0.9, 512);
  const Result r = run(trace, 1024, kAdaptive, GetParam());
  EXPECT_LE(r.misses, 4u * 512 + 2 * 2 * 1024);
}

TEST_P(PolicyHitRate, ALargeLoopThatMovesIsFollowed) {
  // Loops over two budgets without a common block: a part of each is kept after at most four
  // rounds.
  Trace trace;
  for (uint64_t i = 0; i < 30 * 1024; ++i) trace.push_back({i % 1024});
  for (uint64_t i = 0; i < 30 * 1024; ++i) trace.push_back({1024 + i % 1024});
  const Result r = run(trace, 512, kAdaptive, GetParam(), 34 * 1024);
  EXPECT_GE(r.hit_rate(), 0.40);
}

TEST(PolicyLoads, MixedLoadsAreServedBetterThanByTheOthers) {
  for (const char* name : {"mixed", "two-tenants"}) {
    const Trace trace = make(name, 4096, 100000);
    const double mine = run(trace, 1024).hit_rate();
    for (const MakePolicy other : kSimple) EXPECT_GE(mine, run(trace, 1024, other).hit_rate() + 0.05) << name;
    EXPECT_GE(mine, replay::simulate_lru(trace, 1024).hit_rate() + 0.10) << name;
  }
}

TEST(PolicyLoads, ProbesCostLittle) {
  for (const std::string& name : replay::pattern_names()) {
    const Trace trace = make(name.c_str(), 2048, 60000);
    const Result r = run(trace, 512);
    EXPECT_LE(r.probes, 2 * r.evictions + 512) << name;
    EXPECT_LE(r.soft_faults, r.evictions + 512) << name;
    if (name == "cyclic" || name == "seq" || name == "rewrite") {
      EXPECT_LE(r.soft_faults, r.evictions / 20) << name;
      EXPECT_LE(r.probes, r.evictions / 2 + 64) << name;
    }
  }
}

TEST(PolicyLoads, SmallMemoriesWork) {
  for (const uint64_t capacity : {1, 2, 3, 5, 8, 16}) {
    for (const std::string& name : replay::pattern_names()) {
      const Trace trace = make(name.c_str(), 4 * capacity, 4000);
      const Result r = run(trace, capacity);
      EXPECT_EQ(r.touches, trace.size());
      if (capacity >= 8 && name == "cyclic") {
        EXPECT_GE(r.hit_rate(), 0.15) << capacity;
      }
    }
  }
}

TEST(PolicyLoads, TheYardsticksAreRight) {
  // Belady by hand: a b c a b d a, memory of 2. At c, the next use of b is farther than that of a.
  // At b and d, c and then b are never used again.
  const Trace trace = {{0}, {1}, {2}, {0}, {1}, {3}, {0}};
  EXPECT_EQ(replay::simulate_opt(trace, 2).hits, 2u);
  EXPECT_EQ(replay::simulate_lru(trace, 2).hits, 0u);
  for (const char* name : {"zipf", "mixed", "cyclic", "two-tenants"}) {
    const Trace t = make(name, 1024, 20000);
    const double opt = replay::simulate_opt(t, 256).hit_rate();
    EXPECT_GE(opt, replay::simulate_lru(t, 256).hit_rate());
    EXPECT_GE(opt, replay::simulate_sieve(t, 256).hit_rate());
    EXPECT_GE(opt, run(t, 256).hit_rate());
  }
}

// Two block sizes under the same load must share memory by benefit per byte: a large block that is
// accessed as often as a small one is worth less.
TEST(PolicyLoads, BlocksOfDifferentSizeShareMemoryByBytes) {
  auto evictor = kAdaptive();
  constexpr uint64_t kLarge = 64, kSmall = 64 * 512;  // 64 blocks of 2 MiB and as many bytes of 4 KiB blocks
  constexpr uint64_t kPages = kLarge * 512;           // memory: half of all
  evictor->resize(kLarge + kSmall, kPages);
  struct Block {
    bool present = false, hidden = false;
    uint64_t left = 0;
  };
  std::vector<Block> blocks(kLarge + kSmall);
  std::mt19937_64 random(1);
  uint64_t used = 0, evicted = 0, large = 0;
  std::vector<policy::Victim> out(256);
  for (int i = 0; i < 1500000; ++i) {
    // The same accesses per byte for both.
    const uint64_t page = random() % (2 * kPages);
    const uint64_t at = page < kPages ? page / 512 : kLarge + page - kPages;
    const uint32_t weight = at < kLarge ? 512 : 1;
    Block& b = blocks[at];
    if (b.hidden) {
      b.hidden = false;
      evictor->touched(static_cast<core::FrameId>(at));
    }
    if (b.present) continue;
    while (used + weight > kPages) {
      const size_t n = evictor->victims(weight, out);
      ASSERT_NE(n, 0u);
      for (size_t k = 0; k < n; ++k) {
        Block& v = blocks[out[k].id];
        v.hidden = out[k].probe;
        if (out[k].probe) continue;
        const uint32_t w = out[k].id < kLarge ? 512 : 1;
        v.present = false;
        used -= w;
        v.left = evicted += w;
        if (w != 1) --large;
      }
    }
    b.present = true;
    used += weight;
    if (weight != 1) ++large;
    policy::Admission a{.id = static_cast<core::FrameId>(at), .weight = weight};
    if (b.left != 0) a.age = evicted - b.left;
    evictor->admit(a);
  }
  // A large block is accessed 512 times as often as a small one, so it is by far the better one:
  // large blocks must stay, and small ones keep the rest.
  EXPECT_GE(large, kLarge / 2);
  EXPECT_GE(used, kPages - 512);
}

TEST(PolicyLoads, ReadAheadCoversEightStreamsInSmallMemory) {
  replay::Setup setup;
  setup.capacity = 512;
  setup.window = 32;
  const Result r = replay::simulate(make("merge", 2048, 60000), setup);
  EXPECT_GE(static_cast<double>(r.covered) / static_cast<double>(r.covered + r.misses), 0.9);
  EXPECT_LE(static_cast<double>(r.read_ahead - r.covered) / static_cast<double>(r.read_ahead), 0.06);
}

TEST(PolicyLoads, ReadAheadDoesNotDestroyTheResidentPartOfALoop) {
  replay::Setup setup;
  setup.capacity = 512;
  setup.window = 32;
  const Result r = replay::simulate(make("cyclic", 2048, 20 * 2048), setup);
  // Blocks read from disk in a round: those that are not resident.
  EXPECT_LE((r.misses + r.read_ahead) / 20, 2048u - 300);
  EXPECT_GE(static_cast<double>(r.covered) / static_cast<double>(r.covered + r.misses), 0.95);
}

}  // namespace
}  // namespace vmem
