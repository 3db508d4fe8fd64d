// Fault-around: what is read beside a missed block, by cases, and its effect on known loads,
// compared with blocks of one size.
#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "policy/fault_around.h"
#include "replay/simulate.h"

namespace vmem {
namespace {

using policy::FaultAround;

using replay::Result;
using replay::Trace;

constexpr uint32_t kGroup = 32;

uint64_t bits(uint32_t from, uint32_t to) {  // [from, to)
  uint64_t mask = 0;
  for (uint32_t i = from; i < to; ++i) mask |= uint64_t{1} << i;
  return mask;
}

void expect(const policy::Run& run, uint64_t first, int64_t stride, uint64_t count) {
  EXPECT_EQ(run.first, first);
  EXPECT_EQ(run.count, count);
  EXPECT_EQ(run.count > 1 ? run.stride : stride, stride);
}

TEST(PolicyFaultAround, AloneInItsGroupABlockIsReadAlone) {
  const FaultAround n(320, kGroup);
  for (uint64_t b = 0; b < 320; ++b) expect(n.around(b, 0), b, 1, 1);
}

TEST(PolicyFaultAround, AReaderGoesThroughAGroupInSixReads) {
  const FaultAround n(320, kGroup);
  uint64_t present = 0;
  std::vector<uint64_t> counts;
  for (uint32_t at = 0; at < kGroup;) {
    const policy::Run run = n.around(64 + at, present);
    EXPECT_EQ(run.stride, 1);
    counts.push_back(run.count);
    present |= bits(at, at + static_cast<uint32_t>(run.count));
    at += static_cast<uint32_t>(run.count);
  }
  EXPECT_EQ(counts, (std::vector<uint64_t>{1, 1, 2, 4, 8, 16}));
}

TEST(PolicyFaultAround, ABackwardReaderToo) {
  const FaultAround n(320, kGroup);
  expect(n.around(64 + 23, bits(24, 32)), 64 + 23, -1, 8);
  expect(n.around(64 + 3, bits(4, 32)), 64 + 3, -1, 4);  // the group ends
}

TEST(PolicyFaultAround, OfTwoRunsTheLongerTellsTheDirection) {
  const FaultAround n(kGroup, kGroup);
  expect(n.around(10, bits(2, 10) | bits(11, 13)), 10, 1, 1);  // the next blocks are present
  expect(n.around(10, bits(8, 10) | bits(11, 19)), 10, -1, 1);
  expect(n.around(10, bits(2, 10) | bits(13, 14)), 10, 1, 3);  // up to a present block
}

TEST(PolicyFaultAround, ARunThatChanceExplainsTellsNothing) {
  const FaultAround n(kGroup, kGroup);
  uint64_t scattered = 0;
  for (uint32_t i = 1; i < kGroup; i += 2) scattered |= uint64_t{1} << i;
  expect(n.around(10, scattered), 10, 1, 1);                // half of the group, singly
  expect(n.around(10, bits(9, 10)), 10, 1, 1);              // one, and it is adjacent: enough for one
  expect(n.around(10, bits(8, 10)), 10, 1, 2);              // two in a row, of two present
  expect(n.around(10, bits(8, 10) | scattered), 10, 1, 1);  // two in a row, of seventeen
}

TEST(PolicyFaultAround, StaysInsideTheGroupAndTheRegion) {
  const FaultAround n(40, kGroup);  // the last group has eight blocks
  EXPECT_EQ(n.first(39), 32u);
  EXPECT_EQ(n.count(39), 8u);
  EXPECT_EQ(n.count(31), 32u);
  for (const uint32_t group : {1u, 2u, 7u, 32u, 64u, 1000u}) {
    for (const uint64_t blocks : {uint64_t{1}, uint64_t{5}, uint64_t{33}, uint64_t{64}, uint64_t{65}, uint64_t{200}}) {
      const FaultAround m(blocks, group);
      std::mt19937_64 random(group + blocks);
      for (int i = 0; i < 2000; ++i) {
        const uint64_t b = random() % blocks, present = random() | random() | (i % 2 != 0 ? random() | random() : 0);
        const policy::Run run = m.around(b, present);
        ASSERT_EQ(run.first, b);
        ASSERT_GE(run.count, 1u);
        for (uint64_t k = 1; k < run.count; ++k) {
          const uint64_t at = static_cast<uint64_t>(static_cast<int64_t>(b) + static_cast<int64_t>(k) * run.stride);
          ASSERT_LT(at, blocks);
          ASSERT_EQ(m.first(at), m.first(b));
          ASSERT_EQ(present >> (at - m.first(b)) & 1, 0u);
        }
      }
    }
  }
}

// Replays 600 MiB in 400, at 64 KiB, and models the time: a read takes 45 us, and 29 us more for
// each 64 KiB.
constexpr uint64_t kBlocks = 9600, kCapacity = 6400;

enum class Size : uint8_t { adapts, small, large };  // 64 KiB and fault-around; 64 KiB; 2 MiB

double cost(const Trace& trace, Size size, bool read_ahead = true) {
  const bool large = size == Size::large;
  replay::Setup setup;
  setup.probes = large;
  setup.capacity = large ? kCapacity / kGroup : kCapacity;
  setup.weight = large ? 512 : 16;
  setup.window = !read_ahead ? 0 : large ? 32 : 1024;
  setup.group = size == Size::adapts ? kGroup : 0;
  replay::Pager pager(setup, large ? kBlocks / kGroup : kBlocks);
  for (const replay::Touch& t : trace) pager.touch(large ? t.block / kGroup : t.block);
  const Result r = pager.result();
  const uint64_t reads = r.misses + (large ? r.read_ahead : r.transfers);
  const uint64_t bytes = (r.misses + r.read_ahead + r.beside) * (large ? kGroup : 1);
  return (45.0 * static_cast<double>(reads) + 29.0 * static_cast<double>(bytes)) / static_cast<double>(trace.size());
}

Trace records(uint64_t blocks, size_t count, uint64_t seed = 1) {
  std::mt19937_64 random(seed);
  Trace trace;
  for (size_t i = 0; i < count; ++i) {
    const uint64_t first = random() % (kBlocks / blocks) * blocks;
    for (uint64_t k = 0; k < blocks; ++k) trace.push_back({first + k});
  }
  return trace;
}

Trace pattern(const char* name, uint64_t length) {
  replay::Pattern p;
  p.name = name;
  p.blocks = kBlocks;
  p.length = length;
  p.skew = 0.99;
  return replay::generate(p);
}

TEST(PolicyFaultAround, RandomAccessesCostWhatSmallBlocksCost) {
  for (const char* name : {"uniform", "zipf"}) {
    const Trace trace = pattern(name, 60000);
    for (const bool read_ahead : {true, false}) {
      const double mine = cost(trace, Size::adapts, read_ahead);
      EXPECT_LE(mine, 1.05 * cost(trace, Size::small, read_ahead)) << name;
      EXPECT_LE(8 * mine, cost(trace, Size::large, read_ahead)) << name;
    }
  }
}

TEST(PolicyFaultAround, SoDoHotGroups) {
  // Nine of ten accesses go to a quarter of the groups, anywhere inside.
  std::mt19937_64 random(1);
  Trace trace;
  for (int i = 0; i < 80000; ++i) {
    const uint64_t groups = kBlocks / kGroup;
    const uint64_t group = random() % 10 < 9 ? random() % (groups / 4) * 4 : random() % groups;
    trace.push_back({group * kGroup + random() % kGroup});
  }
  const double mine = cost(trace, Size::adapts);
  EXPECT_LE(mine, 1.05 * cost(trace, Size::small));
  EXPECT_LE(2 * mine, cost(trace, Size::large));
}

TEST(PolicyFaultAround, RecordsCostLessThanWithBlocksOfEitherSize) {
  const Trace trace = records(8, 9000);  // of 512 KiB
  EXPECT_LE(cost(trace, Size::adapts), 0.9 * cost(trace, Size::small));
  EXPECT_LE(cost(trace, Size::adapts, false), 0.8 * cost(trace, Size::small, false));
  EXPECT_LE(cost(trace, Size::adapts), 0.6 * cost(trace, Size::large));
}

TEST(PolicyFaultAround, RecordsOfAGroupCostLittleMoreThanWithLargeBlocks) {
  const Trace trace = records(kGroup, 2500);
  EXPECT_LE(cost(trace, Size::adapts), 1.5 * cost(trace, Size::large));
  EXPECT_LE(cost(trace, Size::adapts, false), 0.6 * cost(trace, Size::small, false));
}

TEST(PolicyFaultAround, ALoopCostsLittleMoreThanWithLargeBlocks) {
  const Trace trace = pattern("cyclic", 8 * kBlocks);
  EXPECT_LE(cost(trace, Size::adapts), 1.5 * cost(trace, Size::large));
  EXPECT_LE(cost(trace, Size::adapts, false), 0.6 * cost(trace, Size::small, false));
}

TEST(PolicyFaultAround, AScanAfterRecordsIsStillFoundToBeAStream) {
  // Records make read-ahead wait for more than two accesses in a row, and fault-around hides some
  // of those from it.
  const Trace before = records(8, 9000);
  replay::Setup setup;
  setup.probes = false;
  setup.capacity = kCapacity;
  setup.weight = 16;
  setup.window = 1024;
  setup.group = kGroup;
  replay::Pager pager(setup, 16 * kBlocks);
  for (const replay::Touch& t : before) pager.touch(t.block);
  const Result r = pager.result();
  for (uint64_t b = kBlocks; b < 16 * kBlocks; ++b) pager.touch(b);
  const Result after = pager.result();
  EXPECT_LE((after.misses - r.misses) * 20, 15 * kBlocks);  // six of 32 without a stream
}

}  // namespace
}  // namespace vmem
