// The table of blocks: its named changes, and counts that always agree with the entries.
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "edit_block.h"
#include "pager/block/block_table.h"

namespace vmem::core {
namespace {

constexpr size_t kStates = static_cast<size_t>(State::count_);

State state(size_t i) {
  return static_cast<State>(i);
}

// The named changes but begin_promote and forget_contents, the states that each starts from, and the
// state that it leads to.
struct Named {
  void (BlockTable::*change)(BlockIndex);
  std::set<State> from;
  State to;  // unpopulated: stored, if the block has an extent
};
const std::vector<Named>& named_changes() {
  using enum State;
  const std::set<State> taken = {isolating, writing_back};
  static const std::vector<Named> all = {
      {&BlockTable::begin_read, {unpopulated, stored, poisoned}, reading},
      {&BlockTable::end_read, {reading}, staged},
      {&BlockTable::abandon_read, {reading}, unpopulated},
      {&BlockTable::begin_install, {reading, staged, isolating, writing_back}, mapping},
      {&BlockTable::end_install, {mapping}, resident},
      {&BlockTable::abandon_install, {mapping}, staged},
      {&BlockTable::begin_isolate, {staged, resident}, isolating},
      {&BlockTable::begin_write, {isolating}, writing_back},
      {&BlockTable::keep_staged, taken, staged},
      {&BlockTable::keep_in_place, taken, resident},
      {&BlockTable::let_go, taken, unpopulated},
      {&BlockTable::end_promote, {promoting}, on_device},
      {&BlockTable::abandon_promote, {promoting}, unpopulated},
      {&BlockTable::abandon_promote_staged, {promoting}, staged},
      {&BlockTable::begin_demote, {on_device}, demoting},
      {&BlockTable::abandon_demote, {demoting}, on_device},
      {&BlockTable::end_demote, {demoting}, unpopulated},
      {&BlockTable::end_demote_staged, {demoting}, staged},
      {&BlockTable::end_demote_in_place, {demoting}, resident},
      {&BlockTable::poison, {unpopulated, stored, reading, mapping, isolating, promoting, demoting}, poisoned},
      {&BlockTable::revive, {poisoned}, unpopulated},
  };
  return all;
}

TEST(Extent, KeepsEachOfItsPartsAtItsLargest) {
  constexpr uint64_t kLast = (Extent::kMostOffsetPages - 1) * kPage;
  static_assert(kLast >= (uint64_t{1} << 50) - kPage, "1 PiB, the largest ssd_budget");
  for (const uint64_t offset : {uint64_t{0}, kPage, kLast}) {
    for (const size_t length : {kPage, kMaxBlock, kMaxBlock + kPage}) {
      for (const unsigned path : {0u, kMaxStorePaths - 1}) {
        for (unsigned codec = 0; codec < 4; ++codec) {
          const Extent e = Extent::make(path, offset, length, codec);
          ASSERT_TRUE(e);
          ASSERT_EQ(e.offset(), offset);
          ASSERT_EQ(e.length(), length);
          ASSERT_EQ(e.path(), path);
          ASSERT_EQ(e.codec(), codec);
        }
      }
    }
  }
}

TEST(CoreBlockTable, NamedChangesLeadWhereTheirNamesSay) {
  BlockTable table;
  ASSERT_TRUE(table.create(1000).ok());
  BlockIndex block = 0;
  std::map<State, uint64_t> counts;
  for (const Named& named : named_changes()) {
    for (const State from : named.from) {
      for (const bool has_extent : {false, true}) {
        if (from != State::unpopulated) change(table, block, State::unpopulated, from);
        if (has_extent) table.set_extent(block, Extent::make(0, 0, kPage, 0));
        (table.*named.change)(block);
        EXPECT_EQ(table[block].state, named.to == State::unpopulated && has_extent ? State::stored : named.to)
            << state_name(from);
        ++counts[table[block].state];
        ++block;
      }
    }
  }
  for (size_t s = 1; s < kStates; ++s) EXPECT_EQ(table.count(state(s)), counts[state(s)]) << state_name(state(s));
  EXPECT_EQ(table.check(), "");
}

TEST(CoreBlockTable, CheckNoticesAStateThatWasWrittenBesideChange) {
  BlockTable table;
  ASSERT_TRUE(table.create(8).ok());
  change(table, 3, State::unpopulated, State::reading);
  EXPECT_EQ(table.check(), "");
  edit(table, 3).state = State::resident;
  EXPECT_NE(table.check(), "");
}

TEST(CoreBlockTableDeathTest, ANamedChangeFromAnotherStateEndsTheProcessWithWords) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  for (const Named& named : named_changes()) {
    size_t other = 1;
    while (named.from.count(state(other)) != 0) ++other;
    BlockTable table;
    ASSERT_TRUE(table.create(8).ok());
    change(table, 5, State::unpopulated, state(other));
    EXPECT_DEATH((table.*named.change)(5), std::string("block 5: it is ") + state_name(state(other)) +
                                               ", and cannot become " + state_name(named.to) + " here");
  }
}

TEST(CoreBlockTableDeathTest, OnlyWhatIsStoredForgetsItsContents) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  BlockTable table;
  ASSERT_TRUE(table.create(8).ok());
  change(table, 2, State::unpopulated, State::stored);
  table.forget_contents(2);
  EXPECT_EQ(table[2].state, State::unpopulated);
  EXPECT_DEATH(table.forget_contents(2), "block 2: it is unpopulated, and cannot become unpopulated here");
}

TEST(CoreBlockTableDeathTest, APromotionBeginsWhereNoOtherThreadOwnsTheBlock) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  BlockTable table;
  ASSERT_TRUE(table.create(8).ok());
  for (const State from : {State::unpopulated, State::stored, State::staged, State::isolating}) {
    const BlockIndex b = static_cast<BlockIndex>(from);
    if (from != State::unpopulated) change(table, b, State::unpopulated, from);
    table.begin_promote(b, 1);
    EXPECT_EQ(table[b].state, State::promoting) << state_name(from);
    EXPECT_EQ(table[b].device, 1);
  }
  EXPECT_DEATH(table.begin_promote(0, 1), "block 0: it is promoting, and cannot become promoting here");
}

TEST(CoreBlockTable, NextTouchedSkipsChunksAndMissesNothing) {
  BlockTable table;
  constexpr uint64_t kBlocks = 100000;
  ASSERT_TRUE(table.create(kBlocks).ok());
  EXPECT_EQ(table.next_populated(0), kBlocks);
  EXPECT_EQ(table.next_populated(kBlocks), kBlocks);
  const std::set<uint64_t> changed = {0, 2047, 2048, 50000, kBlocks - 1};
  for (uint64_t b : changed) change(table, b, State::unpopulated, State::reading);
  std::set<uint64_t> found;
  uint64_t visited = 0;
  for (uint64_t b = table.next_populated(0); b < kBlocks; b = table.next_populated(b + 1)) {
    ++visited;
    if (table[b].state != State::unpopulated) found.insert(b);
  }
  EXPECT_EQ(found, changed);
  EXPECT_LE(visited, 5u * 128) << "pages of the table that nobody changed are skipped";
}

TEST(CoreBlockTable, AHugeTableCostsAddressSpaceOnly) {
  BlockTable table;
  const uint64_t blocks = uint64_t{1} << 32;  // 16 TiB of 4 KiB blocks
  ASSERT_TRUE(table.create(blocks).ok());
  const size_t none = table.footprint();
  EXPECT_LE(none, blocks * 32 / 32768);
  change(table, blocks - 1, State::unpopulated, State::reading);
  EXPECT_LE(table.footprint() - none, 4097u);
  // Found in steps, each of them short.
  uint64_t b = 0, steps = 0;
  for (; b < blocks - 128; ++steps) b = table.next_populated(b);
  EXPECT_EQ(b, blocks - 128);
  EXPECT_GT(steps, 100u);
  EXPECT_LT(steps, 10000u);
  EXPECT_EQ(table.check(), "");
}

TEST(CoreBlockTable, PagesWhoseBlocksAreUntouchedAgainAreGivenBack) {
  BlockTable table;
  const uint64_t blocks = uint64_t{8} << 20;  // 16 TiB of 2 MiB blocks
  ASSERT_TRUE(table.create(blocks).ok());
  const size_t none = table.footprint();
  for (uint64_t b = 0; b < blocks; b += 1000) {
    change(table, b, State::unpopulated, State::reading);
    edit(table, b).digest = {1, 2};
    edit(table, b).flags |= kDigest;
    change(table, b, State::reading, State::unpopulated);
    ASSERT_LE(table.footprint() - none, 18u * 4097) << b;
  }
  EXPECT_EQ(table.check(), "");
  EXPECT_EQ(table.next_populated(0), blocks);
}

TEST(CoreBlockTable, APageIsKeptWhileABlockInItHasMoreToSay) {
  BlockTable table;
  ASSERT_TRUE(table.create(uint64_t{1} << 20).ok());
  const auto touch = [&](uint64_t b) {
    change(table, b, State::unpopulated, State::reading);
    change(table, b, State::reading, State::unpopulated);
  };
  touch(7);
  edit(table, 9).flags |= kWaitsForMemory;  // a thread waits for it
  change(table, 300, State::unpopulated, State::reading);
  change(table, 300, State::reading, State::stored);
  touch(301);
  for (uint64_t b = 1000; b < 500000; b += 1000) touch(b);
  EXPECT_EQ(table[9].flags, kWaitsForMemory);
  EXPECT_EQ(table[300].state, State::stored);
  EXPECT_EQ(table.check(), "");
}

TEST(CoreBlockTable, StatesThatAreOwnedAndStatesThatOccupyMemory) {
  const std::set<State> moving = {State::reading,      State::mapping,   State::isolating,
                                  State::writing_back, State::promoting, State::demoting};
  const std::set<State> memory = {State::reading,  State::staged,    State::mapping,
                                  State::resident, State::isolating, State::writing_back};
  std::set<std::string> names;
  for (size_t s = 0; s < kStates; ++s) {
    EXPECT_EQ(in_transition(state(s)), moving.count(state(s)) != 0) << state_name(state(s));
    EXPECT_EQ(in_memory(state(s)), memory.count(state(s)) != 0) << state_name(state(s));
    EXPECT_TRUE(names.insert(state_name(state(s))).second);
  }
  EXPECT_STREQ(state_name(State::count_), "?");
}

}  // namespace
}  // namespace vmem::core
