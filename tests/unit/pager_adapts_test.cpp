// Regions whose blocks adapt: what a fault reads beside its block, and in which order. A failure of
// those neighbours must not harm anything else.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <utility>

#include "pager_steps.h"

namespace vmem::pager::test {
namespace {

constexpr size_t kHuge = core::kHugePage, kGroup = kHuge / kSmall;

class PagerAdapts : public PagerSteps {
 protected:
  // Returns groups whose blocks are in the store, each with its number.
  std::byte* stored(Settings c = config(), size_t groups = 2) {
    start(std::move(c));
    std::byte* const r = adapting(groups * kHuge);
    for (size_t i = 0; i < groups * kGroup; ++i) put(r + i * kSmall, i + 1);
    evict(r, groups * kHuge);
    return r;
  }
  std::byte* adapting(size_t size) {
    RegionSpec what;
    what.size = size;
    what.block_size = kHuge;
    what.adapts = true;
    void* at = nullptr;
    const core::Status s = pager->create(what, &at);
    EXPECT_TRUE(s.ok()) << s.text();
    return static_cast<std::byte*>(at);
  }
  // The fakes' store allocates room in the order of requests: blocks that leave together lie
  // together.
  void expect_neighbours(size_t count) {
    const std::vector<uint64_t> offsets = engine->held_offsets();
    ASSERT_EQ(offsets.size(), count);
    for (size_t i = 1; i < count; ++i) EXPECT_EQ(offsets[i], offsets[i - 1] + kSmall) << i;
  }
};

TEST_F(PagerAdapts, AFaultAloneReadsItsBlockAlone) {
  std::byte* const r = stored();
  EXPECT_EQ(get(r + 7 * kSmall), 8u);
  EXPECT_EQ(get(r + 40 * kSmall), 41u);
  EXPECT_EQ(get(r + 20 * kSmall), 21u);
  EXPECT_EQ(stats().read_bytes, 3 * kSmall);
  EXPECT_EQ(ssd(r, 2 * kHuge), 2 * kHuge - 3 * kSmall);
}

TEST_F(PagerAdapts, AReaderThatGoesOnGetsAsMuchAgainInOneRunOfReads) {
  std::byte* const r = stored();
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(get(r + i * kSmall), i + 1);
  engine->until_idle();
  EXPECT_EQ(ssd(r, kHuge), kHuge - 4 * kSmall);
  engine->hold(Io::Op::read, true);
  auto reader = getting(r + 4 * kSmall);
  engine->until_held(4);
  expect_neighbours(4);
  engine->hold(Io::Op::read, false);
  engine->let_go();
  EXPECT_EQ(reader.get(), 5u);
  engine->until_idle();
  for (size_t i = 5; i < 8; ++i) EXPECT_EQ(get(r + i * kSmall), i + 1);
  EXPECT_EQ(stats().read_bytes, 8 * kSmall);
}

TEST_F(PagerAdapts, ABackwardReaderGetsItsBlockFirstAndTheOthersInTheOrderOfTheirPlaces) {
  std::byte* const r = stored();
  for (size_t i = 31; i > 27; --i) EXPECT_EQ(get(r + i * kSmall), i + 1);
  engine->until_idle();
  engine->hold(Io::Op::read, true);
  auto reader = getting(r + 27 * kSmall);
  engine->until_held(4);
  const std::vector<uint64_t> at = engine->held_offsets();
  EXPECT_EQ(at, (std::vector<uint64_t>{at[0], at[0] - 3 * kSmall, at[0] - 2 * kSmall, at[0] - kSmall}));
  EXPECT_EQ(engine->asked(Io::Op::read).back(), at) << "asked for together";
  Gate placed("install.after");
  engine->hold(Io::Op::read, false);
  engine->let_go();
  placed.until_reached();
  EXPECT_EQ(reader.get(), 28u) << "while the others are not in place yet";
  placed.open();
  engine->until_idle();
  for (size_t i = 27; i > 23; --i) EXPECT_EQ(get(r + i * kSmall), i + 1);
  EXPECT_EQ(stats().read_bytes, 8 * kSmall);
}

TEST_F(PagerAdapts, AGroupIsReadWholeInSixFaultsAndNoMore) {
  std::byte* const r = stored();
  for (size_t i = 0; i < kGroup; ++i) {
    EXPECT_EQ(get(r + i * kSmall), i + 1);
    engine->until_idle();
  }
  EXPECT_EQ(stats().fault_around_blocks, kGroup - 6);
  EXPECT_EQ(stats().read_bytes, kHuge) << "nothing twice, and nothing of the next group";
}

TEST_F(PagerAdapts, NeighboursArePutInPlaceByOneCall) {
  std::byte* const r = stored();
  const size_t fills = trap->calls("fill");
  for (size_t i = 0; i < kGroup; ++i) {
    EXPECT_EQ(get(r + i * kSmall), i + 1);
    engine->until_idle();
  }
  EXPECT_EQ(trap->calls("fill") - fills, 6u + 4u) << "the missed ones, and four runs";
  EXPECT_EQ(pager->check(), "");
}

TEST_F(PagerAdapts, NeighboursThatAreWaitedForComeWithTheOthersAndThoseStoredToAtOnce) {
  using trap::FaultKind;
  std::byte* const r = stored();
  for (size_t i = 0; i < 8; ++i) EXPECT_EQ(get(r + i * kSmall), i + 1);
  engine->until_idle();
  engine->hold(Io::Op::read, true);
  for (const auto& [block, kind] : {std::pair{8, FaultKind::read}, {11, FaultKind::read}, {13, FaultKind::write}}) {
    trap->report(r + static_cast<size_t>(block) * kSmall, kind);
    trap->until_quiet();
  }
  EXPECT_EQ(engine->held(), 8u);
  const size_t fills = trap->calls("fill");
  engine->hold(Io::Op::read, false);
  engine->let_go();
  engine->until_idle();
  EXPECT_EQ(trap->calls("fill") - fills, 4u) << "8, 13, 9 to 12, 14 to 15";
  put(r + 13 * kSmall, 14);
  EXPECT_EQ(pager->counters().write_protect_faults, 0u);
  for (size_t i = 8; i < 16; ++i) EXPECT_EQ(get(r + i * kSmall), i + 1);
}

// If the call for all neighbours fails, they are put in place one by one. After a call that stopped
// half way they are absent again; nothing is lost, since they were copied, and protected from the
// first page on.
TEST_F(PagerAdapts, ACallForAllNeighboursThatFailsLosesNothing) {
  for (const bool half_way : {false, true}) {
    std::byte* const r = stored();
    for (size_t i = 0; i < 8; ++i) EXPECT_EQ(get(r + i * kSmall), i + 1);
    engine->until_idle();
    Gate first("install.after");
    auto reader = getting(r + 8 * kSmall);
    first.until_reached();
    EXPECT_EQ(reader.get(), 9u);
    half_way ? trap->tear_fill(ENOTRECOVERABLE) : trap->fail_fill(ENOMEM, 1);
    first.open();
    engine->until_idle();
    EXPECT_EQ(trap->calls(half_way ? "fill torn" : "fill refused"), 1u);
    for (size_t i = 9; i < 16; ++i) EXPECT_EQ(get(r + i * kSmall), i + 1);
    EXPECT_EQ(stats().lost_blocks, 0u);
    EXPECT_EQ(pager->sync(r, 2 * kHuge).code(), 0);
    TearDown();
    pager.reset();
  }
}

// A present neighbour does not trap, so its use is unknown: it would look like read-ahead that is
// never used, or like wasted read-ahead.
TEST_F(PagerAdapts, NeighboursAreNoReadAheadOfWhichTheUseIsCounted) {
  std::byte* const r = stored();
  for (size_t i = 0; i < 16; ++i) {
    EXPECT_EQ(get(r + i * kSmall), i + 1);
    engine->until_idle();
  }
  put(r + 13 * kSmall, 14);  // used, and this store is seen
  evict(r, 2 * kHuge);
  EXPECT_EQ(stats().fault_around_blocks, 16u - 5);
  EXPECT_EQ(stats().prefetched_blocks, 0u);
  EXPECT_EQ(stats().prefetch_hits, 0u);
  EXPECT_EQ(stats().prefetch_wasted, 0u);
}

// Also beside loads elsewhere in the region. A store to an absent block traps once; stores to
// neighbours of such a block do not trap at all.
TEST_F(PagerAdapts, StoresToTheNeighboursOfBlocksThatWereStoredToDoNotTrap) {
  std::byte* const r = stored();
  size_t apart = kGroup;  // blocks of the other group, none adjacent
  for (size_t i = 0; i < kGroup; ++i) {
    if (std::has_single_bit(i)) {
      EXPECT_EQ(get(r + apart * kSmall), apart + 1);
      apart += 5;
    }
    put(r + i * kSmall, i + 1001);
    engine->until_idle();
  }
  EXPECT_EQ(stats().fault_around_blocks, kGroup - 6);
  EXPECT_EQ(pager->counters().write_protect_faults, 0u);
  evict(r, kHuge);
  for (size_t i = 0; i < kGroup; ++i) EXPECT_EQ(get(r + i * kSmall), i + 1001);
}

// A block that is loaded first traps at its first store, as any block; its neighbours do not.
TEST_F(PagerAdapts, WhatIsLoadedAndStoredToTrapsTwiceOnlyWhereItIsRead) {
  std::byte* const r = stored();
  for (size_t i = 0; i < kGroup; ++i) {
    EXPECT_EQ(get(r + i * kSmall), i + 1);
    engine->until_idle();
    put(r + i * kSmall, i + 1001);
  }
  EXPECT_EQ(pager->counters().write_protect_faults, 6u);
  evict(r, kHuge);
  for (size_t i = 0; i < kGroup; ++i) EXPECT_EQ(get(r + i * kSmall), i + 1001);
}

TEST_F(PagerAdapts, NeighboursOfBlocksThatWereLoadedAreKnownToBeUnchanged) {
  std::byte* const r = stored();
  for (size_t i = 0; i < kGroup; ++i) {
    EXPECT_EQ(get(r + i * kSmall), i + 1);
    engine->until_idle();
  }
  put(r + 30 * kSmall, 2000);
  EXPECT_EQ(pager->counters().write_protect_faults, 1u);
  const size_t protects = trap->calls("protect");
  evict(r, 30 * kSmall);
  EXPECT_EQ(trap->calls("protect"), protects) << "none has to be compared with what the store has";
  evict(r, kHuge);
  EXPECT_EQ(trap->calls("protect"), protects + 1);
  EXPECT_EQ(get(r + 30 * kSmall), 2000u);
}

TEST_F(PagerAdapts, RandomAdviceAndFixedBlocksReadOneBlock) {
  std::byte* const r = stored();
  EXPECT_TRUE(pager->advise(r, 2 * kHuge, VMEM_ADVISE_RANDOM, VMEM_HOST).ok());
  std::byte* const fixed = region(kGroup);
  for (size_t i = 0; i < kGroup; ++i) put(fixed + i * kSmall, i + 1);
  evict(fixed, kHuge);
  for (size_t i = 0; i < kGroup; ++i) {
    EXPECT_EQ(get(r + i * kSmall), i + 1);
    EXPECT_EQ(get(fixed + i * kSmall), i + 1);
  }
  EXPECT_EQ(stats().fault_around_blocks, 0u);
  EXPECT_EQ(stats().read_bytes, 2 * kHuge);
}

TEST_F(PagerAdapts, ZerosThatNobodyAskedForAreNotMade) {
  start(config());
  std::byte* const r = adapting(kHuge);
  for (size_t i = 0; i < 4; ++i) put(r + i * kSmall, i + 1);
  vmem_residency out = {};
  EXPECT_TRUE(pager->queries().query(r, kHuge, &out).ok());
  EXPECT_EQ(out.host_bytes, 4 * kSmall);
}

TEST_F(PagerAdapts, ANeighbourThatCannotBeReadHarmsNobody) {
  std::byte* const r = stored();
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(get(r + i * kSmall), i + 1);
  engine->until_idle();
  engine->fail(Io::Op::read, EIO);
  EXPECT_TRUE(bus(r + 4 * kSmall)) << "who asked for it is told";
  engine->until_idle();
  engine->fail(Io::Op::read, 0);
  for (size_t i = 5; i < 8; ++i) EXPECT_EQ(get(r + i * kSmall), i + 1) << "the others read for themselves";
}

TEST_F(PagerAdapts, AnAccessToANeighbourOnItsWayWaitsForThatRead) {
  std::byte* const r = stored();
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(get(r + i * kSmall), i + 1);
  engine->until_idle();
  engine->hold(Io::Op::read, true);
  auto first = getting(r + 4 * kSmall);
  engine->until_held(4);
  auto second = getting(r + 6 * kSmall);
  trap->until_quiet();
  auto third = putting(r + 7 * kSmall, 70);
  trap->until_quiet();
  EXPECT_EQ(engine->held(), 4u);
  engine->hold(Io::Op::read, false);
  engine->let_go();
  EXPECT_EQ(first.get(), 5u);
  EXPECT_EQ(second.get(), 7u);
  third.get();
  EXPECT_EQ(get(r + 7 * kSmall), 70u);
  EXPECT_EQ(stats().read_bytes, 8 * kSmall);
}

TEST_F(PagerAdapts, FreeingWhileNeighboursAreReadWaitsForThem) {
  std::byte* const r = stored();
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(get(r + i * kSmall), i + 1);
  engine->until_idle();
  engine->hold(Io::Op::read, true);
  auto reader = std::async(std::launch::async, [&] { return bus(r + 4 * kSmall); });
  engine->until_held(4);
  auto freed = calling([&] { return pager->destroy(r, false); });
  engine->hold(Io::Op::read, false);
  engine->let_go();
  EXPECT_TRUE(freed.get().ok());
  reader.wait();
}

// Half of the buffers stay reserved for faulted blocks, whatever could be read beside them.
TEST_F(PagerAdapts, NeighboursLeaveBuffersToFaults) {
  constexpr size_t kGroups = 6, kBuffers = (2 << 20) / kSmall;
  for (const uint64_t budget : {16 << 20, 24 << 20}) {  // buffers: an eighth of it, in steps of 2 MiB
    std::byte* const r = stored(config(budget), kGroups);
    for (size_t g = 0; g < kGroups; ++g) {
      for (size_t i = 0; i < kGroup / 2; ++i) EXPECT_EQ(get(r + (g * kGroup + i) * kSmall), g * kGroup + i + 1);
      engine->until_idle();
    }
    engine->hold(Io::Op::read, true);
    for (size_t g = 0; g < kGroups; ++g) {
      trap->report(r + (g * kGroup + kGroup / 2) * kSmall, trap::FaultKind::read);
      trap->until_quiet();
      EXPECT_EQ(engine->held(), std::min(kGroup / 2 * (g + 1), kBuffers / 2 + g + 1)) << "each fault is read for";
    }
    engine->hold(Io::Op::read, false);
    engine->let_go();
    engine->until_idle();
    for (size_t i = 0; i < kGroups * kGroup; ++i) EXPECT_EQ(get(r + i * kSmall), i + 1);
    TearDown();
    pager.reset();
  }
}

TEST_F(PagerAdapts, ABudgetOfFewBlocksIsKept) {
  std::byte* const r = stored(config(4 << 20));
  for (int round = 0; round < 2; ++round)
    for (size_t i = 0; i < 2 * kGroup; ++i) EXPECT_EQ(get(r + i * kSmall), i + 1);
  EXPECT_LE(stats().host_bytes, uint64_t{4} << 20);
}

}  // namespace
}  // namespace vmem::pager::test
